"""The state of an exploration: what is looked up once, what fits, and what is measured with it."""

import pytest

from tests.support.counting_backend import CountingBackend
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn.benchmarking.exploration.state import CompileFilter, State
from ucudnn.benchmarking.request import Request, Results
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


def explored(workspaces, storage=None):
    """Return the state of an exploration that has not begun."""
    return State(
        request=Request(problem=PROBLEM, sizes=(1, 2, 4, 8), limit_bytes=100),
        names=tuple(workspaces),
        offered=None,
        backend=Backend(workspaces),
        effort=QUICK,
        storage=storage,
        compile_filter=CompileFilter(),
        exhaustive=False,
        progress=lambda done, total: None,
        results=Results(),
    )


def measure(state, size, name):
    return state.measure(size, state.algorithm(PROBLEM.part(size), name), QUICK, float("inf"))


def measured(name, workspace_bytes=0, time_ms=1.0):
    return Measurement.of(Algorithm(name=name, workspace_bytes=workspace_bytes, api="counting"), [time_ms])


def test_an_algorithm_is_looked_up_once_and_not_at_all_if_it_was_measured():
    state = explored({"SMALL": 1})
    for _ in range(2):
        assert state.algorithm(PROBLEM.part(2), "SMALL").workspace_bytes == 2
    state.results.put(PROBLEM.part(4), measured("SMALL", 5))
    assert state.algorithm(PROBLEM.part(4), "SMALL").workspace_bytes == 5
    assert state.backend.looked_up == [(2, "SMALL")]
    assert {name: each.workspace_bytes for name, each in state.known_algorithms(PROBLEM.part(2)).items()} == {
        "SMALL": 2
    }


def test_what_exceeds_the_limit_by_far_is_not_looked_up_at_larger_sizes():
    state = explored({"SMALL": 1, "LARGE": 60})
    assert [state.fitting(size, "SMALL") is not None for size in (1, 2, 4, 8)] == [True] * 4
    assert [state.fitting(size, "LARGE") is not None for size in (1, 2, 4, 8)] == [True, False, False, False]
    assert [size for size, name in state.backend.looked_up if name == "LARGE"] == [1, 2]
    assert not state.fits(8, "LARGE")
    assert (8, "LARGE") in state.backend.looked_up, "fits() asks whatever other sizes say"


def test_only_measurements_within_the_limit_are_micro_configurations():
    state = explored({"SMALL": 1, "LARGE": 60})
    state.add(4, measured("SMALL", 4, 2.0))
    state.add(4, measured("LARGE", 240, 1.0))
    assert list(state.micros) == [(4, "SMALL")]
    assert state.pruning.worth_ms(4, 4, True) == 2.0
    assert state.has_uncompiled()


def test_stored_measurements_are_asked_for_once_and_only_where_none_is_known():
    one, two, four = (PROBLEM.part(size) for size in (1, 2, 4))
    storage = Stored((one, measured("SMALL")))
    state = explored({"SMALL": 1}, storage=storage)
    state.results.put(four, measured("SMALL"))
    for _ in range(2):
        state.load([one, two, four])
    assert storage.asked == [one, two]
    assert set(state.results.of(one)) == {"SMALL"}


def test_a_bench_is_opened_by_the_first_measurement_and_saves_at_its_end_even_if_a_later_one_fails():
    storage = Stored()
    state = explored({"SMALL": 1, "BROKEN": 1}, storage=storage)
    with state:
        assert state.backend.benches == 0
        for name in state.names:
            measure(state, 4, name)
        assert storage.saved == []
        state.backend.measure = None
        with pytest.raises(TypeError):
            measure(state, 2, "SMALL")
    assert state.backend.benches == 1
    assert state.measured == 2
    assert [(part, each.algorithm.name, each.measured) for part, each in storage.saved] == [
        (PROBLEM.part(4), "SMALL", True),
        (PROBLEM.part(4), "BROKEN", False),
    ]
    assert {*state.results.of(PROBLEM.part(4))} == {"SMALL", "BROKEN"}


@pytest.mark.parametrize(("reason", "too_large"), [("MemoryError: no room", 40), ("CudnnError: 5000", float("inf"))])
def test_a_hindered_measurement_is_not_saved_and_memory_sets_the_room(reason, too_large):
    storage = Stored()
    state = explored({"SMALL": 10}, storage=storage)
    state.backend.measure = lambda size, algorithm, *rest: Measurement.failed(
        algorithm, reason, MeasurementStatus.HINDERED
    )
    with state:
        measure(state, 4, "SMALL")
    assert storage.saved == []
    assert state.hindered
    assert state.too_large_bytes == too_large
