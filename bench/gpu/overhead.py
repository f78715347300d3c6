"""The cost of the handle over calling cuDNN with the same algorithm: GPU time, and CPU time of a call.

    python -m bench.gpu.overhead

GPU time: AlexNet's convolutions, undivided at 64 MiB, by `Handle.convolve` and by cudnnBackendExecute of the same plan
with the same variant pack, in turn. CPU time: a convolution so small that the host limits its speed, with recurring
pointers, as one micro-batch and as eight. The host waits for the GPU every 200 calls, while the clock stands still.
"""

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from bench.tools import script
from bench.tools.backends import open_computing
from bench.tools.results import save
from ucudnn import Handle
from ucudnn.backends.base import OVERWRITE, ComputeBackend
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import configuration_of
from ucudnn.kernel import KernelKey
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import Decision
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.plan_timing import alternate

SMALL = ConvolutionProblem(
    operation=Operation.FORWARD, batch=8, channels=16, spatial=(14, 14), filters=16, kernel=(3, 3), padding=(1, 1)
)
CALLS = 200


def itself(handle: Handle, problem: ConvolutionProblem, layer: str = "") -> Callable[[], None]:
    """Return cuDNN's own call with the execution plan and the variant pack of the handle's last call."""
    entry = handle._entries[KernelKey(layer, problem)]
    assert entry.plan is not None
    (step,) = entry.plan.steps
    call: Any = step.call
    plan, pack = call._plans[OVERWRITE], list(call._packs.values())[-1]
    return partial(call._execute, call._handle, plan.address, pack.address)


def gpu_time(backend: ComputeBackend, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Return each kernel's time through the handle and by cuDNN itself."""
    handle = Handle(backend=backend, policy="undivided", workspace_limit="64MiB", effort=Effort(repeats=3))
    rows: list[dict[str, Any]] = []
    for kernel in load_network("alexnet", batch).kernels():
        problem, layer = kernel.problem, kernel.layer
        tensors = backend.operands(problem)
        x, w, y, _ = backend.bind(*tensors)
        through = partial(handle.convolve, problem, x, w, y, layer=layer)
        through()
        times = alternate({"handle": through, "cudnn": itself(handle, problem, layer)}, backend, repeats)
        ratio = times["handle"] / times["cudnn"]
        rows.append({"layer": layer, "operation": problem.operation.value, **times, "ratio": ratio})
        print(f"{kernel!s:24} {times['handle']:8.4f} ms {times['cudnn']:8.4f} ms {ratio:7.4f}", flush=True)
    return rows


def cpu_us(backend: ComputeBackend, run: Callable[[], object]) -> float:
    """Return the microseconds of one call on the host: the median of 15 batches of calls."""
    samples = []
    for _ in range(15):
        backend.elapsed_ms(lambda: None)  # waits for the GPU
        begin = perf_counter()
        for _ in range(CALLS):
            run()
        samples.append((perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(samples)


def cpu_time(backend: ComputeBackend) -> dict[str, float]:
    """Return the microseconds of calls that take the host longer than the GPU."""
    handle = Handle(backend=backend, policy="undivided")
    tensors = backend.operands(SMALL)
    x, w, y, _ = backend.bind(*tensors)
    call = partial(handle.convolve, SMALL, x, w, y)
    call()
    answer = {"one_micro_batch_us": cpu_us(backend, call), "cudnn_itself_us": cpu_us(backend, itself(handle, SMALL))}
    cupy = cupy_module()
    arrays = [cupy.random.random(s, dtype=cupy.float32) for s in (SMALL.x_shape, SMALL.w_shape, SMALL.y_shape)]
    handle.forward(*arrays, padding=1)
    answer["one_micro_batch_arrays_us"] = cpu_us(backend, partial(handle.forward, *arrays, padding=1))
    divided = Handle(backend=backend)
    divided.get_algorithm(SMALL)
    divided.optimize()
    entry = divided._entries[KernelKey("", SMALL)]
    (micro, *_) = sorted(
        divided._benchmark.micro_configurations(Request(problem=SMALL, sizes=(1,), limit_bytes=2**26)),
        key=lambda each: (each.time_ms, each.algorithm),
    )
    parts = [micro] * SMALL.batch
    entry.decide(Decision(kernel=entry.kernel, configuration=configuration_of(parts), undivided=None))
    call = partial(divided.convolve, SMALL, x, w, y)
    call()
    answer["eight_micro_batches_us"] = cpu_us(backend, call)
    answer["a_micro_batch_us"] = answer["eight_micro_batches_us"] / SMALL.batch
    return answer


def main() -> None:
    """Measure, print and write."""
    parser = script.command_line(__doc__, __spec__.name, "gpu/overhead.json")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size of AlexNet (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each call (%(default)s)")
    arguments = parser.parse_args()
    backend = open_computing("cudnn")
    print("kernel                     handle       cuDNN    ratio")
    rows = gpu_time(backend, arguments.batch, arguments.repeats)
    handle_ms, cudnn_ms = (sum(row[name] for row in rows) for name in ("handle", "cudnn"))
    host = cpu_time(backend)
    print(f"all kernels              {handle_ms:8.4f} ms {cudnn_ms:8.4f} ms {handle_ms / cudnn_ms:7.4f}")
    for name, value in host.items():
        print(f"{name:28} {value:6.1f}")
    answer = {
        "conditions": dict(backend.conditions()),
        "gpu": rows,
        "gpu_total": {"handle_ms": handle_ms, "cudnn_ms": cudnn_ms, "ratio": handle_ms / cudnn_ms},
        "cpu": host,
    }
    save(script.out_of(arguments), answer)


if __name__ == "__main__":
    script.run_main(main)
