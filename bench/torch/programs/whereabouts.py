"""Shows in which convolutions a program's step is slower than PyTorch's, and where predicted times do not come true.

    python -m bench.torch.programs.whereabouts                     RegNetY-032: PyTorch, no limit, within 64 MiB
    python -m bench.torch.programs.whereabouts --way stock --way 64MiB
    python -m bench.torch.programs.whereabouts --backend cpu --network small     a trial

Each way trains the network in this process, one after the other: `stock` with `cudnn.benchmark`, `none` undivided,
within 16 GiB for each kernel, and any size as a limit, in powers of two. The latter two measure before the first step
(`tune="first"`).
For each kind of convolution, these times in milliseconds of a step stand side by side:

    predicted    the sum of the isolated measurements from which the plans were chosen
    alone        the sum of the plans' own times, executed in isolation as a whole (with --repeats)
    program      the time of all kernels that the convolution launches in the program, conversions of layouts included

The latter comes from PyTorch's profiler, on steps in which each gradient is computed by a call of its own. `copies` is
the part of kernels whose names tell that they convert layouts. The step itself is timed without the profiler: what it
takes longer than all its kernels together is the time in which the GPU waits. On the CPU, the times of calls stand for
those of kernels.
"""

import subprocess
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import ucudnn.torch
from bench.tools.results import load, save_case
from bench.tools.script import add_backend, command_line, note, out_of, run_main
from bench.torch.measuring import conditions
from bench.torch.network_step import FORMS, NETWORKS, model_of, step_of
from bench.torch.network_times import Clock, host_ms
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.torch.calls.call_cache import asked_convolution, present_flags
from ucudnn.torch.calls.problem import Geometry

STOCK, UNLIMITED = "stock", "none"
WAYS = (STOCK, UNLIMITED, "64MiB")
_LABEL = "convolution: "
_NO_LIMIT = "16GiB"
_FORWARD = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)
_BACKWARD = torch.ops.aten.convolution_backward.default
_PROFILED_STEPS = 2
_COPIES = ("nchwtonhwc", "nhwctonchw", "tensortransform", "transpose", "copy", "im2col", "reorder")
"""Parts of names of kernels that convert layouts, in small letters."""


class Labels(TorchDispatchMode):
    """Puts a label on each convolution and each gradient, which is the problem as text, for the profiler.

    Attributes:
        problems: the problems, by text; a convolution that is none of ours has the reason instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: dict[str, ConvolutionProblem | str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        if func in _FORWARD:
            with record_function(self._label(Operation.FORWARD, args[0], args[1], args[3:9])):
                return func(*args, **(kwargs or {}))
        if func is not _BACKWARD:
            return func(*args, **(kwargs or {}))
        *rest, mask = args
        found: list[Any] = [None, None, None]
        operations = (Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER, None)
        for at in (1, 0, 2):
            if mask[at]:
                operation = operations[at]
                label = "bias" if operation is None else self._label(operation, args[1], args[2], args[4:10])
                with record_function(label):
                    found[at] = func(*rest, [at == index for index in range(3)])[at]
        return tuple(found)

    def _label(self, operation: Operation, x: torch.Tensor, weight: torch.Tensor, rest: Any) -> str:
        stride, padding, dilation, transposed, output_padding, groups = rest
        geometry = Geometry(
            tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups
        )  # fmt: skip
        call = asked_convolution(x, weight, geometry, present_flags(), native=True)
        if isinstance(call, str):
            text = f"{operation.value} {tuple(x.shape)} * {tuple(weight.shape)}"
            self.problems[text] = call
        else:
            problem = {
                Operation.FORWARD: call.forward,
                Operation.BACKWARD_DATA: call.backward_input,
                Operation.BACKWARD_FILTER: call.backward_weight,
            }[operation]
            text = str(problem)
            self.problems[text] = problem
        return _LABEL + text


@dataclass
class Place:
    """What the calls of one problem launch in a step.

    Attributes:
        calls: number of calls.
        ms: time of their kernels.
        copies_ms: part of it that converts layouts.
        kernels: launches by the name of the kernel.
    """

    calls: float = 0.0
    ms: float = 0.0
    copies_ms: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)

    def to_dict(self, kind: str) -> dict[str, object]:
        """Return it for JSON."""
        names = {name: count / _PROFILED_STEPS for name, count in self.kernels.most_common(5)}
        launches = sum(self.kernels.values()) / _PROFILED_STEPS
        head = {"kind": kind, "calls": self.calls, "ms": self.ms, "copies_ms": self.copies_ms}
        return {**head, "launches": launches, "kernels": names}


def kind_of(problem: ConvolutionProblem | str, text: str) -> str:
    """Return the operation and the sort of a convolution, such as 'Forward grouped 3x3'."""
    if isinstance(problem, str):
        return f"{text.partition(' ')[0]} left to PyTorch"
    sort = "dense" if problem.groups == 1 else "depth-wise" if problem.groups == problem.channels else "grouped"
    stride = "" if set(problem.stride) == {1} else f" stride {problem.stride[0]}"
    return f"{problem.operation.value} {sort} {'x'.join(map(str, problem.kernel))}{stride}"


def places(events: Iterable[Any], on_gpu: bool) -> tuple[dict[str, Place], dict[str, float]]:
    """Return what each label launched in a step, and milliseconds and launches of all."""
    found: dict[str, Place] = {}
    others = dict.fromkeys(("ms", "launches", "linked ms", "bias ms"), 0.0)
    events = list(events)
    labels = {event.name for event in events if event.device_type == DeviceType.CPU}
    for event in events:
        if event.device_type != DeviceType.CPU:
            if event.name not in labels:  # otherwise it is a label's span on the GPU, and no kernel
                others["ms"] += event.time_range.elapsed_us() / 1e3 / _PROFILED_STEPS
                others["launches"] += 1 / _PROFILED_STEPS
            continue
        label = _label_above(event)
        ours = label.startswith(_LABEL)
        place = found.setdefault(label.removeprefix(_LABEL), Place()) if ours else Place()
        if ours and event.name == label:
            place.calls += 1 / _PROFILED_STEPS
            if not on_gpu:
                place.ms += event.cpu_time_total / 1e3 / _PROFILED_STEPS
                others["ms"] += event.cpu_time_total / 1e3 / _PROFILED_STEPS
        for kernel in event.kernels:
            if kernel.name in labels:
                continue
            ms = kernel.duration / 1e3 / _PROFILED_STEPS
            place.ms += ms
            place.copies_ms += ms * any(part in kernel.name.lower() for part in _COPIES)
            place.kernels[_short(kernel.name)] += 1
            others["linked ms"] += ms
            others["bias ms"] += ms * (label == "bias")
    return found, others


def _label_above(event: Any) -> str:
    """Return the label that an event is under, or is itself; '' if there is none."""
    at = event
    while at is not None:
        if at.name.startswith(_LABEL) or at.name == "bias":
            return str(at.name)
        at = at.cpu_parent
    return ""


def _short(name: str) -> str:
    return name.removeprefix("void ").partition("<")[0].partition("(")[0][:110]


def clock_mhz() -> float | None:
    """Return the clock of the GPU's processors now; None if it is not known."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


def turned_on(arguments: Namespace, way: str, database: str) -> Any:
    """Turn a way on, and return a context that turns it off."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    if way == STOCK:
        return nullcontext()
    policy, limit = ("undivided", _NO_LIMIT) if way == UNLIMITED else ("powerOfTwo", way)
    return ucudnn.torch.enable(
        backend=arguments.backend, workspace_limit=limit, policy=policy, tune="first", database=database
    )


def profiled(step: Callable[[], Any], labels: Labels, on_gpu: bool) -> tuple[dict[str, Place], dict[str, float]]:
    """Return what a step launches, by the profiler."""
    with labels:
        step()  # its calls look otherwise than those before, because each gradient comes alone
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, acc_events=True) as found, labels:
        for _ in range(_PROFILED_STEPS):
            step()
        Clock(torch.device("cuda" if on_gpu else "cpu")).wait()
    return places(found.events(), on_gpu)


def plans_of(on: Any, repeats: int) -> dict[str, dict[str, object]]:
    """Return plan, predicted time and time alone of each kernel, by problem."""
    if not isinstance(on, ucudnn.torch.Enabled):
        return {}
    interceptor: Any = on._interceptor
    (report,) = interceptor.reports(repeats=repeats).values()
    return {
        each.problem: {
            "plan": each.configuration,
            "predicted_ms": each.micro_batched_ms,
            "alone_ms": each.executed_ms,
            "workspace": each.workspace_bytes,
        }
        for each in report.kernels
    }


def measure(arguments: Namespace, way: str, device: torch.device) -> dict[str, Any]:
    """Return what a way takes."""
    begin, on_gpu = perf_counter(), device.type == "cuda"
    with TemporaryDirectory() as folder, turned_on(arguments, way, str(Path(folder) / "database.sqlite")) as on:
        step, _ = step_of(arguments, device, model_of(arguments.network))
        clock, labels = Clock(device), Labels()
        for _ in range(3):
            step()
        clock.wait()
        first_s = perf_counter() - begin
        marks = [clock.mark()]
        for _ in range(arguments.steps):
            step()
            marks.append(clock.mark())
        mhz = clock_mhz() if on_gpu else None  # while the GPU still works on the steps
        answer: dict[str, Any] = {"step_ms": median(clock.between_ms(marks)), "clock_mhz": mhz, "warm_s": first_s}
        answer["host_ms"] = sum(host_ms(step, clock).values())
        found, totals = profiled(step, labels, on_gpu)
        plans = plans_of(on, arguments.repeats)
        answer["totals"] = totals
        answer["places"] = {
            text: {**place.to_dict(kind_of(labels.problems[text], text)), **plans.get(text, {})}
            for text, place in found.items()
        }
        return answer | {"conditions": conditions(device), "seconds": perf_counter() - begin}


def by_kind(case: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Return the sums of each kind in milliseconds of a step."""
    found: dict[str, Counter[str]] = {}
    for place in case["places"].values():
        sums = found.setdefault(place["kind"], Counter())
        for name in ("calls", "ms", "copies_ms", "launches"):
            sums[name] += place[name]
        for name in ("predicted_ms", "alone_ms"):
            sums[name] += place["calls"] * (place.get(name) or 0)
    return found


def show(cases: Mapping[str, Any]) -> None:
    """Print where the ways differ, the largest difference to PyTorch first."""
    stock = cases.get(STOCK)
    for way, case in cases.items():
        kernels = sum(place["ms"] for place in case["places"].values())
        totals = case["totals"]
        print(
            f"\n{way}: step {case['step_ms']:.2f} ms, all kernels {totals['ms']:.2f} ms in"
            f" {totals['launches']:.0f} launches, GPU waits {case['step_ms'] - totals['ms']:.2f} ms,"
            f" host {case['host_ms']:.2f} ms, bias gradients {totals['bias ms']:.2f} ms,"
            f" convolutions {kernels:.2f} ms, others {totals['ms'] - kernels:.2f} ms (of all kernels,"
            f" {totals['linked ms']:.2f} ms belong to an operator),"
            f" clock {case['clock_mhz']} MHz, {case['seconds']:.0f} s"
        )
        base = {} if stock is None else by_kind(stock)
        print("| kind | calls | stock | predicted | alone | program | copies | launches | program - stock |")
        rows = sorted(by_kind(case).items(), key=lambda each: base.get(each[0], Counter())["ms"] - each[1]["ms"])
        for kind, sums in rows:
            before = base.get(kind, Counter())["ms"]
            print(
                f"| {kind} | {sums['calls']:.0f} | {before:.3f} | {sums['predicted_ms']:.3f} | {sums['alone_ms']:.3f} |"
                f" {sums['ms']:.3f} | {sums['copies_ms']:.3f} | {sums['launches']:.0f} | {sums['ms'] - before:+.3f} |"
            )
        if stock is not None and way != STOCK:
            _show_worst(case, stock)


def _show_worst(case: Mapping[str, Any], stock: Mapping[str, Any]) -> None:
    """Print the problems that lose most, with their plans and kernels."""

    def loss(text: str) -> float:
        return float(case["places"][text]["ms"] - stock["places"].get(text, {"ms": 0.0})["ms"])

    for text in sorted(case["places"], key=loss, reverse=True)[:8]:
        ours, theirs = case["places"][text], stock["places"].get(text, {})
        predicted, alone = ours["calls"] * (ours.get("predicted_ms") or 0), ours["calls"] * (ours.get("alone_ms") or 0)
        print(
            f"{loss(text):+.3f} ms: {ours['calls']:.0f} x {text}: {ours.get('plan')}, predicted {predicted:.3f},"
            f" alone {alone:.3f}, program {ours['ms']:.3f} ms\n    ours:  {ours['kernels']}\n"
            f"    stock: {theirs.get('kernels')}"
        )


def main() -> None:
    """Measure the ways, and print where they differ."""
    arguments = _parser().parse_args()
    device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
    out = out_of(arguments)
    cases: dict[str, Any] = {}
    for way in arguments.way or WAYS:
        cases[way] = measure(arguments, way, device)
        save_case(out, f"{arguments.network} {arguments.form} {way}", cases[way])
        note(f"{way}: {cases[way]['seconds']:.0f} s")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if out is not None:
        head = f"{arguments.network} {arguments.form} "
        cases = {name.removeprefix(head): case for name, case in load(out)["cases"].items() if name.startswith(head)}
    show(cases)


def _parser() -> ArgumentParser:
    parser = command_line(__doc__, __spec__.name, "torch/whereabouts.json")
    add_backend(parser)
    parser.add_argument("--network", choices=NETWORKS, default="regnety_032", help="network (%(default)s)")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help="form of the network (%(default)s)")
    parser.add_argument("--way", action="append", help=f"may be repeated ({', '.join(WAYS)})")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="executions of each plan in isolation (%(default)s)")
    return parser


if __name__ == "__main__":
    run_main(main)
