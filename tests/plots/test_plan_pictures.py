"""Pictures of a plan: every piece of work and of memory is where and when it was."""

from dataclasses import replace

from ucudnn.plots import AddressPicture, QueuePicture
from ucudnn.plots.bands import addresses_figure, queues_figure
from ucudnn.plots.style import GIB


def queues():
    return QueuePicture(
        lanes={
            "compute": [("forward", 0, 4), ("backward", 4, 9), ("recomputation", 9, 10)],
            "D2H": [("to the host", 1, 5)],
            "H2D": [("from the host", 6, 8.5)],
        },
        memory=[(0, GIB), (2, 3 * GIB), (8, 2 * GIB)],
        end_ms=10,
        marks=[("peak 3 GiB", 3 * GIB), ("budget 4 GiB", 4 * GIB)],
        phases=[("forward", 0), ("backward", 4)],
    )


def boxes(collection):
    """Return (left, bottom, right, top) of the boxes of a collection."""
    found = [path.get_extents() for path in collection.get_paths()]
    return [(box.x0, box.y0, box.x1, box.y1) for box in found]


def test_each_queue_is_a_lane_with_its_work_and_the_memory_lies_below():
    figure = queues_figure(queues(), "title")
    lanes, memory = figure.axes
    assert [each.get_text() for each in lanes.get_yticklabels()] == ["compute", "D2H", "H2D"]
    drawn = sorted((left, right, round((low + high) / 2)) for each in lanes.collections
                   for left, low, right, high in boxes(each))  # fmt: skip
    assert drawn == [(0, 4, 0), (1, 5, 1), (4, 9, 0), (6, 8.5, 2), (9, 10, 0)]
    assert len({tuple(each.get_facecolor()[0]) for each in lanes.collections}) == 5
    curve = memory.lines[0]
    assert list(zip(*curve.get_data(), strict=True)) == [(0, 1), (2, 3), (8, 2), (10, 2)]
    texts = [each.get_text() for axes in figure.axes for each in axes.texts]
    assert sorted(texts) == ["backward", "budget 4 GiB", "forward", "peak 3 GiB"]
    legend = [each.get_text() for each in figure.legends[0].texts]
    assert legend == ["forward", "backward", "recomputation", "to the host", "from the host"]


def test_measured_memory_is_a_curve_of_its_own_with_names_for_both():
    picture = replace(queues(), measured=[(0, 2 * GIB), (4, 5 * GIB)])
    figure = queues_figure(picture, "title")
    memory = figure.axes[1]
    assert list(zip(*memory.lines[1].get_data(), strict=True)) == [(0, 2), (4, 5), (10, 5)]
    assert memory.lines[0].get_color() != memory.lines[1].get_color()
    assert memory.get_ylim()[1] > 5
    legend = [each.get_text() for each in figure.legends[0].texts]
    assert legend[-2:] == ["predicted memory", "measured memory"]


def test_two_marks_that_are_near_have_their_texts_at_different_ends():
    _, memory = queues_figure(queues(), "title").axes
    assert [each.get_ha() for each in memory.texts] == ["left", "right"]


def test_each_piece_is_a_box_of_its_addresses_and_its_time():
    pieces = [("made in forward", 0, GIB, 0, 5), ("scratch", GIB, GIB // 2, 1, 2), ("made in forward", GIB, GIB, 3, 5)]
    picture = AddressPicture(pieces=pieces, extent_bytes=2 * GIB, live_bytes=2 * GIB, end_ms=6)
    figure = addresses_figure(picture, "title")
    (axes,) = figure.axes
    assert sorted(box for each in axes.collections for box in boxes(each)) == [
        (0, 0, 5, 1),
        (1, 1, 2, 1.5),
        (3, 1, 5, 2),
    ]
    assert [each.get_text() for each in axes.texts] == ["pool: 0.0% above what is alive at most"]
    assert [each.get_text() for each in figure.legends[0].texts] == ["made in forward", "scratch"]
