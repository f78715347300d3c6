"""Reports that tests print and draw."""

from ucudnn.planning.decision import Method
from ucudnn.reporting.kernel_report import KernelReport
from ucudnn.reporting.report import Report


def kernel_report(**overrides):
    values = {
        "layer": "conv1",
        "operation": "Forward",
        "problem": "Forward 8x3x9x9 * 4x3x3x3 float32 NCHW",
        "count": 2,
        "configuration": "4x64 FFT",
        "undivided": "1x256 GEMM",
        "undivided_ms": 6.0,
        "micro_batched_ms": 2.0,
        "workspace_bytes": 100,
        "undivided_workspace_bytes": 7,
    }
    return KernelReport(**(values | overrides))


def make_report(*kernels):
    return Report(
        network="net",
        batch=256,
        method=Method.WR,
        limit_bytes=1024,
        policy="powerOfTwo",
        backend="cpu",
        conditions={"device": "a device"},
        kernels=kernels,
        benchmark_seconds=1.5,
        solver_seconds=0.25,
    )
