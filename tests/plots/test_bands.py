"""Pictures of memory: every band is there and named, in colors that a reader can tell apart."""

from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.colors import to_rgb

from ucudnn.errors import InvalidValueError
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.plots import MemoryPicture, draw_front, draw_memory
from ucudnn.plots.bands import front_figure, memory_figure
from ucudnn.plots.style import GIB


def picture(layers=4):
    rise = [index * GIB for index in (1, 2, 3, 3, 2, 1)]
    return MemoryPicture(
        times_ms=[0, 1, 2, 3, 4, 5, 6],
        staying={"parameters": [GIB] * 6, "optimizer state": [GIB // 50] * 6},
        saved={f"saved by layer{index}": rise for index in range(layers)},
        rest={"gradients of activations": [0, 0, 0, GIB, 2 * GIB, 0], "scratch": [0, GIB // 4, 0, 0, 0, 0]},
        marks=[("floor 4 GiB", 4 * GIB)],
        peak="peak 16 GiB: relu in layer1",
        phases=[("forward", 0), ("backward", 3), ("optimizer", 5.9)],
    )


def texts(figure):
    (axes,) = figure.axes
    named = [text for legend in figure.legends for text in legend.texts]
    return [each.get_text() for each in (*axes.texts, *named)]


def test_every_band_mark_and_phase_is_named():
    found = texts(memory_figure(picture(), "title"))
    names = ["parameters", *(f"saved by layer{index}" for index in range(4)), "gradients of activations", "scratch"]
    for name in (*names, "peak 16 GiB: relu in layer1", "floor 4 GiB", "forward", "backward", "optimizer"):
        assert found.count(name) == 1, name


def test_a_band_that_cannot_be_seen_has_no_name():
    small = picture()
    small.staying["optimizer state"][:] = [1] * 6
    assert "optimizer state" not in texts(memory_figure(small, "title"))


def test_bands_add_up_to_the_memory():
    figure = memory_figure(picture(), "title")
    (axes,) = figure.axes
    tops = [max(y for path in band.get_paths() for _, y in path.vertices) for band in axes.collections]
    assert max(tops) == pytest.approx(1 + 1 / 50 + 4 * 3 + 1, abs=0.1)


def test_colors_differ():
    figure = memory_figure(picture(5), "title")
    (axes,) = figure.axes
    colors = [tuple(band.get_facecolor()[0][:3]) for band in axes.collections]
    assert len(colors) == 9
    for one, other in combinations(colors, 2):
        assert sum(abs(a - b) for a, b in zip(to_rgb(one), to_rgb(other), strict=True)) > 0.15


def test_bands_are_named_from_the_top_as_they_lie_in_their_color():
    figure = memory_figure(picture(), "title")
    (axes,) = figure.axes
    names, *others = [[each.get_text() for each in legend.texts] for legend in figure.legends]
    assert not others
    assert names[0] == "scratch"
    assert names[-1] == "parameters"
    patches = [to_rgb(each.get_facecolor()) for each in figure.legends[0].get_patches()]
    colors = [to_rgb(band.get_facecolor()[0]) for band in axes.collections]
    del colors[1]  # of the optimizer's state, which is too thin to be seen
    assert patches == colors[::-1]


def test_fronts_are_lines_from_small_peaks_to_large_ones_with_their_names_beside_the_picture():
    fronts = {"stock": [(8 * GIB, 10.0)], "none": [], "checkpoint": [(6 * GIB, 12.0), (4 * GIB, 15.0)]}
    fronts |= {f"swap-{index}": [(20 * GIB, 900.0)] for index in range(5)}
    figure = front_figure(fronts, [("floor 2 GiB", 2 * GIB)], "title")
    (axes,) = figure.axes
    assert [each.get_text() for each in axes.texts] == ["floor 2 GiB"]
    assert [[*line.get_xdata()] for line in axes.lines][1] == [4.0, 6.0]
    assert [each.get_text() for each in figure.legends[0].texts] == [name for name in fronts if name != "none"]
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert not legend.overlaps(axes.get_window_extent())
    assert all(figure.bbox.contains(*corner) for corner in legend.corners())
    looks = [(line.get_color(), line.get_marker()) for line in axes.lines[:-1]]
    assert len({*looks}) == len(looks) == 7
    assert axes.get_yscale() == "log"


def test_of_many_policies_those_have_a_name_that_are_the_fastest_somewhere():
    fronts = {"stock": [(8, 10.0)], "joint": [(4, 15.0), (8, 10.0)], "checkpoint": [(4, 16.0)], "spill": [(3, 17.0)]}
    fronts |= {name: [(5, 16.0), (8, 10.0)] for name in POLICIES if name not in fronts}
    figure = front_figure(fronts)
    names = [each.get_text() for each in figure.legends[0].texts]
    assert names == [f"{len(POLICIES) - 3} others", "stock", "joint", "spill"]
    assert len(figure.axes[0].lines) == len(POLICIES)
    assert figure.axes[0].get_yscale() == "linear"


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(InvalidValueError, match="there is nothing to draw"):
        draw_front({"stock": []}, tmp_path / "front.png")
    nothing = {"staying": {}, "saved": {}, "rest": {"scratch": [0] * (len(picture().times_ms) - 1)}}
    no_time = {"times_ms": [0.0] * len(picture().times_ms)}
    for changes in (no_time, nothing):
        with pytest.raises(InvalidValueError, match="there is nothing to draw"):
            draw_memory(replace(picture(), **changes), tmp_path / "memory.png")
    assert not [*tmp_path.iterdir()]
