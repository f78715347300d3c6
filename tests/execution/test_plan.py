"""The steps of a plan cover the mini-batch once, in order, and share calls for equal parts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operands import PROBLEM, check_run, poison, written
from tests.support.problems import make_problem
from ucudnn.backends.base import Offset
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.configuration import Float32Sum, MicroConfiguration, SlabConfiguration, configuration_of
from ucudnn.errors import StepError, UnsupportedProblemError
from ucudnn.execution.plan import aligned, make_plan, prepared, steps_of
from ucudnn.problem import DataType, Operation
from ucudnn.slabs import piece_of, slabs_of


def prepare(problem, algorithm):
    """Stand for a backend: a call is the problem and the algorithm that it computes."""
    return [problem, algorithm]


def part(size, algorithm="GEMM", slabs=()):
    return MicroConfiguration(size=size, algorithm=algorithm, time_ms=1.0, workspace_bytes=0, slabs=slabs)


def in_slabs(problem, rows):
    """Return all of a problem in slabs of so many rows."""
    slabs = slabs_of(problem, rows)
    made = (SlabConfiguration(slab=slab, algorithm="GEMM", time_ms=1.0, workspace_bytes=0) for slab in slabs)
    return part(problem.batch, slabs=tuple(made))


@pytest.fixture
def asked(monkeypatch):
    """Return a list that gets the problem, the algorithm and whether it adds for each call that the CPU prepares."""
    asked, own = [], CpuBackend.prepare

    def noted(self, *call, adds):
        asked.append((*call, adds))
        return own(self, *call, adds=adds)

    monkeypatch.setattr(CpuBackend, "prepare", noted)
    return asked


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["GEMM", "FFT"])), min_size=1), st.integers(0, 5))
def test_parts_follow_each_other_from_the_first_missing_sample_on(parts, start):
    batch = start + sum(size for size, _ in parts)
    problem = make_problem(batch=batch, operation=Operation.BACKWARD_FILTER)
    steps = steps_of(problem, [part(*each) for each in parts], prepare, start)
    assert [step.call for step in steps] == [[problem.part(size), algorithm] for size, algorithm in parts]
    assert [step.offset for step in steps] == [
        Offset(start + sum(size for size, _ in parts[:index])) for index in range(len(parts))
    ]
    assert [step.accumulates for step in steps] == [step.offset.start > 0 for step in steps]
    assert len({id(step.call) for step in steps}) == len(set(parts)), "equal parts share a call"


@pytest.mark.parametrize("operation", Operation)
def test_only_the_first_slab_of_a_filter_gradient_overwrites_it(operation):
    problem = make_problem(batch=2, operation=operation)
    whole = problem.part(1)
    divided = in_slabs(whole, 2)
    steps, slabs = steps_of(problem, [divided] * 2, prepare), divided.slabs
    assert len(slabs) > 1
    assert [step.slab for step in steps] == [*range(len(slabs))] * 2
    expected = [piece_of(whole, each.slab) for each in slabs] * 2
    assert [step.call[0] for step in steps] == [each.problem for each in expected]
    assert [step.offset.first_rows for step in steps] == [each.first_rows for each in expected]
    overwrites = [index for index, step in enumerate(steps) if not step.accumulates]
    assert overwrites == ([0] if operation is Operation.BACKWARD_FILTER else [*range(len(steps))])


@pytest.mark.parametrize(
    ("sizes", "rows", "start", "adds"),
    [((4,), 0, 0, False), ((2, 2), 0, 0, True), ((4,), 2, 0, True), ((2,), 0, 2, True)],
)
def test_adding_to_a_filter_gradient_is_prepared_where_a_plan_adds(asked, sizes, rows, start, adds):
    """Because cuDNN may compile an engine once more for it."""
    problem = make_problem(batch=4, operation=Operation.BACKWARD_FILTER, spatial=(6, 6))
    parts = [in_slabs(problem.part(size), rows) if rows else part(size) for size in sizes]
    make_plan(problem, configuration_of(parts), CpuBackend(), start)
    assert {own_adds for *_, own_adds in asked} == {adds}


@pytest.mark.parametrize("total", [None, Float32Sum(size_bytes=1 << 12, time_ms=1.0)], ids=["in place", "in float32"])
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 1)])
def test_what_is_prepared_ahead_is_what_a_plan_prepares(asked, sizes, total):
    problem = make_problem(batch=4, operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16)
    configuration = replace(configuration_of([part(size) for size in sizes]), float32_sum=total)
    calls = prepared(problem, configuration, CpuBackend())
    ahead = set(asked)
    asked.clear()
    plan = make_plan(problem, configuration, CpuBackend())
    assert len(calls) == len(plan.steps) == len(sizes)
    assert ahead == set(asked)
    assert {each.float32_sum for each, _, _ in ahead} == {total is not None}


def test_a_part_that_cannot_be_prepared_is_an_error_before_any_launch():
    def refuse(problem, algorithm):
        if algorithm == "FFT":
            raise UnsupportedProblemError("no FFT here")
        return prepare(problem, algorithm)

    with pytest.raises(StepError, match="FFT failed on a micro-batch of 4: no FFT here") as caught:
        steps_of(make_problem(batch=9), [part(4), part(2, "FFT")], refuse, 3)
    assert (caught.value.algorithm, caught.value.start) == ("FFT", 3)


@given(st.lists(st.integers(1, 64), min_size=1))
def test_aligned_parts_begin_at_multiples_of_their_power_of_two(sizes):
    start = 0
    for each in aligned([part(size) for size in sizes]):
        assert start % (each.size & -each.size) == 0
        start += each.size
    assert start == sum(sizes)


def gemm_plan(problem, sizes, backend):
    parts = [
        MicroConfiguration(size=size, algorithm="GEMM", time_ms=1.0, workspace_bytes=each.workspace_bytes)
        for size in sizes
        if (each := backend.algorithm(problem.part(size), "GEMM")) is not None
    ]
    return make_plan(problem, configuration_of(parts), backend)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("sizes", [[6], [2, 2, 2], [4, 2]])
def test_bound_calls_compute_what_a_launch_computes(operation, sizes):
    backend = CpuBackend()
    problem = PROBLEM.with_operation(operation)
    plan = gemm_plan(problem, sizes, backend)

    def run(x, w, y):
        calls = plan.bind(x, w, y, backend.allocate(plan.workspace_bytes))
        assert len(calls) == len(sizes)
        for _ in range(2):  # a bound plan overwrites its output each time
            poison(written(problem, x, w, y), 0)
            for call in calls:
                call()

    check_run(problem, run)
