"""Tests of contention: which copies run beside which steps, what the differences say, and that buffers go back."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bench.memory import contention  # noqa: E402
from bench.memory.contention import (  # noqa: E402
    MOST_EXTRA,
    ContentionFigures,
    FreeCopies,
    measure_contention,
)
from bench.memory.trial_series import SeriesMember, TrialSeries  # noqa: E402
from ucudnn.memory.plans.actions import ActionKind  # noqa: E402
from ucudnn.memory.torch.comparison.trial import with_plan  # noqa: E402
from ucudnn.memory.torch.comparison.trial_result import TrialSettings  # noqa: E402
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
UNET = TrainingRecipe(model="tests.support.training_steps:small_unet", batch=4, shape=(3, 32, 32))
SETTINGS = TrialSettings(recipe=UNET, policy="", budget=None, device="cpu", steps=2, warmup=1)


@pytest.fixture(scope="module")
def subject():
    """Return a series, and two fitted steps of it: without copies and with them."""
    series = TrialSeries(SETTINGS)
    return series, series._fitted(SeriesMember("stock")), series._fitted(SeriesMember("vdnn-ext-all-p"))


def sizes_of(fitted, kind):
    return [fitted.plan.graph.sizes[target] for each, target in fitted.plan.actions if each is kind]


def test_free_copies_have_the_sizes_of_the_plans_own_and_move_them(subject):
    fitted = subject[2]
    copies = FreeCopies(fitted.plan, CPU)
    sizes = sizes_of(fitted, ActionKind.OFFLOAD)
    assert len(sizes) > 5
    assert copies.pieces == len(sizes) + len(sizes_of(fitted, ActionKind.PREFETCH))
    assert copies.bytes_of(to_host=True) == sum(sizes) == fitted.simulation.offloaded_bytes <= copies.buffer_bytes
    buffer, host = copies._buffer, copies._block.memory
    assert buffer.numel() == host.numel() == copies.buffer_bytes
    for to_host, source, target in ((True, buffer, host), (False, host, buffer)):
        source.fill_(1 + to_host)
        target.fill_(9)
        copies.begin(to_host=to_host)
        assert int((target == 1 + to_host).sum()) == copies.bytes_of(to_host=to_host)
    copies.close()
    assert copies._block.memory.numel() == copies._buffer.numel() == 0


def test_copies_run_beside_one_of_three_kinds_each_direction_in_its_phase(subject, monkeypatch):
    series, base, fitted = subject
    events = []
    own = FreeCopies.begin
    monkeypatch.setattr(
        FreeCopies, "begin", lambda copies, to_host: (events.append(to_host), own(copies, to_host=to_host))
    )
    steps = {}
    for name, each in (("base", base), ("planned", fitted)):
        steps[name] = with_plan(series._step, each)
        for part in ("forward", "backward"):
            function = getattr(each._run, part)
            monkeypatch.setattr(
                each._run, part, lambda *args, told=(name, part), call=function: (events.append(told), call(*args))[1]
            )
    found = measure_contention(steps["base"], steps["planned"], fitted.plan, CPU, rounds=3, warmup=0)
    alone = [("base", "forward"), ("base", "backward")]
    beside = [True, alone[0], False, alone[1]]
    planned = [("planned", "forward"), ("planned", "backward")]
    kinds = [alone, beside, planned]
    order = [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert events == [event for kind in order for event in kinds[kind]]
    assert len(found.rounds) == 3
    assert min(map(min, found.rounds)) > 0
    assert found.to_host == found.from_host == fitted.simulation.offloaded_bytes


def test_contention_is_what_copies_add_and_extra_what_the_plan_adds(subject, monkeypatch):
    series, base, fitted = subject
    clock = SimpleNamespace(now=0.0)

    def advance(duration, call):
        def run(*args, **kwargs):
            clock.now += duration
            return call(*args, **kwargs)

        return run

    monkeypatch.setattr(contention, "mark", lambda device: clock.now)
    monkeypatch.setattr(contention, "passed_ms", lambda begin, end: end - begin)
    monkeypatch.setattr(FreeCopies, "begin", advance(1.5, FreeCopies.begin))
    monkeypatch.setattr(base._run, "forward", advance(100.0, base._run.forward))
    monkeypatch.setattr(fitted._run, "forward", advance(103.5, fitted._run.forward))
    steps = [with_plan(series._step, each) for each in (base, fitted)]
    found = measure_contention(*steps, fitted.plan, CPU, rounds=4, warmup=1)
    assert found.rounds == ((100.0, 103.0, 103.5),) * 4
    assert (found.base_ms, found.beside_ms, found.planned_ms) == (100.0, 103.0, 103.5)
    assert (found.contention_low_ms, found.contention_ms, found.contention_high_ms) == (3.0, 3.0, 3.0)
    assert (found.extra_low_ms, found.extra_ms, found.extra_high_ms) == (3.5, 3.5, 3.5)
    assert found.within


@pytest.mark.parametrize(
    ("beside", "planned", "within"),
    [(104.0, 104.9, True), (104.0, 105.1, False), (99.0, 100.9, True), (99.0, 101.1, False)],
)
def test_a_plan_may_take_contention_and_one_percent_more(subject, beside, planned, within):
    copies = FreeCopies(subject[2].plan, CPU)
    noisy = [(100.0 + drift, beside + drift, planned + drift) for drift in (0.0, 0.4, -0.4, 0.0, 7.0)]
    found = ContentionFigures.of(copies, noisy)
    assert MOST_EXTRA == 0.01
    assert found.within is within
    assert found.contention_ms == pytest.approx(beside - 100)
    assert found.extra_ms == pytest.approx(planned - 100)
    copies.close()


def test_the_buffers_are_freed_after_an_error(subject, monkeypatch):
    series, base, fitted = subject
    closed = []
    close = FreeCopies.close
    monkeypatch.setattr(FreeCopies, "close", lambda copies: (close(copies), closed.append(copies)))

    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(base._run, "forward", fails)
    steps = [with_plan(series._step, each) for each in (base, fitted)]
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_contention(*steps, fitted.plan, CPU, rounds=1, warmup=0)
    assert [each._block.memory.numel() for each in closed] == [0]


def test_a_member_of_a_series_takes_turns_if_it_is_asked_to(subject):
    series = subject[0]
    asked, turns = series.run(SeriesMember("vdnn-ext-all-p", contention=True))
    assert turns.to_host == asked.figures.offloaded > 0
    assert len(turns.rounds) == SETTINGS.steps
    assert series.run(SeriesMember("vdnn-ext-all-p")).contention is None
