"""Pictures: their bars add up, their text is legible, and their file is written whole or not at all."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from tests.support.reports import kernel_report, make_report
from tests.support.strategies import examples
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import InvalidValueError
from ucudnn.plots import check_picture, draw_configurations, draw_division, draw_groups, draw_layers, into_file
from ucudnn.plots.bars import configurations_figure, division_figure, groups_figure, layers_figure
from ucudnn.plots.points import _notes, desirable_figure
from ucudnn.plots.style import MIB, bar_pieces, looks_of, new_figure, shaded
from ucudnn.slabs import Slab

OPERATIONS = ("Forward", "BackwardData", "BackwardFilter")
MAGIC = {"png": b"\x89PNG", "pdf": b"%PDF-", "svg": b"<?xml"}


def network(*names, ms=2.0, **values):
    kernels = [
        kernel_report(layer=name, operation=operation, count=1, micro_batched_ms=ms, **values)
        for name in names
        for operation in OPERATIONS
    ]
    return make_report(*kernels)


def configuration(size, count, algorithm="GEMM", time_ms=1.0, workspace_bytes=0):
    part = MicroConfiguration(size=size, algorithm=algorithm, time_ms=time_ms / count, workspace_bytes=workspace_bytes)
    return Configuration(parts=(part,) * count)


def front(points):
    engines = ("eng1", "eng38", "eng67", "eng20", "eng34", "eng50", "eng11", "eng4")
    return [
        configuration(
            size=2 ** (index % 9),
            count=2 ** (8 - index % 9),
            algorithm=f"{engines[index % 8]}_k2={index % 3}",
            time_ms=40 * 0.93**index,
            workspace_bytes=round(2**17 * 1.25**index) if index else 0,
        )
        for index in range(points)
    ]


def stacks(figure, panel=0):
    """Return the height of each bar by its place, as matplotlib has drawn it."""
    heights = {}
    for patch in figure.axes[panel].patches:
        place = round(patch.get_x() + patch.get_width() / 2, 6)
        heights[place] = heights.get(place, 0.0) + patch.get_height()
    return [heights[place] for place in sorted(heights)]


def texts(figure):
    unseen = set()  # matplotlib keeps labels of ticks beyond the limits
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        unseen |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    found = [each for each in figure.findobj(Text) if each.get_visible() and each.get_text().strip()]
    return [each for each in found if each not in unseen]


def numbers(figure):
    """Return the texts in pieces of bars, from bar to bar."""
    return [each.get_text() for each in figure.axes[0].texts if each.get_va() == "center" and each.get_bbox_patch()]


def entries(figure):
    return [each.get_text() for legend in figure.legends for each in legend.get_texts()]


def beside(figure, panel=0):
    """Return the names beside the bars, from the top."""
    axes = figure.axes[panel]
    names = [each for each in axes.texts if each.get_position()[0] > axes.get_xlim()[1]]
    return [each.get_text() for each in sorted(names, key=lambda each: -each.get_position()[1])]


def check_legible(figure):
    """Check that texts are large enough, lie inside the picture, and do not overlap."""
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    boxes = [(each.get_text(), each.get_window_extent().extents.tolist()) for each in texts(figure)]
    assert min(each.get_fontsize() for each in texts(figure)) >= 7
    for text, (left, bottom, right, top) in boxes:
        assert -1 <= left <= right <= width + 1, text
        assert -1 <= bottom <= top <= height + 1, text
    for (text, (left, bottom, right, top)), (other, beside) in combinations(boxes, 2):
        across = min(right, beside[2]) - max(left, beside[0])
        down = min(top, beside[3]) - max(bottom, beside[1])
        assert across <= 1 or down <= 1, f"{text!r} is upon {other!r}"
    covered = figure.axes[0].get_window_extent()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert not (box.x0 < covered.x1 - 1 and box.y1 > covered.y0 + 1), "a legend covers bars"


KERNELS = st.lists(
    st.tuples(
        st.integers(0, 40), st.sampled_from(OPERATIONS), st.integers(1, 4), st.floats(1e-3, 1e3), st.integers(0, 2**32)
    ),
    min_size=1,
    max_size=30,
)


@examples(1 / 15)  # which draw pictures
@given(st.lists(KERNELS, min_size=1, max_size=3), st.booleans())
def test_bars_are_as_tall_as_what_they_show(given, modules):
    reports = [
        make_report(
            *(
                kernel_report(
                    layer=f"m{layer % 15}.conv{layer}" if modules else f"conv{layer}",
                    operation=operation,
                    count=count,
                    micro_batched_ms=time_ms,
                    workspace_bytes=size,
                )
                for layer, operation, count, time_ms, size in kernels
            )
        )
        for kernels in given
    ]
    bars = [(f"bar\n{index}", report) for index, report in enumerate(reports)]
    assert stacks(layers_figure(bars, "")) == pytest.approx([each.total("micro_batched_ms") for each in reports])
    drawn = [each.workspace_bytes / MIB for each in reports]
    figure = division_figure(bars, "")
    assert stacks(figure) == pytest.approx([each.total("micro_batched_ms") for each in reports])
    assert sum(stacks(figure, 1)) == pytest.approx(sum(drawn), abs=1e-9)
    assert sum(stacks(division_figure(bars, "", times=False))) == pytest.approx(sum(drawn), abs=1e-9)


def test_executed_times_replace_predicted_ones():
    plain, executed = network("conv1"), network("conv1", executed_ms=5.0, undivided_executed_ms=6.0)
    assert layers_figure([("a", plain)], "").axes[0].get_ylabel() == "predicted time in ms"
    figure = layers_figure([("a", executed)], "")
    assert figure.axes[0].get_ylabel() == "executed time in ms"
    assert stacks(figure) == pytest.approx([15.0])


def test_layers_are_named_beside_the_last_bar_as_they_are_stacked():
    report = make_report(kernel_report(layer="conv1", count=1), kernel_report(layer="conv2", count=3))
    figure = layers_figure([("a", report)], "")
    assert beside(figure) == ["conv2 ×3", "conv1"]
    assert entries(figure) == ["Forward"]


def test_branches_that_the_last_bar_lacks_have_numbers_in_a_legend_and_in_pieces_with_room():
    small = kernel_report(layer="c", count=1, workspace_bytes=MIB // 64)
    two = make_report(kernel_report(layer="b", count=1, workspace_bytes=MIB), small)
    bars = [("one", network("a", "b", workspace_bytes=MIB)), ("two", two)]
    figure = division_figure(bars, "", times=False)
    assert beside(figure) == []
    assert {"1 a", "2 b", "3 c"} < {*entries(figure)}
    assert numbers(figure) == [*"111222", "2"]  # each operation is a piece


def test_a_division_shows_what_it_buys_and_layers_without_workspace():
    slow = make_report(
        kernel_report(layer="conv1", count=1, micro_batched_ms=3.0, workspace_bytes=0),
        kernel_report(layer="conv2", count=1, micro_batched_ms=4.0, workspace_bytes=MIB),
    )
    fast = make_report(
        kernel_report(layer="conv1", count=1, micro_batched_ms=3.0, workspace_bytes=0),
        kernel_report(layer="conv2", count=1, micro_batched_ms=1.0, workspace_bytes=4 * MIB),
    )
    figure = division_figure([("WR", slow), ("WD", fast)], "")
    assert [each.get_ylabel() for each in figure.axes] == ["predicted time in ms", "workspace in MiB"]
    assert stacks(figure) == pytest.approx([7.0, 4.0])
    assert stacks(figure, 1) == pytest.approx([1.0, 4.0])
    assert beside(figure) == beside(figure, 1) == ["conv2", "conv1"]
    both = make_report(*(kernel_report(layer=f"conv{each}", count=3, workspace_bytes=each * MIB) for each in (1, 2)))
    figure = division_figure([("shared", both), ("WD", both)], "", shared=["shared"])
    assert stacks(figure, 1) == pytest.approx([2.0, 9.0])
    assert stacks(figure)[0] == stacks(figure)[1]


def test_many_layers_are_drawn_by_module_and_small_ones_joined():
    names = [f"net.block{block}.conv{layer}" for block in range(5) for layer in range(9)]
    assert beside(layers_figure([("a", network(*names))], "")) == [f"net.block{each}" for each in (4, 3, 2, 1, 0)]
    flat = layers_figure([("a", network(*(f"conv{each}" for each in range(45))))], "")
    assert beside(flat)[0] == "other layers"
    assert len(beside(flat)) == 1 + 8
    assert entries(flat) == [*OPERATIONS]


def test_matplotlib_does_not_interpret_names():
    names = ["_hidden", "$x_1$", "50% #1"]
    assert beside(layers_figure([("a", network(*names))], "")) == names[::-1]
    assert names[0] in [each.strip() for each in entries(desirable_figure([configuration(1, 1, names[0])], ""))]


def test_shades_and_algorithms_are_told_apart_in_grey():
    def lightness(color):
        red, green, blue = to_rgb(color)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    shades = [lightness(look.color) for look in shaded([f"conv{each}" for each in range(12)])]
    assert all(after - before > 0.02 for before, after in pairwise(shades))
    looks = [*looks_of(front(40)).values()]
    assert len({(look.color, look.hatch) for look in looks}) == len({look.label for look in looks}) == 24
    plain = sorted(lightness(look.color) for look in looks if not look.hatch)
    assert len(plain) == 2
    assert plain[1] - plain[0] > 0.2


@pytest.mark.parametrize(
    "figure",
    [
        lambda: layers_figure([("8 MiB\nundivided", network("only"))], "one layer"),
        lambda: layers_figure(
            [(f"{mib} MiB\n{each}", network(*"abcde")) for mib in (8, 64, 512) for each in ("undivided", "powerOfTwo")],
            "as figure 10",
        ),
        lambda: layers_figure([("a", network(*(f"Mixed_5b.branch5x5_{each}" for each in range(20))))], "long names"),
        lambda: division_figure(
            [(f"module{each} forward", network(*"abcdefghijkl", workspace_bytes=MIB)) for each in range(14)], "branches"
        ),
        lambda: division_figure([("WR\n0 each", network("a", workspace_bytes=0))], "no workspace"),
        lambda: groups_figure(
            [f"conv{layer}\n{each}" for layer in range(5) for each in OPERATIONS],
            {"best": [1.0] * 15, "-1 byte": [2.0] * 14 + [None]},
            "time in ms",
            "as figure 1",
        ),
        lambda: configurations_figure([(f"p{each}", every) for each, every in enumerate(front(15))], "fifteen"),
        lambda: configurations_figure([("all", configuration(1, 256))], "256 micro-batches"),
        lambda: desirable_figure(front(1), "one configuration"),
        lambda: desirable_figure(front(2), "two"),
        lambda: desirable_figure(front(9), "as figure 8"),
        lambda: desirable_figure(front(40), "forty"),
    ],
)
def test_pictures_are_legible(figure):
    check_legible(figure())


def test_a_missing_bar_is_not_drawn():
    figure = groups_figure(["a", "b"], {"one": [1.0, None], "two": [3.0, 4.0]}, "time in ms", "")
    assert sorted(patch.get_height() for patch in figure.axes[0].patches) == [1.0, 3.0, 4.0]


def test_rows_have_a_piece_for_each_micro_batch_with_its_size():
    rows = [("undivided", configuration(256, 1, "A", 2.0)), ("all", configuration(64, 4, "B", 1.0))]
    figure = configurations_figure(rows, "")
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths == pytest.approx([2.0, 0.25, 0.25, 0.25, 0.25])
    assert [each.get_text() for each in figure.axes[0].texts] == ["2 ms", "1 ms", "256", *["64"] * 4]


def test_slabs_are_pieces_of_their_micro_batch():
    slabs = [
        SlabConfiguration(slab=Slab(first=first, rows=rows), algorithm=name, time_ms=time_ms, workspace_bytes=5)
        for first, rows, name, time_ms in ((0, 6, "FFT", 3.0), (6, 2, "GEMM", 1.0))
    ]
    parts = (MicroConfiguration.of_slabs(1, slabs), *configuration(size=1, count=1, time_ms=4.0).parts)
    divided = Configuration(parts=parts)
    assert [(piece.text, piece.share) for piece in bar_pieces(divided)] == [
        ("6 rows", 0.375),
        ("2 rows", 0.125),
        ("1", 0.5),
    ]
    figure = configurations_figure([("all", divided)], "title")
    assert [bar.get_width() for bar in figure.axes[0].patches] == [3.0, 1.0, 4.0]
    assert {"6 rows", "1"} <= {each.get_text() for each in texts(figure)}
    assert "1 in 2+1" in {each.get_text() for each in texts(desirable_figure([divided], "title"))}
    assert set(looks_of([divided])) == {"FFT", "GEMM"}


def test_points_of_a_desirable_set_are_where_they_belong():
    configurations = front(9)
    figure = desirable_figure(configurations, "")
    drawn = figure.axes[0].lines[0].get_xydata().tolist()
    assert drawn == [pytest.approx([each.workspace_bytes / MIB, each.time_ms]) for each in configurations]
    assert {"256×1", "128×2", "256"} <= {each.get_text() for each in figure.axes[0].texts}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60), st.floats(0.1, 0.3))
def test_notes_leave_each_other_room(steps, width):
    places = [*zip(sorted(x for x, _ in steps), sorted((y for _, y in steps), reverse=True), strict=True)]
    notes = _notes(places, [width] * len(places))
    assert all(0 < note.left < note.right <= 1.01 and 0 < note.bottom < 1 for note in notes.values())
    assert all(one.leaves_room(other) for one, other in combinations(notes.values(), 2))


@pytest.mark.parametrize("suffix", MAGIC)
def test_the_suffix_says_the_format(tmp_path, suffix):
    path = tmp_path / f"picture.{suffix.upper()}"
    draw_groups(["a", "b"], path, {"one": [1.0, 2.0]}, ylabel="time in ms")
    assert path.read_bytes().startswith(MAGIC[suffix])


def test_a_name_without_a_suffix_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match=r"no name of a picture: it must end in \.pdf, \.png, \.svg"):
        check_picture(tmp_path / "picture")


def test_an_empty_picture_is_refused(tmp_path):
    for draw in (draw_layers, draw_division, draw_configurations):
        with pytest.raises(InvalidValueError, match="there is nothing to draw"):
            draw([], tmp_path / "picture.png")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("suffix", MAGIC)
def test_a_picture_that_fails_leaves_the_old_one(tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    path.write_bytes(b"old")

    def fail(*arguments):
        raise ZeroDivisionError

    figure, _ = new_figure("")
    figure.axes[0].draw = fail  # while the file is being written
    with pytest.raises(ZeroDivisionError):
        into_file(lambda drawn: figure)(["a"], path)
    assert path.read_bytes() == b"old"
