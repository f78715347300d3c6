"""The algorithms, errors and measurements of the CPU backend."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ucudnn.backends.base import Offset, Scaling
from ucudnn.backends.cpu.backend import CPU_ALGORITHMS, CpuBackend
from ucudnn.backends.cpu.bench import CpuBench
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation
from ucudnn.profiles.measurement import Algorithm, Effort, MeasurementStatus

BACKEND = CpuBackend()
EFFORT = Effort(warmup=0, repeats=2, time_limit_ms=1e6)
PROBLEM = ConvolutionProblem(
    operation=Operation.FORWARD, batch=4, channels=4, spatial=(20, 20), filters=6, kernel=(3, 3), padding=(1, 1)
)


def names(**changes):
    return [algorithm.name for algorithm in BACKEND.algorithms(replace(PROBLEM, **changes))]


def workspaces(problem):
    return {algorithm.name: algorithm.workspace_bytes for algorithm in BACKEND.algorithms(problem)}


def launch(problem=PROBLEM, algorithm="GEMM", start=0, workspace=None, **tensors):
    x, w, y = BACKEND.operands(problem)
    call = BACKEND.prepare(problem, algorithm)
    if workspace is None:
        workspace = BACKEND.allocate(call.workspace_bytes)
    given = {"x": x, "w": w, "y": y} | tensors
    call.launch(**given, workspace=workspace, offset=Offset(start))
    return given


@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.value)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, list(CPU_ALGORITHMS)),
        ({"groups": 2, "dtype": DataType.FLOAT64}, list(CPU_ALGORITHMS)),
        ({"layout": Layout.NHWC}, list(CPU_ALGORITHMS)),
        ({"stride": (2, 1)}, ["IMPLICIT_GEMM", "GEMM"]),
        ({"dilation": (1, 2)}, ["IMPLICIT_GEMM", "GEMM"]),
        ({"kernel": (3, 5)}, ["IMPLICIT_GEMM", "GEMM", "FFT", "FFT_TILING"]),
        ({"kernel": (17, 3), "padding": (8, 1)}, ["IMPLICIT_GEMM", "GEMM", "FFT"]),
        ({"spatial": (14, 14)}, ["IMPLICIT_GEMM", "GEMM", "FFT", "WINOGRAD_2X2", "WINOGRAD_4X4"]),
        ({"spatial": (14, 15)}, list(CPU_ALGORITHMS)),
    ],
    ids=["3x3", "grouped", "channels last", "stride", "dilation", "3x5", "17x3", "one tile", "two tiles"],
)
def test_offers_the_algorithms_that_apply(operation, changes, expected):
    assert names(operation=operation, **changes) == expected


def test_states_workspaces_to_the_byte():
    problem = ConvolutionProblem(
        operation=Operation.FORWARD, batch=2, channels=4, spatial=(8, 8), filters=16, kernel=(3, 3), padding=(1, 1)
    )
    columns, result = 4 * 9 * 2 * 64 * 4, 16 * 2 * 64 * 4
    spectra = 9 * 5 * 8 * (2 * 16 + 16 * 4)  # size 8 + 1 = 9; products and filters ...
    spectra += max(9 * 5 * 8 * (2 * 4), 9 * 9 * 4 * 16)  # ... and x, or one sample of the result over it
    points = 16 * 4 * (16 * 2 * 16 + 16 * 4 + 4 * 2 * 16)  # 4 x 4 points of products, filters and tiles
    assert workspaces(problem) == {
        "IMPLICIT_GEMM": 0,
        "GEMM": columns + result,
        "FFT": spectra,
        "WINOGRAD_2X2": points + 16 * 4 * (4 * 2 * 16),  # and one intermediate of the tiles
        "WINOGRAD_4X4": 36 * 4 * (16 * 2 * 4 + 16 * 4 + 4 * 2 * 4) + 36 * 4 * (4 * 2 * 4),
    }


@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.value)
def test_workspaces_grow_with_the_micro_batch(operation):
    problem = replace(PROBLEM, operation=operation)
    sizes = [workspaces(problem.with_batch(batch)) for batch in (1, 2, 16)]
    for name in set(CPU_ALGORITHMS) - {"IMPLICIT_GEMM"}:
        one, two, many = (size[name] for size in sizes)
        assert one < two < many


def test_refuses_what_numpy_lacks():
    problem = replace(PROBLEM, dtype=DataType.BFLOAT16)
    for refuse in (BACKEND.algorithms, BACKEND.bench, BACKEND.operands, lambda p: BACKEND.prepare(p, "GEMM")):
        with pytest.raises(UnsupportedProblemError, match="computes float16, float32 and float64, not bfloat16"):
            refuse(problem)


def test_refuses_an_algorithm_that_is_not_known_or_does_not_apply():
    with pytest.raises(
        UnsupportedProblemError, match="DIRECT is not an algorithm of the CPU backend: Forward 4x4x20x20"
    ):
        BACKEND.prepare(PROBLEM, "DIRECT")
    with pytest.raises(UnsupportedProblemError, match=r"FFT does not apply: .* by IMPLICIT_GEMM, GEMM$"):
        BACKEND.prepare(replace(PROBLEM, stride=(2, 2)), "FFT")


@pytest.mark.parametrize("algorithm", [name for name in CPU_ALGORITHMS if name != "IMPLICIT_GEMM"])
def test_refuses_a_workspace_that_is_too_small(algorithm):
    needed = workspaces(PROBLEM)[algorithm]
    with pytest.raises(BackendError, match=f"{algorithm} needs a workspace of {needed} bytes .* given {needed - 1}"):
        launch(algorithm=algorithm, workspace=BACKEND.allocate(needed - 1))


def test_refuses_a_workspace_that_is_no_run_of_aligned_bytes():
    memory = BACKEND.allocate(1 << 20)
    with pytest.raises(BackendError, match="does not begin on a multiple of 16 bytes"):
        launch(workspace=BACKEND.segment(memory, 8, memory.nbytes - 8))
    with pytest.raises(BackendError, match="one run of bytes"):
        launch(workspace=memory.view(np.float32))
    with pytest.raises(BackendError, match="one run of bytes"):
        launch(workspace=memory[::2])


def test_refuses_tensors_that_do_not_fit():
    x, w, y = BACKEND.operands(PROBLEM)
    with pytest.raises(BackendError, match=r"x has shape \(4, 4, 20, 19\): .* needs samples of \(4, 20, 20\)"):
        launch(x=x[..., :19])
    with pytest.raises(BackendError, match=r"y is float64: .* needs float32"):
        launch(y=y.astype(np.float64))
    with pytest.raises(BackendError, match=r"w has shape .* needs \(6, 4, 3, 3\), C-contiguous"):
        launch(w=w.swapaxes(2, 3))
    with pytest.raises(BackendError, match="x has 4 samples: too few for 4 from sample 1 on"):
        launch(start=1)
    with pytest.raises(BackendError, match="y has 3 samples: too few for 4 from sample 0 on"):
        launch(y=y[:3])


def test_numpy_scalars_as_factors_keep_the_precision():
    x, w, y = BACKEND.operands(PROBLEM)
    expected = launch()["y"] * np.float32(0.5)
    BACKEND.prepare(PROBLEM, "IMPLICIT_GEMM").launch(
        x, w, y, BACKEND.allocate(0), scaling=Scaling(np.float64(0.5), np.float64(0))
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_segments_share_memory_and_stay_inside():
    memory = BACKEND.allocate(256)
    assert memory.nbytes == 256
    assert memory.ctypes.data % 64 == 0
    part = BACKEND.segment(memory, 64, 128)
    assert part.nbytes == 128
    assert part.ctypes.data == memory.ctypes.data + 64
    for offset, size in ((192, 65), (-1, 2), (0, -1)):
        with pytest.raises(BackendError, match="not inside a workspace of 256"):
            BACKEND.segment(memory, offset, size)


def test_buffer_size_of_numpy_is_restored():
    before = np.getbufsize()
    launch()
    assert np.getbufsize() == before


def test_threads_launch_side_by_side():
    problem = ConvolutionProblem(
        operation=Operation.FORWARD, batch=4, channels=64, spatial=(20, 20), filters=64, kernel=(3, 3)
    )
    expected = launch(problem, "IMPLICIT_GEMM")["y"]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: launch(problem, "IMPLICIT_GEMM")["y"], range(4)))
    assert all(np.array_equal(result, expected) for result in results)


def test_conditions_name_the_machine_and_the_versions():
    conditions = BACKEND.conditions()
    assert set(conditions) == {"device", "cpus", "python", "numpy", "cpu_algorithms"}
    assert all(conditions.values())
    assert conditions["numpy"] == np.__version__
    assert BACKEND.name == "cpu"


def test_operands_have_the_layout_and_batch_strides():
    problem = replace(PROBLEM, layout=Layout.NHWC, x_batch_stride=PROBLEM.x_sample + 3)
    x, w, y = BACKEND.operands(problem)
    assert (x.shape, w.shape, y.shape) == (problem.x_shape, problem.w_shape, problem.y_shape)
    assert x.strides[0] == problem.x_batch_stride * 4
    assert all(-0.5 <= array.min() < array.max() < 0.5 for array in (x, w, y))


def test_workspace_memory_is_touched_before_the_first_sample():
    touched = []

    class Call:
        def __init__(self, call):
            self._call = call

        def launch(self, x, w, y, workspace, offset, scaling):
            touched.append((workspace.size, not workspace.any()))
            self._call.launch(x, w, y, workspace, offset, scaling)

    def poisoned(size_bytes):
        memory = BACKEND.allocate(size_bytes)
        memory.fill(0xFF)
        return memory

    bench = CpuBench(PROBLEM, lambda *arguments: Call(BACKEND.prepare(*arguments)), poisoned)
    for algorithm in BACKEND.algorithms(PROBLEM):
        touched.clear()
        assert bench.measure(4, algorithm, EFFORT).status is MeasurementStatus.MEASURED
        assert touched[0] == (algorithm.workspace_bytes, True)


@pytest.mark.parametrize(
    ("size", "name", "workspace_bytes", "reason"),
    [
        (5, "GEMM", 0, "a micro-batch of 5 does not fit into the mini-batch of 4"),
        (2, "GEMM", 7, "BackendError: GEMM needs a workspace of"),
        (2, "DIRECT", 0, "UnsupportedProblemError: DIRECT is not an algorithm"),
        (2, "GEMM", 1 << 60, "MemoryError"),
    ],
)
def test_a_failed_measurement_says_why(size, name, workspace_bytes, reason):
    with BACKEND.bench(PROBLEM) as bench:
        measurement = bench.measure(size, Algorithm(name=name, workspace_bytes=workspace_bytes, api="cpu"), EFFORT)
    assert measurement.status is (MeasurementStatus.HINDERED if reason == "MemoryError" else MeasurementStatus.FAILED)
    assert measurement.samples == 0
    assert reason in measurement.reason


def test_each_call_of_a_benchmark_counts():
    launched = []

    def prepare(problem, algorithm):
        call = BACKEND.prepare(problem, algorithm)
        return SimpleNamespace(launch=lambda *given: (launched.append(given), call.launch(*given)))

    algorithm = next(each for each in BACKEND.algorithms(PROBLEM) if each.name == "GEMM")
    bench = CpuBench(PROBLEM, prepare, BACKEND.allocate)
    found = bench.measure(2, algorithm, Effort(warmup=3, repeats=2, time_limit_ms=1e6))
    assert found.samples == len(launched) == 2


def test_benchmarks_are_expected_to_take_longer_the_more_there_is_to_multiply(monkeypatch):
    monkeypatch.setattr(CpuBackend, "elapsed_ms", lambda self, run: 10.0)
    large = replace(PROBLEM, batch=2**20)
    one, two, much = map(BACKEND.expected_seconds, ([PROBLEM], [PROBLEM, PROBLEM], [large]))
    assert BACKEND.expected_seconds([]) == 0
    assert two == pytest.approx(2 * one)
    assert much - one == pytest.approx(16 * 0.01 * (large.multiplications - PROBLEM.multiplications) / 512**3)
