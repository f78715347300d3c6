"""Rivals train the same step, take turns, and stand in tables with the losers first."""

import multiprocessing
import sys
import threading
from argparse import Namespace
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from bench.memory import models, rival_steps, rival_table, rivals  # noqa: E402
from bench.memory.rival_steps import Asked, blocks_of  # noqa: E402
from bench.memory.rival_table import Cell  # noqa: E402
from bench.tools.results import load  # noqa: E402
from ucudnn.memory.torch.compiling import compiled_regions, step_race  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread", "older_objects_frozen"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what torch.compile imports
]
NETWORK = "gpt2_medium"


class Free:
    """Turns that wait for nobody."""

    def take(self):
        pass

    give = take

    @contextmanager
    def alone(self):
        yield


def measured(rival, setting=0.0, network=NETWORK, **more):
    recipe = rivals.recipe_of(network, small=True)
    asked = Asked(cell=Cell(network, rival, setting), recipe=recipe, device="cpu", steps=3, **more)
    return rival_steps._measured(asked, Free())


@pytest.fixture(scope="module")
def eager():
    return measured("eager")


@pytest.mark.parametrize(
    ("rival", "setting"),
    [
        *[("checkpoint", 0), ("save_on_cpu", 0), ("accumulate", 2), ("compile", 0), ("compile-budget", 0.5)],
        *[("ours", 0.95), ("ours-compiled-unbounded", 0)],
    ],
)
def test_every_rival_trains_the_same_step(eager, monkeypatch, rival, setting):
    monkeypatch.setattr(rival_steps, "_inductor", lambda graph, inputs: graph)
    monkeypatch.setattr(step_race, "compiled_whole", lambda function: function)
    monkeypatch.setattr(compiled_regions, "compiled", lambda graph, *_: graph.forward)
    budget = int(setting * eager["process"]) if rival == "ours" else None
    found = measured(rival, setting, budget=budget)
    assert found["first_loss"] == pytest.approx(eager["first_loss"], rel=1e-2)
    if rival == "ours-compiled-unbounded":  # which has taken more steps
        assert found["loss"] < eager["loss"]
        assert "of the whole step" in found["raced"][0]
    else:
        assert found["loss"] == pytest.approx(eager["loss"], rel=1e-2)
    assert found["loss"] < found["first_loss"]
    if rival in ("checkpoint", "ours"):
        assert found["allocated"] < eager["allocated"]
    if rival == "ours":
        assert found["budget"] == budget
        # The plan is not measured, so it does not know what operators of this CPU take for themselves.
        assert found["process"] <= 1.01 * budget
        assert list(found["begun_s"]) == ["tracing", "planning", "fitted"]


def test_accumulation_is_not_for_batch_normalization():
    with pytest.raises(ValueError, match="batch normalization"):
        measured("accumulate", 2, network="unet2d_256")


@pytest.mark.parametrize(("name", "count"), [("resnet50", 16), ("unet2d", 9), ("gpt2", 12), ("vgg16", 0)])
def test_blocks_are_what_lists_hold(name, count):
    with torch.device("meta"):
        model = getattr(models, name)()
    assert len([*blocks_of(model)]) == count


def test_eager_comes_first_and_what_is_kept_stays(tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    given = ["--device", "cpu", "--small", "--network", NETWORK, "--rival", "ours", "--share", "0.95", "--share", "0.1"]
    given += ["--share", "0.5", "--cell", f"{NETWORK} ours 0.95", "--cell", f"{NETWORK} ours 0.1"]
    monkeypatch.setattr(sys, "argv", ["rivals", *given, "--steps", "3", "--out", str(out)])
    rivals.main()
    found = load(out)["cases"]
    assert [*found] == [f"{NETWORK} eager", f"{NETWORK} ours 0.95", f"{NETWORK} ours 0.1"]
    assert found[f"{NETWORK} ours 0.95"]["budget"] == int(0.95 * found[f"{NETWORK} eager"]["process"])
    assert "below the floor" in found[f"{NETWORK} ours 0.1"]["reason"]
    rivals.main()
    assert load(out)["cases"] == found


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_that_times_its_steps_is_alone_and_one_that_ends_gives_its_turn_back(monkeypatch, tmp_path, ends):
    arguments = Namespace(
        seconds=100.0, cell_seconds=20.0, again=True, small=True, device="cpu", steps=3, policy="auto"
    )
    race = rivals.Race(arguments, tmp_path / "found.json")
    signals = []
    monkeypatch.setattr(rivals, "_others", lambda pid: [each for each in (1, 2, 3) if each != pid])
    monkeypatch.setattr(rivals, "_signal", lambda pids, what: signals.append((pids, what.name)))
    ours, theirs = multiprocessing.Pipe()

    def process():
        theirs.recv()
        for message in ("take", 2):
            theirs.send(message)
            theirs.recv()
        if not ends:
            theirs.send("together")
            theirs.recv()
            theirs.send({"step_ms": 1.0})
        theirs.close()

    thread = threading.Thread(target=process)
    thread.start()
    answer, ended = race._told(ours, race._asked(Cell(NETWORK, "eager"), warms=False))
    thread.join()
    assert ended is ends
    assert answer == ({"reason": rivals.ENDED} if ends else {"step_ms": 1.0})
    assert signals[:2] == [([1, 3], "SIGSTOP"), ([1, 3], "SIGCONT")]
    assert not race._device.locked()


def case(rival, setting, ms, peak):
    ran = {"step_ms": ms, "fastest_ms": ms, "slowest_ms": ms, "allocated": peak, "process": peak}
    return {str(Cell(NETWORK, rival, setting)): {**Cell(NETWORK, rival, setting)._asdict(), **ran}}


def test_losers_stand_first_and_a_front_has_what_nothing_beats(tmp_path):
    cases = {**case("eager", 0, 10.0, 100), **case("ours", 0.5, 12.0, 50), **case("ours", 0.4, 15.0, 40)}
    cases |= {**case("ours", 0.7, 13.0, 70), **case("compile-budget", 0.5, 8.0, 60), **case("save_on_cpu", 0, 90.0, 45)}
    failed = {**Cell(NETWORK, "accumulate", 2)._asdict(), "reason": "not legal"}
    cases[f"{NETWORK} accumulate 2"] = failed
    ours = rival_table.of_network(cases, NETWORK)["ours"]
    assert [each["setting"] for each in rival_table.front(ours)] == [0.5, 0.4]
    names = [row[0].removeprefix(f"{NETWORK} ") for row in rival_table.lines(cases, NETWORK)]
    assert names[:3] == ["accumulate 2", "save_on_cpu", "ours 0.4"]
    assert names[-1] == "compile-budget 0.5"
    rows = {row[0].partition(": ")[2]: row[1:] for row in rival_table.fronts(cases)}
    assert [*rows] == ["eager PyTorch", "`activation_memory_budget`", "`save_on_cpu`", "`fit`"]
    assert rows["`fit`"] == ["1.20", "1.20", "1.20", "1.50", "–", "40 %"]
    cases |= case("ours-compiled", 0.4, 7.0, 65)
    assert [row[1:] for row in rival_table.within(cases)] == [
        ["9.00", "–", "–", "0.80", "1.20", "0.70"],
        ["9.00", "–", "–", "–", "1.20", "–"],
    ]
    pytest.importorskip("matplotlib")
    rival_table.draw(cases, NETWORK, tmp_path / "front.svg")
    assert "save_on_cpu" in (tmp_path / "front.svg").read_text()
