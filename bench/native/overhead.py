"""UcudnnHandle_t undivided against plain cuDNN with the same algorithms: GPU time of AlexNet's convolutions.

    python -m bench.native.overhead [--library libucudnn.so]

Legacy algorithms, 64 MiB, policy undivided. The handle's C interface in this process and cudnnConvolution... run in
turn, with the same algorithm and as much workspace. Without --library the script compiles the library first.
"""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bench.tools.results import save
from bench.tools.script import command_line, out_of, run_main
from ucudnn.backends.cudnn.algorithms.legacy_call import ALGORITHMS, LegacyDescriptors
from ucudnn.backends.cudnn.api.library import HostScalar
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.native import bridge, build
from ucudnn.networks.tables import load_network
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.plan_timing import alternate

LIMIT = 64 * 2**20
P, INT = ctypes.c_void_p, ctypes.c_int


class Descriptors(ctypes.Structure):
    """The C structure ucudnn_descriptors."""

    _fields_ = (("x", P), ("w", P), ("convolution", P), ("y", P))


class Plain(ctypes.Structure):
    """The C structure ucudnn_plain."""

    _fields_ = (("algorithm", INT), ("workspace", P), ("workspace_bytes", ctypes.c_size_t))


def both(
    native: ctypes.CDLL, handle: ctypes.c_void_p, backend: CudnnBackend, problem: ConvolutionProblem
) -> dict[str, Callable[[], None]]:
    """Return the call of the handle, and cuDNN's own call with the same algorithm."""
    own = LegacyDescriptors(backend.library, problem)
    asked = Descriptors(own.x, own.w, own.convolution, own.y)
    x, w, y, _ = backend.bind(*(tensors := backend.operands(problem)))
    operation = list(ALGORITHMS).index(problem.operation)
    one, zero, nothing = HostScalar(1.0, double=False), HostScalar(0.0, double=False), Plain()
    through = partial(
        native.ucudnn_convolve,
        handle,
        operation,
        ctypes.byref(asked),
        one.address,
        x,
        w,
        y,
        zero.address,
        ctypes.byref(nothing),
    )
    if through():
        raise SystemExit(f"{problem}: the handle failed")
    planner = next(iter(bridge._ATTACHED[-1][1]._planners.values()))
    (decision,) = [found for (known, _), found in planner._decided.items() if known == problem]
    (part,) = decision.configuration.parts
    workspace = backend.allocate(part.workspace_bytes)
    first, second, output = {
        Operation.FORWARD: ((own.x, x), (own.w, w), (own.y, y)),
        Operation.BACKWARD_DATA: ((own.w, w), (own.y, y), (own.x, x)),
        Operation.BACKWARD_FILTER: ((own.x, x), (own.y, y), (own.w, w)),
    }[problem.operation]
    plain: Any = partial(
        backend.library.function(f"cudnnConvolution{problem.operation.value}"),
        native.ucudnn_cudnn_handle(handle),
        one.address,
        *first,
        *second,
        own.convolution,
        ALGORITHMS[problem.operation][part.algorithm],
        workspace.address,
        part.workspace_bytes,
        zero.address,
        *output,
    )
    keeps = (own, asked, tensors, one, zero, nothing, workspace)
    return {f"handle, {part.algorithm}": lambda: (through(), keeps)[0], "cudnn": plain}


def main() -> None:
    """Measure, print and write."""
    parser = command_line(__doc__, __spec__.name, "native/overhead.json")
    parser.add_argument("--library", type=Path, help="libucudnn.so; compiled by default")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size of AlexNet (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each call (%(default)s)")
    options = parser.parse_args()
    os.environ |= {
        "UCUDNN_BACKEND": "cudnn:legacy",
        "UCUDNN_BATCH_SIZE_POLICY": "undivided",
        "UCUDNN_DEFAULT_WORKSPACE_LIMIT": str(LIMIT),
    }
    backend = CudnnBackend()
    ctypes.CDLL(backend.library.path, mode=ctypes.RTLD_GLOBAL)  # the library of the handle, too
    ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    native = ctypes.CDLL(str(options.library or build.build(Path(mkdtemp()))))
    native.ucudnn_convolve.argtypes = (P, INT, P, P, P, P, P, P, P)
    native.ucudnn_cudnn_handle.argtypes, native.ucudnn_cudnn_handle.restype = (P,), P
    handle = ctypes.c_void_p()
    if native.ucudnn_create(ctypes.byref(handle)):
        raise SystemExit("no handle")
    rows: list[dict[str, Any]] = []
    for kernel in load_network("alexnet", options.batch).kernels():
        runs = both(native, handle, backend, kernel.problem)
        times = alternate(runs, backend, options.repeats)
        ours, plain = times.values()
        rows.append({"kernel": str(kernel), "algorithm": next(iter(times)), "handle_ms": ours, "cudnn_ms": plain})
        print(f"{kernel!s:24} {next(iter(times)):32} {ours:8.4f} {plain:8.4f} {ours / plain:7.4f}", flush=True)
    ours, plain = (sum(float(row[name]) for row in rows) for name in ("handle_ms", "cudnn_ms"))
    print(f"all {ours:.4f} {plain:.4f} {ours / plain:.4f} (within 1.02 was aimed at)")
    answer = {"conditions": dict(backend.conditions()), "kernels": rows, "ratio": ours / plain}
    save(out_of(options), answer)


if __name__ == "__main__":
    run_main(main)
