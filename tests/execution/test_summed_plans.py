"""Filter gradients of 16 bits whose parts are added in float32: the error is that of the undivided kernel."""

from dataclasses import replace
from itertools import count as counted

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operands import operands
from tests.support.problems import LAYOUTS, make_problem
from tests.support.reference import scaled_reference
from tests.support.strategies import examples
from ucudnn.backends import open_backend
from ucudnn.backends.base import OVERWRITE, Scaling
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendError, StepError
from ucudnn.execution.plan import make_plan
from ucudnn.problem import DataType, Operation
from ucudnn.slabs import piece_of, slabs_by_problem

CPU = open_backend("cpu")
SCALINGS = [Scaling(1, 0), Scaling(1, 1), Scaling(-0.5, 0), Scaling(0.75, -1.5)]
SHARE = 1.1  # of the undivided kernel's error


def gradient(**fields):
    return make_problem(
        operation=Operation.BACKWARD_FILTER,
        dtype=DataType.FLOAT16,
        **{"channels": 8, "filters": 6, "spatial": (6, 5), "batch": 256} | fields,
    )


def divided(problem, name, count, *, summed, rows=0):
    """Return the configuration of equal parts, each whole or in slabs of so many rows."""
    asked = replace(problem, float32_sum=summed)
    size = problem.batch // count
    part, total = asked.part(size), CPU.float32_sum(problem) if summed else None

    def own(piece):
        workspace_bytes = CPU.algorithm(piece, name).workspace_bytes
        return MicroConfiguration(size=size, algorithm=name, time_ms=1.0, workspace_bytes=workspace_bytes)

    slabs = [own(piece).on(slab) for piece, same in slabs_by_problem(part, rows) for slab in same] if rows else []
    one = MicroConfiguration.of_slabs(size, sorted(slabs, key=lambda each: each.slab)) if rows else own(part)
    return Configuration(parts=(one,) * count, float32_sum=total)


class Watched:
    """The CPU backend, which calls a function before each launch, and before a sum is rounded."""

    def __init__(self, before_launch, before_rounding=lambda: None):
        self._before_launch, self._before_rounding = before_launch, before_rounding

    def __getattr__(self, name):
        return getattr(CPU, name)

    def prepare(self, problem, algorithm, *, adds=True):
        call = CPU.prepare(problem, algorithm)
        call.launch = self._after(self._before_launch, call.launch)
        return call

    def prepare_sum(self, problem):
        made = CPU.prepare_sum(problem)
        bind = made.bind
        made.bind = lambda *arguments: self._after(self._before_rounding, bind(*arguments))
        return made

    @staticmethod
    def _after(before, run):
        def both(*arguments):
            before()
            run(*arguments)

        return both


def result(problem, configuration, tensors, scaling):
    """Return what a plan writes, as float64, and the number of launched calls; nothing else is changed or read."""
    x, w, y = (each.copy() for each in tensors)
    if scaling.beta == 0:
        w.fill(np.nan)
    launched = []
    plan = make_plan(problem, configuration, Watched(lambda: launched.append(True)))
    workspace = CPU.allocate(plan.workspace_bytes + 64)
    workspace.fill(0xFF)  # NaN
    plan.launch(x, w, y, workspace[: plan.workspace_bytes], scaling)
    assert (workspace[plan.workspace_bytes :] == 0xFF).all()
    assert (x == tensors[0]).all()
    assert (y == tensors[2]).all()
    return w.astype(np.float64), len(launched)


@examples(1 / 3)  # each computes up to 513 convolutions
@given(
    st.sampled_from([16, 64, 256]),
    st.sampled_from(["GEMM", "IMPLICIT_GEMM", "FFT"]),
    st.sampled_from(LAYOUTS[2]),
    st.sampled_from(SCALINGS),
    st.integers(0, 1 << 30),
)
def test_many_parts_have_the_error_of_the_undivided_kernel(count, name, layout, scaling, seed):
    problem = gradient(layout=layout)
    tensors = operands(problem, seed)
    exact = scaled_reference(problem, *tensors, *scaling)
    whole, calls = result(problem, divided(problem, name, 1, summed=False), tensors, scaling)
    assert calls == 1
    own = np.linalg.norm(whole - exact)
    found, calls = result(problem, divided(problem, name, count, summed=True), tensors, scaling)
    assert calls == count
    assert np.linalg.norm(found - exact) <= SHARE * own
    rounded, calls = result(problem, divided(problem, name, count, summed=False), tensors, scaling)
    assert calls == count
    assert np.linalg.norm(rounded - exact) > 1.5 * own  # so that the sum in float32 is what makes the difference


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_slabs_have_the_error_of_the_undivided_kernel(scaling):
    problem = gradient(batch=16, spatial=(18, 5))
    tensors = operands(problem, None)
    exact = scaled_reference(problem, *tensors, *scaling)
    whole, _ = result(problem, divided(problem, "GEMM", 1, summed=False), tensors, scaling)
    found, calls = result(problem, divided(problem, "GEMM", 16, summed=True, rows=2), tensors, scaling)
    assert calls == 16 * 8
    assert np.linalg.norm(found - exact) <= SHARE * np.linalg.norm(whole - exact)


def test_bound_calls_compute_what_a_launch_computes_again_and_again():
    problem = gradient(batch=64)
    configuration = divided(problem, "GEMM", 64, summed=True)
    x, w, y = operands(problem)
    found, _ = result(problem, configuration, (x, w, y), OVERWRITE)
    plan = make_plan(problem, configuration, CPU)
    workspace = CPU.allocate(plan.workspace_bytes)
    calls = plan.bind(x, w, y, workspace)
    assert len(calls) == 65
    for _ in range(2):
        w.fill(np.nan)
        workspace.fill(0xFF)
        for call in calls:
            call()
        assert (w == found).all()


def failing(at):
    """Return the CPU backend, of which one call fails, or rounding the sum does."""
    left = counted(1)

    def fail():
        if next(left) == at:
            raise BackendError("out of order")

    return Watched(fail, fail)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_failure_leaves_the_output_as_it_was_and_all_samples_to_compute(at):
    problem = gradient(batch=8)
    x, w, y = operands(problem)
    before = w.copy()
    plan = make_plan(problem, divided(problem, "GEMM", 4, summed=True), failing(at))
    with pytest.raises(StepError, match=r"GEMM failed on a micro-batch of 2: out of order") as failed:
        plan.launch(x, w, y, CPU.allocate(plan.workspace_bytes))
    assert (failed.value.start, failed.value.left) == (0, ())
    assert (w == before).all()


def test_a_sum_that_cannot_be_rounded_is_a_failure_of_its_last_part():
    problem = gradient(batch=8)
    parts = [
        part
        for name, count in (("GEMM", 2), ("GEMM", 4), ("IMPLICIT_GEMM", 4))
        for part in divided(problem, name, count, summed=True).parts[:1]
    ]
    x, w, y = operands(problem)
    mixed = Configuration(parts=tuple(parts), float32_sum=CPU.float32_sum(problem))
    plan = make_plan(problem, mixed, failing(len(parts) + 1))
    with pytest.raises(StepError, match=r"IMPLICIT_GEMM failed on a micro-batch of 2: out of order") as failed:
        plan.launch(x, w, y, CPU.allocate(plan.workspace_bytes))
    assert (failed.value.start, failed.value.left) == (0, ())


@pytest.mark.parametrize("wrong", [lambda w: w.astype(np.float32), lambda w: w[1:], lambda w: w.T.copy().T])
def test_filters_that_do_not_fit_are_refused_before_anything_is_computed(wrong):
    problem = gradient(batch=8)
    x, w, y = operands(problem)
    never = Watched(lambda: pytest.fail("something is computed"))
    plan = make_plan(problem, divided(problem, "GEMM", 4, summed=True), never)
    with pytest.raises(BackendError, match=r"w is float\d\d of shape .* a filter gradient of float16 has"):
        plan.launch(x, wrong(w), y, CPU.allocate(plan.workspace_bytes))


def test_a_sum_of_the_last_samples_is_refused():
    problem = gradient(batch=8)
    rest = replace(divided(problem, "GEMM", 4, summed=True), parts=divided(problem, "GEMM", 4, summed=True).parts[:2])
    with pytest.raises(BackendError, match="begins at sample 4, not at the first"):
        make_plan(problem, rest, CPU, start=4)


def test_a_slab_knows_that_it_is_part_of_a_sum():
    problem = replace(gradient(batch=1, spatial=(18, 5)), float32_sum=True)
    (_, (first, *_)), *_ = slabs_by_problem(problem, 4)
    assert piece_of(problem, first).problem.float32_sum
