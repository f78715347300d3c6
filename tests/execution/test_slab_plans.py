"""Slabs are measured, planned, executed, stored and replayed; results equal the undivided ones."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faulty_backend import check
from tests.support.operands import QUICK, direct, operands, poison, written
from tests.support.plan_time import time_ms
from tests.support.problems import divisible
from tests.support.saved_files import save_profile
from ucudnn import Handle
from ucudnn.backends import open_backend
from ucudnn.backends.base import Scaling
from ucudnn.backends.cpu.bench import CpuBench
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import record
from ucudnn.benchmarking.request import Request, slab_rows
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import InfeasibleError, StepError, UnsupportedProblemError
from ucudnn.execution.plan import make_plan
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation
from ucudnn.profiles.format import load_profile
from ucudnn.profiles.measurement import Measurement
from ucudnn.settings import Settings
from ucudnn.slabs import piece_of, row_count, row_unit, slabs_of

VOLUME = ConvolutionProblem(
    operation=Operation.FORWARD,
    batch=2,
    channels=3,
    spatial=(10, 6, 5),
    filters=4,
    kernel=(3, 3, 3),
    padding=(1, 1, 1),
    dtype=DataType.FLOAT64,
)
CPU = open_backend("cpu")


@st.composite
def configurations(draw, problem):
    """Draw micro-batches of any size, some of them in slabs of any height, each by any algorithm."""
    parts, left = [], problem.batch

    def any_of(part):
        chosen = draw(st.sampled_from(CPU.algorithms(part)))
        return {"algorithm": chosen.name, "workspace_bytes": chosen.workspace_bytes, "time_ms": 1.0}

    while left:
        size = draw(st.integers(1, left))
        left -= size
        part = problem.part(size)
        if draw(st.booleans()):
            parts.append(MicroConfiguration(size=size, **any_of(part)))
            continue
        rows = row_unit(problem) * draw(st.integers(1, -(-row_count(problem) // row_unit(problem))))
        slabs = [SlabConfiguration(slab=slab, **any_of(piece_of(part, slab).problem)) for slab in slabs_of(part, rows)]
        parts.append(MicroConfiguration.of_slabs(size, slabs))
    return Configuration(parts=tuple(parts))


@given(st.data(), divisible(), st.sampled_from([0.0, 1.0, -0.5]), st.integers(0, 2**32 - 1))
def test_any_mixture_of_micro_batches_and_slabs_equals_the_reference(data, problem, beta, seed):
    problem = problem.with_batch(data.draw(st.integers(1, 4)))
    configuration = data.draw(configurations(problem))
    x, w, y = operands(problem, seed)
    expected = direct(problem, x, w, y, 0.75, beta)
    out = written(problem, x, w, y)
    poison(out, beta)
    plan = make_plan(problem, configuration, CPU)
    workspace = CPU.allocate(configuration.workspace_bytes)
    workspace.fill(0xFF)
    plan.launch(x, w, y, workspace, Scaling(0.75, beta))
    assert np.abs(out - expected).max() / max(np.abs(expected).max(), 1e-3) < 1e-11, str(configuration)


def test_slabs_within_the_volume_share_a_call():
    slabs = [
        SlabConfiguration(slab=slab, algorithm="GEMM", time_ms=1.0, workspace_bytes=10**6)
        for slab in slabs_of(VOLUME.part(1), 1)
    ]
    part = MicroConfiguration.of_slabs(1, slabs)
    plan = make_plan(VOLUME, Configuration(parts=(part, part)), CPU)
    assert len(plan.steps) == 20
    assert len({id(step.call) for step in plan.steps}) == 3  # the first, those within, the last


def least(backend, problem):
    return min(each.workspace_bytes for each in backend.algorithms(problem))


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("policy", [each for each in BatchSizePolicy if each is not BatchSizePolicy.UNDIVIDED])
@pytest.mark.parametrize("layout", [Layout.NCDHW, Layout.NDHWC])
def test_samples_that_are_too_large_are_computed_in_slabs(hungry, operation, policy, layout):
    problem = replace(VOLUME, operation=operation, layout=layout)
    limit = least(hungry, problem.part(1)) * 2 // 3
    handle = Handle(backend=hungry, policy=policy, workspace_limit=limit, effort=QUICK, slabs=True)
    for beta in (0.0, 1.0, 0.5):
        check(handle, problem, alpha=1.5, beta=beta, seed=None)
    (kernel,) = handle.report().kernels
    assert "rows" in kernel.configuration
    assert kernel.undivided_ms is None
    assert handle.workspace_bytes <= limit
    for options in ({"slabs": False}, {"policy": "undivided"}):
        refusing = Handle(backend=hungry, workspace_limit=limit, effort=QUICK, **options)
        with pytest.raises(InfeasibleError, match="at least"):
            refusing.convolve(problem, *operands(problem))


def test_the_error_tells_the_least_limit_with_slabs(hungry):
    handle = Handle(backend=hungry, workspace_limit=1, effort=QUICK)
    with pytest.raises(InfeasibleError) as caught:
        handle.convolve(VOLUME, *operands(VOLUME))
    needed = caught.value.required_bytes
    assert needed < least(hungry, VOLUME.part(1))
    handle = Handle(backend=hungry, workspace_limit=needed, effort=QUICK)
    handle.convolve(VOLUME, *operands(VOLUME))
    assert handle.workspace_bytes == needed


def test_a_total_is_divided_among_kernels_in_slabs(hungry):
    total = sum(least(hungry, VOLUME.with_operation(each).part(1)) for each in Operation) * 2 // 3
    handle = Handle(backend=hungry, total_workspace=total, effort=QUICK)
    for operation in Operation:
        handle.get_algorithm(VOLUME.with_operation(operation), layer="conv")
    for operation in Operation:
        check(handle, VOLUME.with_operation(operation), layer="conv", seed=None)
    assert any("rows" in kernel.configuration for kernel in handle.report().kernels)
    assert handle.workspace_bytes <= total


@pytest.fixture
def breaking(hungry, monkeypatch):
    """Return a function after which some algorithms fail after a number of launches."""
    state = {"left": 10**6, "broken": set()}
    prepare = type(hungry).prepare

    def failing(self, part, name, **_):
        call = prepare(self, part, name)

        def launch(*arguments):
            if state["left"] <= 0 and name in state["broken"]:
                raise UnsupportedProblemError(f"{name} is broken")
            state["left"] -= 1
            call.launch(*arguments)

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(type(hungry), "prepare", failing)
    return lambda left, broken: state.update(left=left, broken=broken)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_slabs_that_a_failure_left_are_computed_by_other_algorithms(hungry, breaking, operation, after, beta):
    problem = VOLUME.with_operation(operation)
    limit = least(hungry, problem.part(1)) * 2 // 3
    handle = Handle(backend=hungry, workspace_limit=limit, effort=QUICK)
    handle.convolve(problem, *operands(problem))
    (entry,) = handle._entries.values()
    used = {name for part in entry.decision.configuration.parts for name in part.algorithms}
    breaking(after, {min(used)})
    check(handle, problem, alpha=0.5, beta=beta, seed=None)
    assert handle.workspace_bytes <= limit


@pytest.mark.parametrize("slabs", [True, False])
@pytest.mark.parametrize("limit", [2**15, 2**20])
def test_rejected_configurations_are_not_chosen_after_a_failure(hungry, breaking, monkeypatch, slabs, limit):
    measure = CpuBench.measure

    def rejecting(self, size, algorithm, *arguments, **options):
        if algorithm.name == "FFT":
            return Measurement.failed(algorithm, "its result is off")
        return measure(self, size, algorithm, *arguments, **options)

    monkeypatch.setattr(CpuBench, "measure", rejecting)
    handle = Handle(backend=hungry, workspace_limit=limit, effort=QUICK, slabs=slabs)
    if not slabs and limit < least(hungry, VOLUME.part(1)):
        with pytest.raises(InfeasibleError):
            handle.convolve(VOLUME, *operands(VOLUME))
        return
    handle.convolve(VOLUME, *operands(VOLUME))
    breaking(0, {"GEMM"})
    for _ in range(2):
        with pytest.raises(StepError, match="GEMM is broken"):
            handle.convolve(VOLUME, *operands(VOLUME), alpha=2.0)


def wanted(problem, limit, policy=BatchSizePolicy.POWER_OF_TWO, **options):
    sizes = policy.sizes(problem.batch)
    return Request(problem=problem, sizes=sizes, limit_bytes=limit, rows=slab_rows(problem, policy), **options)


def test_plans_with_slabs_are_made_from_a_profile(hungry, tmp_path):
    benchmark = Benchmark(hungry, effort=QUICK, exhaustive=True)
    requests = [wanted(VOLUME.with_operation(each), 1 << 40, apart=True) for each in Operation]
    save_profile(record("volume", requests, benchmark), tmp_path / "volume.json")
    replay = Benchmark(ReplayBackend(load_profile(str(tmp_path / "volume.json"))))
    for operation in Operation:
        problem = VOLUME.with_operation(operation)
        kernels = [Kernel(layer="conv", problem=problem)]
        given = Settings(workspace_limit_bytes=least(hungry, problem.part(1)) * 2 // 3)
        planned, live = decide(kernels, replay, given), decide(kernels, benchmark, given)
        assert planned.kernels[0].configuration.parts[0].slabs
        assert time_ms(planned) == pytest.approx(time_ms(live), rel=1e-3)
