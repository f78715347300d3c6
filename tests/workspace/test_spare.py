"""The tail of an output serves as workspace, and the output is correct nevertheless."""

from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faulty_backend import FaultyBackend
from tests.support.operands import PROBLEM, QUICK, check_run, operands, written
from tests.support.problems import divisible
from ucudnn import Handle
from ucudnn.backends.base import SLACK_BYTES, Scaling
from ucudnn.backends.bench import Bench
from ucudnn.backends.cpu import CpuBackend
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.findings import Finding
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendError
from ucudnn.execution.plan import make_plan
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.problem import Operation
from ucudnn.profiles.measurement import Measurement, MeasurementStatus
from ucudnn.settings import Settings
from ucudnn.workspace.spare import own_bytes, parts_in_tail, tail_bytes, tail_step

LARGE = replace(PROBLEM, batch=24, spatial=(20, 20), x_batch_stride=0, y_batch_stride=0)
OUTPUTS = (Operation.FORWARD, Operation.BACKWARD_DATA)
TAILED = {  # GEMM's workspace of a sample is about as large as the sample that it writes
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
    """Return a configuration of these sizes, in this order, each with the workspace of the CPU backend's algorithm."""
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
    samples = problem.x_bytes // problem.batch, problem.y_bytes // problem.batch
    aligned = all(each % problem.alignment == 0 for each in samples)
    assert step == (sample // problem.batch if aligned else 0)
    assert tail_bytes(problem, fresh=False) == [0] * (problem.batch + 1)
    assert tail_bytes(problem) == [max(0, left * step - SLACK_BYTES) for left in range(problem.batch + 1)]
    wide = replace(problem, x_batch_stride=problem.x_sample + gap, y_batch_stride=problem.y_sample + gap, alignment=8)
    assert (tail_step(wide) > 0) == (gap == 0 and problem.operation is not Operation.BACKWARD_FILTER)


@pytest.mark.parametrize("operation", OUTPUTS)
@pytest.mark.parametrize("sizes", [(8, 8, 4, 2, 1, 1), (7, 5, 5, 3, 3, 1), (1, 1, 22), (24,), (3, 9, 12)])
def test_a_plan_writes_all_of_an_output_whose_tail_was_workspace_and_leaves_the_inputs(operation, sizes):
    problem = TAILED[operation]
    configuration = parts_of(problem, *sizes)
    backend = CpuBackend()
    plan = make_plan(problem, configuration, backend, fresh=True)
    workspace = backend.allocate(plan.workspace_bytes)
    check_run(problem, lambda *xwy: plan.launch(*xwy, workspace, Scaling(0.5, 0.0)), 3, alpha=0.5)

    def run_bound(*xwy):
        inputs = [each for each in xwy if each is not written(problem, *xwy)]
        before = [each.copy() for each in inputs]
        for call in plan.bind(*xwy, workspace):
            call()
        for each, copy in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(each, copy)

    check_run(problem, run_bound, 3)
    lent = parts_in_tail(problem, configuration)
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


def test_a_workspace_that_would_pass_the_end_of_the_output_is_allocated():
    problem = TAILED[Operation.FORWARD]
    step = tail_step(problem)
    for short, lent in ((SLACK_BYTES, True), (SLACK_BYTES - 1, False), (0, False)):
        parts = [MicroConfiguration(size=14, algorithm="a", time_ms=1.0, workspace_bytes=10 * step - short)]
        parts.append(MicroConfiguration(size=10, algorithm="a", time_ms=1.0, workspace_bytes=0))
        assert parts_in_tail(problem, Configuration(parts=tuple(parts))) == [lent, False]


@pytest.mark.parametrize("offset", [0, 8, 16, 255, 256, 300])
def test_cudnns_spare_memory_is_aligned_to_256_bytes_inside_the_tensor(offset):
    backend = CudnnBackend.__new__(CudnnBackend)  # it only adds
    at, step, samples = 1 << 20 | offset, 1000, 9
    spare = CudnnBackend.spare(backend, at, samples * step)
    behind = CudnnBackend.tail_buffer(backend, at, start=4, step_bytes=step, samples=samples)
    for buffer, begin in ((spare.buffer, at), (behind, at + 4 * step)):
        assert buffer.address % 256 == 0
        assert begin <= buffer.address
        assert buffer.address + buffer.size_bytes <= at + samples * step
        assert buffer.size_bytes >= at + samples * step - begin - SLACK_BYTES
    assert spare.size_bytes == spare.buffer.size_bytes
    assert CudnnBackend.spare(backend, at, 255) is None


def test_memory_of_a_tensor_with_gaps_is_not_workspace():
    strided, dense = (
        SimpleNamespace(__cuda_array_interface__={"data": (4096, False), "strides": strides, "shape": (1000,)})
        for strides in ((16,), None)
    )
    backend = CudnnBackend.__new__(CudnnBackend)
    assert CudnnBackend.spare(backend, strided, 8000) is None
    assert CudnnBackend.spare(backend, dense, 8000).buffer.address == 4096
    assert CpuBackend().spare(np.zeros((64, 64))[::2], 16384) is None
    handle = Handle(backend="cpu", workspace_limit="64KiB", effort=QUICK)
    problem = TAILED[Operation.FORWARD]
    x, w, y = operands(problem)
    handle.convolve(problem, x, w, y, fresh=True)
    (entry,) = handle._entries.values()
    entry.decide(replace(entry.decision, configuration=parts_of(problem, 8, 6, 4, 2, 2, 1, 1)))
    wide = np.zeros((48, *y.shape[1:]))
    with pytest.raises(BackendError, match="not contiguous"):
        handle.convolve(problem, x, w, wide[::2], fresh=True)
    assert {part.algorithm for part in entry.decision.configuration.parts} == {"GEMM"}, "no algorithm was discarded"


def test_memory_behind_a_sample_is_aligned_inside_the_array():
    for samples in (3, 5):
        array = np.zeros((samples, 7, 11))
        for start in range(1, samples):
            step = array[0].nbytes
            buffer = CpuBackend().tail_buffer(array, start=start, step_bytes=step, samples=samples)
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
            left, free = 256, tail_bytes(problem)
            for part in fresh.configuration.parts:
                left -= part.size
                assert part.workspace_bytes <= max(limit, free[left])
            if operation is Operation.BACKWARD_FILTER:
                assert fresh.configuration == plain.configuration
            gains.append(plain.configuration.time_ms / fresh.configuration.time_ms)
    if limit < 64 << 20:
        assert max(gains) > 1.1


@pytest.mark.parametrize("policy", ["undivided", "powerOfTwo", "adaptive", "all"])
@pytest.mark.parametrize("operation", Operation)
def test_a_handle_computes_fresh_outputs_within_the_limit(operation, policy):
    problem = replace(LARGE, operation=operation)
    limit = {"undivided": "4MiB"}.get(policy, "64KiB")
    handle = Handle(backend="cpu", workspace_limit=limit, policy=policy, effort=QUICK)
    for seed in range(2):
        check_run(problem, partial(handle.convolve, problem, fresh=True), seed)
    assert handle.workspace_bytes <= handle.settings.workspace_limit_bytes
    (kernel,) = handle.report().kernels
    assert kernel.workspace_bytes <= handle.settings.workspace_limit_bytes
    assert kernel.calls == 2


@pytest.mark.parametrize(
    ("beta", "bound"), [(1.0, {"workspace_limit": "64KiB"}), (0.0, {"total_workspace": "256KiB"})], ids=["beta", "WD"]
)
@pytest.mark.parametrize("operation", OUTPUTS)
def test_an_output_that_must_be_read_is_not_workspace(operation, beta, bound):
    problem = replace(LARGE, operation=operation)
    handle = Handle(backend="cpu", effort=QUICK, **bound)
    check_run(problem, partial(handle.convolve, problem, beta=beta, fresh=True), 4, beta=beta)
    assert all(not entry.kernel.fresh for entry in handle._entries.values())


@pytest.mark.parametrize("operation", OUTPUTS)
@pytest.mark.usefixtures("hungry")
def test_the_rest_of_a_failed_plan_is_computed_within_the_limit(operation):
    problem = TAILED[operation]
    configuration = parts_of(problem, 8, 6, 4, 2, 2, 1, 1)
    limit = own_bytes(problem, configuration)
    assert limit < configuration.workspace_bytes
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=limit, effort=QUICK)
    handle.convolve(problem, *operands(problem, 5), fresh=True)
    (entry,) = handle._entries.values()
    entry.decide(replace(entry.decision, configuration=configuration))
    backend.broken, backend.first_broken = {"GEMM"}, 14
    for seed in (5, 6):
        check_run(problem, partial(handle.convolve, problem, fresh=True), seed)
        assert handle.workspace_bytes <= limit


class Scarce(CpuBackend):
    """A CPU whose benchmarks have no memory for larger workspaces, and count how often they try."""

    def __init__(self, room):
        super().__init__()
        self.room = room
        self.tried = []

    @contextmanager
    def bench(self, problem):
        backend = self
        with super().bench(problem) as own:

            class Narrow(Bench):
                def measure(self, size, algorithm, *rest, **options):
                    if algorithm.workspace_bytes > backend.room:
                        backend.tried.append((problem.part(size), algorithm.name))
                        return Measurement.failed(algorithm, "MemoryError: no room", MeasurementStatus.HINDERED)
                    return own.measure(size, algorithm, *rest, **options)

            yield Narrow()


@pytest.mark.parametrize("policy", ["powerOfTwo", "adaptive", "all"])
def test_a_benchmark_tries_little_if_memory_is_short(policy, tmp_path):
    problem = TAILED[Operation.FORWARD]
    backend = Scarce(200_000)
    options = {"workspace_limit": "128KiB", "policy": policy, "effort": QUICK, "database": str(tmp_path / "m.db")}
    check_run(problem, partial(Handle(backend=backend, **options).convolve, problem, fresh=True))
    sizes = len(Settings.load(policy=policy).policy.sizes(problem.batch))
    assert len(backend.tried) <= sizes + 4
    # The next process has enough memory, and may measure what could not be measured: nothing is known about it.
    parts = [part for part, _ in backend.tried]
    with closing(Database(tmp_path / "m.db")) as database:
        known = {(part, each.algorithm.name) for part, each in database.load(CpuBackend().conditions(), parts)}
    assert known.isdisjoint(backend.tried)
    assert known or not parts  # other algorithms of these parts were measured


def test_a_report_with_times_needs_no_more_workspace_than_a_call(monkeypatch):
    monkeypatch.setattr("ucudnn.reporting.kernel_report.FAR", inf)  # however busy the machine is, the plan stays
    problem = TAILED[Operation.FORWARD]
    configuration = parts_of(problem, 8, 6, 4, 2, 2, 1, 1)
    limit = own_bytes(problem, configuration)
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=limit, effort=QUICK)
    x, w, y = operands(problem)
    handle.convolve(problem, x, w, y, fresh=True)
    (entry,) = handle._entries.values()
    entry.decide(replace(entry.decision, configuration=configuration, undivided=None))
    backend.memory = limit
    (kernel,) = handle.report(repeats=1).kernels
    assert kernel.executed_ms > 0
    assert kernel.spare_bytes == configuration.workspace_bytes > kernel.workspace_bytes == limit


def test_a_capture_uses_the_registered_kernel_without_its_tail():
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit="64KiB", effort=QUICK)
    handle.get_algorithm(LARGE)
    handle.optimize()
    measured = handle._benchmark.measured
    backend.captures = True
    check_run(LARGE, partial(handle.convolve, LARGE, fresh=True))
    assert handle._benchmark.measured == measured
    assert len(handle._entries) == 1


def test_measurements_of_ranks_for_different_limits_are_all_kept():
    problem = TAILED[Operation.FORWARD]
    part, names = problem.part(8), ["GEMM", "FFT", "IMPLICIT_GEMM"]
    backend = CpuBackend()

    class Ranks:
        """Ranks that each measure another algorithm, for another request."""

        collective = True

        def ready(self):
            pass

        def explore(self, requests, own):
            for request, name in zip(requests, names, strict=True):
                item = part, Measurement.of(backend.algorithm(part, name), (1.0,))
                yield Finding(request, Exploration(names=tuple(names), sizes=(8,)), [item])

    benchmark = Benchmark(backend, parallel=Ranks())
    requests = [Request(problem=problem, sizes=(8,), limit_bytes=1 << power) for power in (30, 31, 32)]
    benchmark.explore(requests)
    for request in requests:
        assert {micro.algorithm for micro in benchmark.micro_configurations(request)} == set(names)


def test_a_launcher_computes_fresh_outputs():
    handle = Handle(backend="cpu", workspace_limit="64KiB", effort=QUICK)
    check_run(LARGE, partial(handle.convolve, LARGE, fresh=True), 7)
    assert handle.plans.launcher(LARGE) is None
    check_run(LARGE, handle.plans.launcher(LARGE, fresh=True), 7)
