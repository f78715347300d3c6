"""A bias that an engine of cuDNN adds, beside one that PyTorch's kernel adds behind the convolution.

    python -m bench.torch.bias                    all convolutions: a minute on an H200
    python -m bench.torch.bias "U-Net 3-D" VGG    those whose names begin so

For each convolution, the script checks and times all engines of cuDNN's graph API: those that add the bias, and those
that do not. The fastest of each kind then take turns on the same tensors, without a limit and within 64 MiB (medians).
Convolutions that do not add the bias are timed alone, and with `add_` behind them. Nothing is divided. Outputs are
compared with float64 in the first and the last sample. Each convolution is one case of the results.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.tools.results import save_case
from bench.tools.script import out_of, run_main
from bench.torch.measuring import MIB, conditions, device_of, torch_command_line
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.unmeasured.untimed_division import equal_parts
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm, Effort, MeasurementStatus
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.device.gpu import TorchGpu

LIMITS = {"no limit": 6 << 30, "64 MiB": 64 * MIB}
TURNS, SAMPLE_MS, MOST_CALLS = 9, 1.0, 12
FINALISTS = 3
ROUGH = Effort(warmup=1, repeats=2, time_limit_ms=2)
TOLERANCE = {DataType.FLOAT32: 2e-3, DataType.FLOAT16: 2e-3, DataType.BFLOAT16: 1e-2}

F32, F16, BF16 = DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16
CASES: dict[str, tuple[Any, ...]] = {
    # type, channels last, mini-batch, channels, spatial sizes, filters, kernel, padding, stride, groups
    "VGG-16 first": (F32, False, 64, 3, (224, 224), 64, 3, 1, 1, 1),
    "VGG-16 first, bfloat16": (BF16, True, 64, 3, (224, 224), 64, 3, 1, 1, 1),
    "VGG-16 fourth": (F32, False, 64, 128, (112, 112), 128, 3, 1, 1, 1),
    "VGG-16 fourth, channels last": (F32, True, 64, 128, (112, 112), 128, 3, 1, 1, 1),
    "VGG-16 fourth, bfloat16": (BF16, True, 64, 128, (112, 112), 128, 3, 1, 1, 1),
    "VGG-16 ninth": (F32, False, 64, 512, (28, 28), 512, 3, 1, 1, 1),
    "U-Net 2-D": (F32, False, 16, 64, (256, 256), 64, 3, 1, 1, 1),
    "U-Net 2-D, channels last": (F32, True, 16, 64, (256, 256), 64, 3, 1, 1, 1),
    "U-Net 2-D, float16, channels last": (F16, True, 16, 64, (256, 256), 64, 3, 1, 1, 1),
    "U-Net 2-D, float16": (F16, False, 16, 64, (256, 256), 64, 3, 1, 1, 1),
    "U-Net 3-D": (F32, False, 2, 32, (96, 96, 96), 64, 3, 1, 1, 1),
    "U-Net 3-D, bfloat16": (BF16, True, 2, 32, (96, 96, 96), 64, 3, 1, 1, 1),
    "ConvNeXt depth-wise": (F32, False, 64, 96, (56, 56), 96, 7, 3, 1, 96),
    "ConvNeXt depth-wise, bfloat16": (BF16, True, 64, 96, (56, 56), 96, 7, 3, 1, 96),
    "ConvNeXt stem": (F32, False, 64, 3, (224, 224), 96, 4, 0, 4, 1),
    "ConvNeXt down, bfloat16": (BF16, True, 64, 96, (56, 56), 192, 2, 0, 2, 1),
    "grouped, float16": (F16, True, 64, 384, (28, 28), 384, 3, 1, 1, 16),
    "small pointwise": (F32, False, 16, 256, (14, 14), 256, 1, 0, 1, 1),
    "small pointwise, float16": (F16, True, 16, 256, (14, 14), 256, 1, 0, 1, 1),
    "VGG-16 ninth without TF32": (F32, False, 8, 512, (28, 28), 512, 3, 1, 1, 1),
}


@dataclass(frozen=True)
class Way:
    """One algorithm that computes a convolution with its bias.

    Attributes:
        algorithm: the algorithm.
        rough_ms: its time, as the backend measures it.
        with_bias: computes the convolution and adds the bias.
        alone: computes only the convolution; None if the algorithm adds the bias itself.
    """

    algorithm: Algorithm
    rough_ms: float
    with_bias: Callable[[], object]
    alone: Callable[[], object] | None


def problem_of(name: str) -> ConvolutionProblem:
    """Return a case as a problem with a bias."""
    dtype, last, batch, channels, spatial, filters, kernel, padding, stride, groups = CASES[name]
    sides = len(spatial)
    return ConvolutionProblem(
        operation=Operation.FORWARD,
        batch=batch,
        channels=channels,
        spatial=spatial,
        filters=filters,
        kernel=(kernel,) * sides,
        padding=(padding,) * sides,
        stride=(stride,) * sides,
        groups=groups,
        dtype=dtype,
        layout=(Layout.NHWC if sides == 2 else Layout.NDHWC) if last else Layout.channels_first(sides),
        math=MathMode.FMA if name.endswith("without TF32") else MathMode.TF32,
        biased=True,
    )


class Operands:
    """Tensors of a case, and its output in the first and the last sample in float64."""

    def __init__(self, problem: ConvolutionProblem, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype, last = getattr(torch, problem.dtype.value), problem.layout.channels_last

        def drawn(outer: int, channels: int, sizes: tuple[int, ...]) -> torch.Tensor:
            shape = problem.layout.arrange(outer, channels, sizes)
            made = torch.rand(shape, device=device).sub_(0.5).to(dtype)
            return made.movedim(-1, 1) if last else made

        self.x = drawn(problem.batch, problem.channels, problem.spatial)
        self.w = drawn(problem.filters, problem.channels // problem.groups, problem.kernel)
        self.y = drawn(problem.batch, problem.filters, problem.output)
        self.bias = (torch.rand(problem.filters, device=device) * 8 - 4).to(dtype)
        self.addend = self.bias.view(-1, *[1] * len(problem.spatial))
        self._ends = [0, problem.batch - 1]
        convolve = torch.nn.functional.conv2d if len(problem.spatial) == 2 else torch.nn.functional.conv3d
        exact = self.x[self._ends].double(), self.w.double(), self.bias.double()
        with torch.backends.cudnn.flags(enabled=problem.groups == 1, benchmark=False):
            self._expected = convolve(*exact, problem.stride, problem.padding, 1, problem.groups)

    def error(self, run: Callable[[], object]) -> float:
        """Return the relative distance of what a call writes from float64; NaN if it leaves anything unwritten."""
        self.y.fill_(float("nan"))
        run()
        if not bool(self.y.isfinite().all()):
            return float("nan")
        found = self.y[self._ends].double()
        return float((found - self._expected).norm() / self._expected.norm())


def way_of(
    problem: ConvolutionProblem, algorithm: Algorithm, rough_ms: float, backend: CudnnBackend, operands: Operands
) -> Way:
    """Return an algorithm ready to run on a case's tensors.

    Raises:
        BackendError: if cuDNN cannot build its plan.
        SystemExit: if its output is wrong.
    """
    kernel = TunedKernel(problem, equal_parts(problem, problem.batch, algorithm), backend)
    alone = partial(kernel.run, operands.x, operands.w, operands.y, operands.bias)

    def added() -> None:
        alone()
        operands.y.add_(operands.addend)

    way = Way(algorithm, rough_ms, alone if kernel.fuses else added, None if kernel.fuses else alone)
    error = operands.error(way.with_bias)
    if not error < TOLERANCE[problem.dtype]:
        raise SystemExit(f"error: {algorithm.name} of {problem} has an error of {error}")
    return way


def finalists(problem: ConvolutionProblem, backend: CudnnBackend, operands: Operands) -> tuple[list[Way], list[Way]]:
    """Return the fastest algorithms that do not add the bias and those that do, within each limit."""
    with backend.bench(problem) as bench:
        found = [bench.measure(problem.batch, each, ROUGH) for each in backend.algorithms(problem)]
    found = [each for each in found if each.status is MeasurementStatus.MEASURED]
    chosen: tuple[dict[str, Way], dict[str, Way]] = {}, {}
    for fused in (0, 1):
        kind = [each for each in found if each.algorithm.name.endswith(ADDED) is not bool(fused)]
        for limit in LIMITS.values():
            fit = [each for each in kind if each.algorithm.workspace_bytes <= limit]
            for each in sorted(fit, key=lambda each: each.time_ms)[:FINALISTS]:
                name = each.algorithm.name
                if name not in chosen[fused]:
                    chosen[fused][name] = way_of(problem, each.algorithm, each.time_ms, backend, operands)
    return list(chosen[0].values()), list(chosen[1].values())


def times_of(ways: list[Way], backend: CudnnBackend, gpu: TorchGpu) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each algorithm with the bias, and alone where another kernel adds it."""
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(TURNS):
        for way in ways:
            calls = max(1, min(MOST_CALLS, int(SAMPLE_MS / way.rough_ms)))
            for what, run in (("with_bias", way.with_bias), ("alone", way.alone)):
                if run is not None:
                    time_ms = backend.elapsed_ms(partial(_repeat, run, calls), partial(gpu.delay, 0.1 + 0.1 * calls))
                    samples.setdefault((way.algorithm.name, what), []).append(time_ms / calls)
    found: dict[str, dict[str, float]] = {}
    for (name, what), taken in samples.items():
        found.setdefault(name, {})[what] = median(taken)
    return found


def _repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def measure(
    name: str, problem: ConvolutionProblem, backend: CudnnBackend, gpu: TorchGpu, device: torch.device
) -> dict[str, object]:
    """Measure one case; print and return its results."""
    operands = Operands(problem, device)
    others, fused = finalists(problem, backend, operands)
    times = times_of([*others, *fused], backend, gpu)
    case: dict[str, object] = {"problem": str(problem), "math": problem.math.value}
    texts = []
    for limit, size in LIMITS.items():
        row: dict[str, dict[str, Any]] = {}
        for kind, ways in (("added", others), ("fused", fused)):
            fit = [each for each in ways if each.algorithm.workspace_bytes <= size]
            best = min(fit, key=lambda each: times[each.algorithm.name]["with_bias"], default=None)
            if best is not None:
                row[kind] = {
                    "algorithm": best.algorithm.name.removesuffix(ADDED),
                    "workspace_bytes": best.algorithm.workspace_bytes,
                    **times[best.algorithm.name],
                }
        case[limit] = row
        added, joined = (row.get(kind, {}).get("with_bias") for kind in ("added", "fused"))
        ratio = "-" if added is None or joined is None else f"{joined / added:.3f}"
        texts.append(f"{limit}: added {added} fused {joined} ms, {ratio}")
    print(f"{name:34} {'   '.join(texts)}", flush=True)
    return case


def main() -> None:
    """Measure the cases and write each into the results."""
    parser: ArgumentParser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("names", nargs="*", help="beginnings of names of convolutions; default: all")
    arguments = parser.parse_args()
    device = device_of(arguments)
    if device.type == "cpu":
        parser.error("engines that add a bias are cuDNN's: this needs a GPU")
    chosen = [each for each in CASES if not arguments.names or each.startswith(tuple(arguments.names))]
    gpu = TorchGpu(device.index)
    backend = CudnnBackend(device=gpu, candidates=Candidates.GRAPH_PLAIN)
    for name in chosen:
        case = measure(name, problem_of(name), backend, gpu, device)
        save_case(out_of(arguments), name, {"conditions": conditions(device), **case})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_main(main)
