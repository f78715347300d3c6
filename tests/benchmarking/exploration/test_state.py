"""The state of an exploration: what is looked up once, what fits, and what is measured with it."""

from dataclasses import FrozenInstanceError

import pytest

from tests.support.counting_backend import CountingBackend
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn.benchmarking.exploration.compile_filter import CompileFilter
from ucudnn.benchmarking.exploration.lazy_bench import LazyBench
from ucudnn.benchmarking.exploration.state import Context, State
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.results import Results
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus

PROBLEM = make_problem(batch=8)


class Stored:
    """Keeps measurements, and remembers what it was asked for."""

    def __init__(self, *items):
        self.items, self.asked, self.saved = items, [], []

    def load(self, parts):
        self.asked += parts
        return [item for item in self.items if item[0] in parts]

    def save(self, items):
        self.saved += items


class Backend(CountingBackend):
    """Counts the look-ups and the benches."""

    def __init__(self, workspaces):
        super().__init__(workspaces)
        self.looked_up, self.benches = [], 0

    def algorithm(self, problem, name):
        self.looked_up.append((problem.batch, name))
        return super().algorithm(problem, name)

    def bench(self, problem):
        self.benches += 1
        return super().bench(problem)


def explored(workspaces, limit_bytes=100, storage=None, **options):
    """Return the context and the state of an exploration that has not begun."""
    backend = Backend(workspaces)
    context = Context(
        request=Request(problem=PROBLEM, sizes=(1, 2, 4, 8), limit_bytes=limit_bytes),
        names=tuple(workspaces),
        offered=None,
        backend=backend,
        effort=QUICK,
        storage=storage,
        compile_filter=CompileFilter(),
        exhaustive=False,
        progress=lambda done, total: None,
        **options,
    )
    return context, State(context, Results(), float("inf"))


def measured(name, workspace_bytes=0, time_ms=1.0):
    return Measurement.of(Algorithm(name=name, workspace_bytes=workspace_bytes, api="counting"), [time_ms])


def test_the_context_cannot_be_changed():
    context, _ = explored({"SMALL": 0})
    with pytest.raises(FrozenInstanceError):
        context.exhaustive = True


def test_an_algorithm_is_looked_up_once_and_not_at_all_if_it_was_measured():
    context, state = explored({"SMALL": 1})
    for _ in range(2):
        assert state.algorithm(PROBLEM.part(2), "SMALL").workspace_bytes == 2
    state.results.put(PROBLEM.part(4), measured("SMALL", 5))
    assert state.algorithm(PROBLEM.part(4), "SMALL").workspace_bytes == 5
    assert context.backend.looked_up == [(2, "SMALL")]
    assert {name: each.workspace_bytes for name, each in state.known_algorithms(PROBLEM.part(2)).items()} == {
        "SMALL": 2
    }


def test_what_exceeds_the_limit_by_far_is_not_looked_up_at_larger_sizes():
    context, state = explored({"SMALL": 1, "LARGE": 60})
    assert [state.fitting(size, "SMALL") is not None for size in (1, 2, 4, 8)] == [True] * 4
    assert [state.fitting(size, "LARGE") is not None for size in (1, 2, 4, 8)] == [True, False, False, False]
    assert [size for size, name in context.backend.looked_up if name == "LARGE"] == [1, 2]
    assert not state.fits(8, "LARGE")
    assert (8, "LARGE") in context.backend.looked_up, "fits() asks whatever other sizes say"


def test_only_measurements_within_the_limit_are_micro_configurations():
    _, state = explored({"SMALL": 1, "LARGE": 60})
    state.add(4, measured("SMALL", 4, 2.0))
    state.add(4, measured("LARGE", 240, 1.0))
    assert list(state.micros) == [(4, "SMALL")]
    assert state.pruning.worth_ms(4, 4, True) == 2.0
    assert state.has_uncompiled()


def test_stored_measurements_are_asked_for_once_and_only_where_none_is_known():
    one, two, four = (PROBLEM.part(size) for size in (1, 2, 4))
    storage = Stored((one, measured("SMALL")))
    _, state = explored({"SMALL": 1}, storage=storage)
    state.results.put(four, measured("SMALL"))
    for _ in range(2):
        state.load([one, two, four])
    assert storage.asked == [one, two]
    assert set(state.results.of(one)) == {"SMALL"}


def test_a_bench_is_opened_by_the_first_measurement_and_saves_at_its_end():
    storage = Stored()
    context, state = explored({"SMALL": 1, "BROKEN": 1}, storage=storage)
    with LazyBench(context, state) as bench:
        assert context.backend.benches == 0
        for name in context.names:
            bench.measure(4, state.algorithm(PROBLEM.part(4), name), QUICK, float("inf"))
        assert storage.saved == []
    assert context.backend.benches == 1
    assert state.measured == 2
    assert [(part, each.algorithm.name, each.measured) for part, each in storage.saved] == [
        (PROBLEM.part(4), "SMALL", True),
        (PROBLEM.part(4), "BROKEN", False),
    ]
    assert {*state.results.of(PROBLEM.part(4))} == {"SMALL", "BROKEN"}


def test_what_was_measured_is_saved_even_if_a_later_measurement_fails():
    storage = Stored()
    context, state = explored({"SMALL": 1}, storage=storage)
    measure = context.backend.measure

    def fail_at_two(size, algorithm, *rest):
        if size == 2:
            raise RuntimeError("something else")
        return measure(size, algorithm, *rest)

    context.backend.measure = fail_at_two
    with LazyBench(context, state) as bench:
        bench.measure(4, state.algorithm(PROBLEM.part(4), "SMALL"), QUICK, float("inf"))
        with pytest.raises(RuntimeError, match="something else"):
            bench.measure(2, state.algorithm(PROBLEM.part(2), "SMALL"), QUICK, float("inf"))
    assert [part for part, _ in storage.saved] == [PROBLEM.part(4)]


@pytest.mark.parametrize(("reason", "room"), [("MemoryError: no room", 40), ("CudnnError: 5000", float("inf"))])
def test_a_hindered_measurement_is_not_saved_and_memory_sets_the_room(reason, room):
    storage = Stored()
    context, state = explored({"SMALL": 10}, storage=storage)
    context.backend.measure = lambda size, algorithm, *rest: Measurement.failed(
        algorithm, reason, MeasurementStatus.HINDERED
    )
    with LazyBench(context, state) as bench:
        bench.measure(4, state.algorithm(PROBLEM.part(4), "SMALL"), QUICK, float("inf"))
    assert storage.saved == []
    assert state.hindered
    assert state.room_bytes == room
