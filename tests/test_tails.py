"""What of an output is not written yet is workspace for what is, and the output is none the worse for it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import reference_convolution
from tests.test_dispatch import FaultyBackend
from tests.test_handle import PROBLEM, QUICK, direct, operands, poison, relative, written
from tests.test_slabs import divisible
from ucudnn import Handle
from ucudnn.backends.base import SLACK_BYTES
from ucudnn.backends.cpu import CpuBackend
from ucudnn.benchmark import Benchmark
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.decision import decide
from ucudnn.kernel import Kernel
from ucudnn.networks import load_network
from ucudnn.plan import make_plan
from ucudnn.problem import Operation
from ucudnn.settings import Settings
from ucudnn.tails import free_bytes, own_bytes, places, tail_step

LARGE = replace(PROBLEM, batch=24, spatial=(20, 20), x_batch_stride=0, y_batch_stride=0)
OUTPUTS = (Operation.FORWARD, Operation.BACKWARD_DATA)
LENDING = {  # GEMM's workspace of a sample is about as large as the sample that it writes
    Operation.FORWARD: replace(LARGE, channels=1, filters=24, x_batch_stride=0, y_batch_stride=0),
    Operation.BACKWARD_DATA: replace(
        LARGE,
        operation=Operation.BACKWARD_DATA,
        channels=16,
        kernel=(1, 1),
        padding=(0, 0),
        x_batch_stride=0,
        y_batch_stride=0,
    ),
}


def parts_of(problem, *sizes, algorithm="GEMM"):
    """Return a configuration of these sizes, in this order, with what the CPU's algorithm needs."""
    cpu = CpuBackend()
    return Configuration(
        parts=tuple(
            MicroConfiguration(
                size=size,
                algorithm=algorithm,
                time_ms=1.0,
                workspace_bytes=cpu.algorithm(problem.part(size), algorithm).workspace_bytes,
            )
            for size in sizes
        )
    )


@given(divisible(), st.integers(0, 3))
def test_only_dense_outputs_have_tails(problem, gap):
    step = tail_step(problem)
    sample = {Operation.FORWARD: problem.y_bytes, Operation.BACKWARD_DATA: problem.x_bytes}.get(problem.operation, 0)
    assert step in (0, sample // problem.batch)
    if problem.operation is Operation.BACKWARD_FILTER:
        assert step == 0
    wide = replace(problem, x_batch_stride=problem.x_sample + gap, y_batch_stride=problem.y_sample + gap, alignment=8)
    assert (tail_step(wide) > 0) == (gap == 0 and problem.operation is not Operation.BACKWARD_FILTER)


@pytest.mark.parametrize("operation", OUTPUTS)
@pytest.mark.parametrize("sizes", [(8, 8, 4, 2, 1, 1), (7, 5, 5, 3, 3, 1), (1, 1, 22), (24,), (3, 9, 12)])
def test_plans_write_all_of_the_output_whatever_was_in_its_tail(operation, sizes):
    problem = LENDING[operation]
    configuration = parts_of(problem, *sizes)
    backend = CpuBackend()
    plan = make_plan(problem, configuration, backend, fresh=True)
    x, w, y = operands(problem, 3)
    expected = 0.5 * reference_convolution(problem, x, w, y)
    out = written(problem, x, w, y)
    poison(out, 0.0)
    plan.launch(x, w, y, alpha=0.5, beta=0.0, workspace=backend.allocate(plan.workspace_bytes))
    assert relative(out, expected) <= 1e-10
    lent = places(problem, configuration)
    assert not lent[-1], "there is nothing behind the last"
    assert any(lent) == (sizes[0] < 13)
    assert plan.workspace_bytes == own_bytes(problem, configuration)
    left = problem.batch
    for part, in_tail in zip(configuration.parts, lent, strict=True):
        left -= part.size
        assert in_tail == (part.workspace_bytes <= max(0, left * tail_step(problem) - SLACK_BYTES))
    own = [part.workspace_bytes for part, in_tail in zip(configuration.parts, lent, strict=True) if not in_tail]
    assert plan.workspace_bytes == max(own)
    assert [step.tail is not None for step in plan.steps] == lent


def test_memory_behind_a_sample_lies_in_the_array_and_begins_where_workspaces_do():
    for samples in (3, 5):
        array = np.zeros((samples, 7, 11))
        for start in range(1, samples):
            step = array[0].nbytes
            buffer = CpuBackend().behind(array, start=start, step_bytes=step, samples=samples)
            assert buffer.ctypes.data % 64 == 0
            assert buffer.ctypes.data >= array[start:].ctypes.data
            assert buffer.ctypes.data + buffer.nbytes <= array.ctypes.data + array.nbytes
            assert buffer.nbytes >= (samples - start) * step - SLACK_BYTES


@pytest.mark.parametrize("limit", [1 << 22, 16 << 20, 64 << 20])
def test_alexnet_is_faster_within_the_same_limit(replay, limit):
    benchmark = Benchmark(replay("alexnet"))
    settings = Settings.load(workspace_limit_bytes=limit, backend="cpu")
    gains = []
    for layer in load_network("alexnet", 256).layers:
        for operation in Operation:
            problem = layer.forward.with_operation(operation)
            plain, fresh = (
                decide([Kernel(layer="", problem=problem, fresh=fresh)], benchmark, settings).kernels[0]
                for fresh in (False, True)
            )
            assert plain.workspace_bytes == plain.configuration.workspace_bytes <= limit
            assert fresh.workspace_bytes == own_bytes(problem, fresh.configuration) <= limit
            assert sum(part.size for part in fresh.configuration.parts) == 256
            assert fresh.configuration.time_ms <= plain.configuration.time_ms
            left = 256
            for part in fresh.configuration.parts:
                left -= part.size
                assert part.workspace_bytes <= max(limit, free_bytes(problem, left))
            if operation is Operation.BACKWARD_FILTER:
                assert fresh.configuration == plain.configuration
            gains.append(plain.configuration.time_ms / fresh.configuration.time_ms)
    if limit < 64 << 20:
        assert max(gains) > 1.1


@pytest.mark.parametrize("policy", ["undivided", "powerOfTwo", "adaptive", "all"])
@pytest.mark.parametrize("operation", Operation)
def test_handles_compute_fresh_outputs(operation, policy):
    problem = replace(LARGE, operation=operation)
    limit = {"undivided": "4MiB"}.get(policy, "64KiB")
    handle = Handle(backend="cpu", workspace_limit=limit, policy=policy, effort=QUICK)
    for seed in range(2):
        x, w, y = operands(problem, seed)
        expected = direct(problem, x, w, y, 1.0, 0.0)
        out = written(problem, x, w, y)
        poison(out, 0.0)
        handle.convolve(problem, x, w, y, fresh=True)
        assert relative(out, expected) <= 1e-10
    assert handle.workspace_bytes <= handle.settings.workspace_limit_bytes
    (kernel,) = handle.report().kernels
    assert kernel.workspace_bytes <= handle.settings.workspace_limit_bytes
    assert kernel.calls == 2


@pytest.mark.parametrize("options", [{"beta": 1.0}, {"total": True}], ids=["beta", "WD"])
@pytest.mark.parametrize("operation", OUTPUTS)
def test_what_the_output_holds_is_kept_where_it_is_wanted(operation, options):
    problem = replace(LARGE, operation=operation)
    bound = {"total_workspace": "256KiB"} if options.get("total") else {"workspace_limit": "64KiB"}
    handle = Handle(backend="cpu", effort=QUICK, **bound)
    beta = options.get("beta", 0.0)
    x, w, y = operands(problem, 4)
    expected = direct(problem, x, w, y, 1.0, beta)
    out = written(problem, x, w, y)
    poison(out, beta)
    handle.convolve(problem, x, w, y, beta=beta, fresh=True)
    assert relative(out, expected) <= 1e-10
    assert all(not entry.kernel.fresh for entry in handle._entries.values())


@pytest.mark.parametrize("operation", OUTPUTS)
@pytest.mark.usefixtures("hungry")
def test_what_fails_half_way_is_computed_within_the_limit(operation):
    problem = LENDING[operation]
    configuration = parts_of(problem, 8, 6, 4, 2, 2, 1, 1)
    limit = own_bytes(problem, configuration)
    assert limit < configuration.workspace_bytes
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=limit, effort=QUICK)
    x, w, y = operands(problem, 5)
    handle.convolve(problem, x.copy(), w.copy(), y.copy(), fresh=True)
    (entry,) = handle._entries.values()
    entry.decide(replace(entry.decision, configuration=configuration))
    backend.broken, backend.first_broken = {"GEMM"}, 14
    for seed in (5, 6):
        x, w, y = operands(problem, seed)
        expected = reference_convolution(problem, x, w, y)
        out = written(problem, x, w, y)
        poison(out, 0.0)
        handle.convolve(problem, x, w, y, fresh=True)
        assert relative(out, expected) <= 1e-10
        assert handle.workspace_bytes <= limit


def test_launchers_know_fresh_outputs():
    handle = Handle(backend="cpu", workspace_limit="64KiB", effort=QUICK)
    x, w, y = operands(LARGE, 7)
    handle.convolve(LARGE, x, w, y, fresh=True)
    assert handle.launcher(LARGE) is None
    launch = handle.launcher(LARGE, fresh=True)
    expected = direct(LARGE, x, w, y, 1.0, 0.0)
    y[...] = np.nan
    launch(x, w, y)
    assert relative(y, expected) <= 1e-10
