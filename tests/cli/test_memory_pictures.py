"""`ucudnn memory plan --timeline --addresses`: what is drawn of a plan is what the simulation says."""

import pickle

import pytest

from tests.support.noted import noted
from tests.support.step_graphs import small_line
from ucudnn.cli import memory_pictures
from ucudnn.cli.memory_pictures import PictureOptions
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.reports.comparison import compare_policies
from ucudnn.plots.bands import COLORS


@pytest.fixture
def pictures(monkeypatch):
    """Return what is drawn instead of drawing it."""
    drawn = []
    for name in ("draw_queues", "draw_addresses"):
        monkeypatch.setattr(memory_pictures, name, lambda picture, path, title: drawn.append((picture, path, title)))
    return drawn


def planned(policy="vdnn-all-p"):
    """Return a plan's row in the table, and its costs."""
    builder = small_line()
    costs = builder.costs()
    (row,) = compare_policies(builder.graph(), costs, None, [policy]).rows
    return row, costs


def test_the_lanes_are_the_simulations_queues(pictures):
    row, costs = planned()
    PictureOptions(timeline="line.png").draw(row, costs)
    ((picture, path, title),) = pictures
    assert path == "line.png"
    assert "vdnn-all-p" in title
    assert [*picture.lanes] == ["compute", "D2H", "H2D"]
    assert sum(map(len, picture.lanes.values())) == len(row.done.timeline)
    assert {kind for kind, *_ in picture.lanes["compute"]} == {"forward", "backward"}
    assert {kind for kind, *_ in picture.lanes["D2H"]} == {"to the host"}
    assert {kind for kind, *_ in picture.lanes["H2D"]} == {"from the host"}
    assert max(end for work in picture.lanes.values() for *_, end in work) == row.done.time_ms == picture.end_ms
    assert picture.memory == row.done.memory
    assert [name for name, _ in picture.phases] == ["forward", "backward"]


@pytest.mark.parametrize("pool", ["best fit", "two-ended", "planned"])
def test_pieces_that_are_alive_together_share_no_address(pictures, pool):
    row, costs = planned()
    PictureOptions(addresses="map.png", pool=pool).draw(row, costs)
    ((picture, _, title),) = pictures
    assert title.endswith(f"{pool} pool")
    assert len(picture.pieces) == len(row.done.lifetimes) > 5
    assert {kind for kind, *_ in picture.pieces} == {"made in forward", "made in backward", "back from the host"}
    for index, (_, address, size, begin, end) in enumerate(picture.pieces):
        assert 0 <= begin <= end <= picture.end_ms
        for _, other, extent, first, last in picture.pieces[:index]:
            assert begin >= last or first >= end or address >= other + extent or other >= address + size


def test_every_kind_of_work_and_of_memory_has_a_color(pictures):
    for policy in ("vdnn-all-p", "checkpoint"):
        PictureOptions(timeline="line.png", addresses="map.png").draw(*planned(policy))
    drawn = [work for picture, *_ in pictures[::2] for work in picture.lanes.values()]
    drawn += [picture.pieces for picture, *_ in pictures[1::2]]
    kinds = {kind for each in drawn for kind, *_ in each}
    assert {"from the host", "back from the host", "recomputation", "recomputed"} <= kinds <= set(COLORS)


@pytest.fixture
def call(call, monkeypatch, tmp_path):
    """Run `ucudnn memory plan alexnet` in an empty folder; return exit status and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status, _, error = call("memory", "plan", "alexnet", *arguments)
        return status, error

    return run


def test_the_command_draws_both_pictures_and_writes_a_snapshot(call, tmp_path):
    files = ("--timeline", "queues.svg", "--addresses", "pool.png", "--snapshot", "plan.pickle")
    status, error = call("--policy", "vdnn-all-p", *files)
    assert status == 0, error
    text = (tmp_path / "queues.svg").read_text()
    assert "from the host" in text
    assert "D2H" in text
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")
    actions = {entry["action"] for entry in pickle.loads((tmp_path / "plan.pickle").read_bytes())["device_traces"][0]}
    assert actions == {"segment_alloc", "alloc", "free_requested", "free_completed"}


def test_a_picture_is_of_the_plan_that_the_table_has_and_nothing_is_planned_again(call, pictures, monkeypatch):
    plans, placed = noted(monkeypatch, CheckpointPolicy, "plan"), noted(monkeypatch, PlannedPool, "place")
    files = ("--timeline", "queues.svg", "--addresses", "pool.svg")
    assert call("--policy", "checkpoint", *files) == (0, "")
    assert all("checkpoint" in title for _, _, title in pictures)
    assert (len(pictures), len(plans), len(placed)) == (2, 1, 1)


def test_the_plan_of_auto_is_drawn(call, pictures):
    assert call("--policy", "auto", "--timeline", "queues.svg") == (0, "")
    ((_, _, title),) = pictures
    assert "predicted for h200, not measured: stock, " in title


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeline", "x.png"), "draw the plan of one policy: give it as --policy NAME"),
        (("--policy", "stock,base", "--addresses", "x.png"), "draw the plan of one policy"),
        (("--policy", "stock", "--addresses", "x.png", "--pool", "first"), "--pool='first' is not known: give best"),
        (("--policy", "stock", "--pool", "planned"), "--pool has no effect without --addresses"),
        (("--policy", "stock", "--front", "--timeline", "x.png"), "--timeline has no effect with --front"),
        (("--policy", "stock", "--timeline", "x.txt"), "x.txt is no name of a picture"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(call, arguments, message):
    status, error = call(*arguments)
    assert status != 0
    assert message in error


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("--timeline", "same.svg"), ("--addresses", "./same.svg")),
        (("--plot", "same.svg"), ("--timeline", "here/same.svg")),
        (("--plot", "same.svg"), ("--snapshot", "same.svg")),
    ],
)
def test_two_options_that_name_one_file_are_refused(call, tmp_path, one, other):
    (tmp_path / "here").symlink_to(".")
    status, error = call("--policy", "stock", *one, *other)
    assert status == 2
    assert error == f"error: {one[0]} and {other[0]} name one file, {other[1].removeprefix('./')}: give two names\n"
    assert not (tmp_path / "same.svg").exists()


def test_what_takes_everything_may_be_named_twice(call, tmp_path):
    (tmp_path / "gone.svg").symlink_to("/dev/null")
    files = ("--timeline", "gone.svg", "--addresses", "gone.svg")
    assert call("--policy", "stock", *files) == (0, "")
