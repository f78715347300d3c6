"""The host's cost of a convolution call that is enabled, and of one after disable(), over PyTorch's own call.

    python -m bench.torch.overhead                  ten seconds on a GPU; adds a run to the results
    python -m bench.torch.overhead --backend cpu    a trial of the script; NumPy computes, so its figures mean little

The convolution is so small that the host limits its speed. All is planned before the clock starts, and the script waits
for the threads that compile. PyTorch, ucudnn, and PyTorch after disable() take turns. Each sample is a loop of calls,
and the host waits for the GPU between samples only. The results are medians, in microseconds of one call. A backward
call computes the gradients of input and weight. The results name the chosen algorithms, because an algorithm may be one
launch or several.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch

from bench.tools.results import save_run
from bench.tools.script import out_of, run_main, verdict
from bench.torch.measuring import conditions, device_of, interceptor_for, torch_command_line
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.summary import summarize

CALLS = 100
MOST_US = 15.0
"""Most microseconds over PyTorch's call that were aimed at."""


def sample_us(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the host's microseconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(calls):
        run()
    end = perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (end - begin) / calls * 1e6


def cases(device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the calls by name, each with its number of convolutions or gradients."""
    x = torch.randn(8, 16, 14, 14, device=device)
    w = torch.randn(16, 16, 3, 3, device=device)
    b = torch.randn(16, device=device)
    learned = w.clone().requires_grad_()
    wanted = x.clone().requires_grad_()
    conv = torch.nn.functional.conv2d
    out = conv(wanted, learned, padding=1)
    ones = torch.ones_like(out)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward.default

    def without(run: Callable[[], object]) -> Callable[[], object]:
        def inner() -> object:
            with torch.no_grad():
                return run()

        return inner

    return {
        "forward, no grad": (without(partial(conv, x, w, padding=1)), 1),
        "forward, grad": (partial(conv, x, learned, padding=1), 1),
        "forward, grad, bias": (partial(conv, x, learned, b, padding=1), 1),
        "backward, both gradients": (partial(backward, ones, x, w, *rest, [True, True, False]), 2),
    }


def prepare(interceptor: Interceptor, device: torch.device) -> None:
    """Let both choose algorithms, and wait until no thread compiles any more."""
    for each in (None, interceptor):
        process_overrides.use(each)
        for run, _ in cases(device).values():
            sample_us(run, 3, device)
    process_overrides.use(None)
    for handle in interceptor.handles().values():
        if isinstance(handle.backend, CudnnBackend):
            handle.backend.stop()


def eager(interceptor: Interceptor, device: torch.device, samples: int) -> dict[str, dict[str, float]]:
    """Return the microseconds of each call, each way."""
    found: dict[str, dict[str, float]] = {}
    ways = {"pytorch": None, "ucudnn": interceptor, "after disable": None}
    for name, (run, _) in cases(device).items():
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(samples):
            for way, each in ways.items():
                process_overrides.use(each)
                sample_us(run, 3, device)
                taken[way].append(sample_us(run, CALLS, device))
        process_overrides.use(None)
        found[name] = {way: median(values) for way, values in taken.items()}
        print(f"{name:26}" + "".join(f"{way:>15} {value:6.1f} us" for way, value in found[name].items()), flush=True)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--samples", type=int, default=25, help="samples of each call (%(default)s)")
    arguments = parser.parse_args()
    device = device_of(arguments)
    interceptor = interceptor_for(arguments, "64MiB")
    prepare(interceptor, device)
    found = eager(interceptor, device, arguments.samples)
    required = []
    for name, (_, count) in cases(device).items():
        over = (found[name]["ucudnn"] - found[name]["pytorch"]) / count
        required.append(verdict(f"{name}: each, over PyTorch's", over, MOST_US, " us"))
        after = found[name]["after disable"] / found[name]["pytorch"]
        required.append(verdict(f"{name}: after disable(), of PyTorch's", after, 1.03))
    chosen = {each.problem: each.configuration for each in summarize([interceptor]).layers}
    answer = {"conditions": conditions(device), "eager_us": found, "required": required}
    save_run(out_of(arguments), {**answer, "configurations": chosen})


if __name__ == "__main__":
    run_main(main)
