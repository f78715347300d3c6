"""Puts other plans in the place of a program's costliest kernels, to see whether its plans can be beaten.

    python -m bench.torch.programs.replacements                         ResNet-50 within 64 MiB
    python -m bench.torch.programs.replacements --limit-seconds 240     continues where it was stopped
    python -m bench.torch.programs.replacements --backend cpu --network small --workspace 256KiB --kernels 2

The first call trains until the program is tuned, and keeps its plans in a file. Each call trains with these plans. For
each of the costliest kernels, every undivided and power-of-two plan within the limit is put in its place for some steps
of the program, in which the kernel is timed. A kernel whose plan adds its bias gets other plans that add it. So that
this takes minutes and not hours, each costly kernel has another plan in the same steps. The plans whose kernel then
takes less time are put in its place one at a time, and whole steps with the plan and without take turns. A plan is
better if the median of steps with it is lower by more than --worth.

The answer has, for each kernel, its plan and time, the plans that were tried, and the best of them. The script ends
with status 1 if a better plan was found, and with 0 if none was, or if its time was over; `complete` says which.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

import ucudnn.torch
from bench.tools.results import load, save_case
from bench.tools.script import add_backend, command_line, note, out_of, run_main
from bench.torch.network_setting import is_settled
from bench.torch.network_step import FORMS, NETWORKS, step_of
from bench.torch.network_times import Clock
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import UcudnnError
from ucudnn.handle import Handle
from ucudnn.policy import powers_of_two
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.fused_call import FusedCall
from ucudnn.torch.interceptor import Interceptor
from ucudnn.torch.kernel_call import KernelCall
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor
from ucudnn.units import parse_bytes
from ucudnn.workspace.spare import own_bytes

_TIMED_STEPS = 3
_BLOCK_STEPS = 6  # of whole steps with a plan, and as many without; the first one of a block does not count
_BLOCKS = 3
_FASTER = 0.98  # of the kernel's time: then whole steps decide


class KernelTimes:
    """Times each kernel of a program while it is on, by marks around its calls."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[ConvolutionProblem, list[tuple[Any, Any]]] = {}
        self.is_on = False
        KernelCall.run = self._timed(KernelCall.run)  # type: ignore[method-assign]
        FusedCall.run = self._timed(FusedCall.run)  # type: ignore[method-assign]

    def _timed(self, run: Callable[..., bool]) -> Callable[..., bool]:
        def timed(call: KernelCall | FusedCall, *tensors: torch.Tensor) -> bool:
            if not self.is_on:
                return run(call, *tensors)
            begin = self._clock.mark()
            done = run(call, *tensors)
            if done:
                self._marks.setdefault(call.problem, []).append((begin, self._clock.mark()))
            return done

        return timed

    def take(self, step: Callable[[], Any], steps: int) -> dict[ConvolutionProblem, float]:
        """Take steps, and return the milliseconds of each kernel in a step, by the median of its calls."""
        self._marks.clear()
        self.is_on = True
        for _ in range(steps):
            step()
        self.is_on = False
        return {
            problem: median(self._clock.between_ms(list(pair))[0] for pair in marks) * len(marks) / steps
            for problem, marks in self._marks.items()
        }


def plans_within(backend: ComputeBackend, problem: ConvolutionProblem, limit_bytes: int) -> Iterator[Configuration]:
    """Yield every plan of equal micro-batches, of the whole mini-batch or a power of two, that fits a limit."""
    sizes = sorted({problem.batch, *powers_of_two(problem.batch)}, reverse=True)
    for name in backend.names(problem, sizes):
        for size in sizes:
            if problem.batch % size or name.endswith(ADDED):
                continue
            found = backend.algorithm(problem.part(size), name)
            if found is None:
                continue
            part = MicroConfiguration(size=size, algorithm=name, time_ms=1.0, workspace_bytes=found.workspace_bytes)
            plan = Configuration(parts=(part,) * (problem.batch // size))
            if own_bytes(problem, plan) <= limit_bytes:
                yield plan


def handle_of(on: ucudnn.torch.Enabled) -> Handle:
    """Return the handle that computes."""
    interceptor = on._interceptor
    planned = interceptor.planned if isinstance(interceptor, AutoInterceptor) else interceptor
    assert isinstance(planned, Interceptor)
    (handle,) = planned.handles().values()
    return handle


def keep_plans(arguments: Namespace, path: Path, device: torch.device) -> None:
    """Train until the program is tuned, and keep its plans."""
    backend = None if arguments.backend == "cudnn" else arguments.backend
    with ucudnn.torch.enable(workspace_limit=arguments.workspace, backend=backend, tune=arguments.tune) as on:
        (step, _), begin, clock = step_of(arguments, device), monotonic(), Clock(device)
        while True:
            for _ in range(5):
                step()
            clock.wait()
            if is_settled(on) or monotonic() - begin > arguments.tuning_seconds:
                break
        on.save_plans(path)
    note(f"tuned for {monotonic() - begin:.0f} s{'' if is_settled(on) else ', and not settled'}: {path}")


class Program:
    """The program with its plans, in which others take their place for a while."""

    def __init__(self, arguments: Namespace, plans: Path, device: torch.device) -> None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        backend = None if arguments.backend == "cudnn" else arguments.backend
        self.limit_bytes = parse_bytes(arguments.workspace)
        self.clock = Clock(device)
        self.times = KernelTimes(self.clock)
        self.on = ucudnn.torch.enable(workspace_limit=arguments.workspace, backend=backend, plans=plans, strict=True)
        self.step, _ = step_of(arguments, device)
        for _ in range(3):
            self.step()
        self.clock.wait()
        self.handle = handle_of(self.on)
        own = self.times.take(self.step, _TIMED_STEPS)
        self.costs = dict(sorted(own.items(), key=lambda each: -each[1])[: arguments.kernels])
        self.own = {each: self._plan_of(each) for each in self.costs}

    def _plan_of(self, problem: ConvolutionProblem) -> Configuration:
        entries = self.handle.plans.entries.values()
        found = [each.decision for each in entries if each.kernel.problem == problem and each.decision is not None]
        return found[0].configuration

    def put(self, problem: ConvolutionProblem, plan: Configuration) -> bool:
        """Let a kernel run by a plan from now on, and return whether it can."""
        try:
            with self.handle.backend.lock:
                self.handle.plans.adopt(problem, plan)
        except UcudnnError:
            return False
        return True

    def restore(self) -> None:
        """Let all kernels run by their own plans again."""
        for problem, plan in self.own.items():
            self.put(problem, plan)

    def round(self, plans: dict[ConvolutionProblem, Configuration]) -> dict[ConvolutionProblem, float]:
        """Return the milliseconds of kernels in a step with other plans; those that fail are left out."""
        put = [problem for problem, plan in plans.items() if self.put(problem, plan)]
        try:
            self.step()  # makes the plans ready
            found = self.times.take(self.step, _TIMED_STEPS)
        except UcudnnError as error:
            note(f"a plan failed: {error}")
            found = {}
        changed = [problem for problem in put if self._plan_of(problem) != plans[problem]]  # it failed and was replaced
        self.restore()
        return {problem: found[problem] for problem in put if problem in found and problem not in changed}

    def gain(self, problem: ConvolutionProblem, plan: Configuration) -> float:
        """Return the time of a step with one other plan over that without, in turns."""
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_BLOCKS):
            for other in (True, False):
                self.put(problem, plan if other else self.own[problem])
                marks = [self.clock.mark()]
                for _ in range(_BLOCK_STEPS):
                    self.step()
                    marks.append(self.clock.mark())
                taken[other] += self.clock.between_ms(marks)[1:]
        self.restore()
        return median(taken[True]) / median(taken[False])


def search(arguments: Namespace, program: Program, out: Path | None, deadline: float) -> bool:
    """Try the plans that are not tried yet, and return whether all are."""
    backend = program.handle.backend
    assert isinstance(backend, ComputeBackend)
    known: dict[str, Any] = load(out)["cases"] if out is not None and out.exists() else {}
    cases: dict[ConvolutionProblem, dict[str, Any]] = {}
    waiting: dict[ConvolutionProblem, list[Configuration]] = {}
    for problem, own_ms in program.costs.items():
        empty = {"plan": str(program.own[problem]), "tried": {}, "gains": {}}
        case = known.get(str(problem), empty)
        cases[problem] = {**case, "own_ms": own_ms} if case["plan"] == empty["plan"] else {**empty, "own_ms": own_ms}
        plans = plans_within(backend, problem, program.limit_bytes)
        waiting[problem] = [each for each in plans if str(each) not in cases[problem]["tried"]]
    note(f"{len(cases)} kernels, {sum(map(len, waiting.values()))} plans to try")
    while any(waiting.values()) and monotonic() < deadline:
        plans = {problem: left.pop() for problem, left in waiting.items() if left}
        found = program.round(plans)
        for problem, plan in plans.items():
            cases[problem]["tried"][str(plan)] = found.get(problem)
            case, ms = cases[problem], found.get(problem)
            if ms is not None and ms < _FASTER * case["own_ms"]:
                case["gains"][str(plan)] = program.gain(problem, plan)
            save_case(out, str(problem), case)
    better = 0
    for problem, case in cases.items():
        gain = min(case["gains"].values(), default=1.0)
        better += gain < 1 - arguments.worth
        best = min((ms for ms in case["tried"].values() if ms is not None), default=float("nan"))
        print(
            f"{problem}: {case['plan']} {case['own_ms']:.3f} ms a step, {len(case['tried'])} others from {best:.3f} ms,"
            f" step at least {gain:.4f}"
        )
    complete = not any(waiting.values())
    print(json.dumps({"kernels": len(cases), "better": better, "complete": complete}))
    return better == 0


def main() -> bool:
    """Keep the program's plans, or try to beat them."""
    arguments = _parser().parse_args()
    deadline = monotonic() + arguments.limit_seconds
    device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
    out = out_of(arguments)
    plans = arguments.plans or (out or Path("replacements.json")).with_suffix(f".{arguments.network}.plans.json")
    if not plans.exists():
        keep_plans(arguments, plans, device)
    out = None if out is None else out.with_suffix(f".{arguments.network}.{arguments.form}.{arguments.workspace}.json")
    program = Program(arguments, plans, device)
    return search(arguments, program, out, deadline)


def _parser() -> ArgumentParser:
    parser = command_line(__doc__, __spec__.name, "torch/replacements.json")
    add_backend(parser)
    parser.add_argument("--network", choices=NETWORKS, default="resnet50", help="network (%(default)s)")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help="form of the network (%(default)s)")
    parser.add_argument("--workspace", default="64MiB", help="limit of each kernel (%(default)s)")
    parser.add_argument("--tune", choices=("first", "program"), help="how the program's plans are made")
    parser.add_argument("--plans", type=Path, help="file of the program's plans; it is made if it is not there")
    parser.add_argument("--kernels", type=int, default=20, help="number of kernels, the costliest (%(default)s)")
    parser.add_argument("--worth", type=float, default=0.003, help="least gain of a better plan (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=60, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="most seconds of this call (no limit)")
    return parser


if __name__ == "__main__":
    run_main(main)
