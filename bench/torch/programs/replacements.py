"""Puts other plans in the place of a program's costliest kernels, to see whether its plans can be beaten.

    python -m bench.torch.programs.replacements                         ResNet-50 within 64 MiB
    python -m bench.torch.programs.replacements --limit-seconds 240     continues where it was stopped
    python -m bench.torch.programs.replacements --share 2/4             the second of four shares, for as many GPUs
    python -m bench.torch.programs.replacements --backend cpu --network small --workspace 256KiB --kernels 2

The first call trains until the program is tuned, and keeps its plans in a file. Each call trains with these plans. For
each of the costliest kernels, every undivided and power-of-two plan within the limit is put in its place for some steps
of the program, in which the kernel is timed. A kernel whose plan adds its bias gets other plans that add it. So that
this takes minutes and not hours, each costly kernel has another plan in the same steps, a plan that is slow in its
first call computes no other one, and threads build the plans of later steps. Then the two fastest plans of a kernel
that takes less time by them are put in its place one at a time, and whole steps with the plan and without take turns. A
plan is better if the median of steps with it is lower by more than --worth. If --limit-seconds is too short for all, as
much of it is left as these comparisons take, and those that promise most come first.

The kernels may be shared among calls, each on a GPU of its own (CUDA_VISIBLE_DEVICES), which keep what they find in one
file. A call with --limit-seconds 0 makes the plans before, and says which kernels are the costliest.

The answer has, for each kernel, the commit, its plan and time, the plans that were tried, and the best of them. The
script ends with status 1 if a better plan was found, and with 0 if none was, or if its time was over; `complete` says
which.
"""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from time import monotonic
from typing import Any

import torch

import ucudnn.torch
from bench.tools.results import load, save_case, save_cases
from bench.tools.script import commit_of, note, out_of, run_main
from bench.torch.kernel_times import KernelTimes
from bench.torch.network_setting import is_settled
from bench.torch.network_step import step_of
from bench.torch.network_times import Clock, steps_ms
from bench.torch.programs.command_line import network_command_line
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.compile_ahead import relax
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import UcudnnError
from ucudnn.execution.plan import prepared
from ucudnn.policy import powers_of_two
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.factory import _open_gpu
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor
from ucudnn.units import parse_bytes
from ucudnn.workspace.spare import own_bytes

_TIMED_STEPS = 3
_BLOCK_STEPS = 6  # of whole steps with a plan, and as many without; the first one of a block does not count
_BLOCKS = 3
_SLOW = 1.5  # of the kernel's time: a plan that takes longer in its first call runs in no other one
_FASTER, _MOST_COMPARED = 0.98, 2  # of the kernel's time, and plans of a kernel: then whole steps decide


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


def planned_of(on: ucudnn.torch.Enabled) -> Interceptor:
    """Return what computes by plans; nothing else is tried in the program then, and no call goes past Python."""
    interceptor = on._interceptor
    planned = interceptor.planned if isinstance(interceptor, AutoInterceptor) else interceptor
    assert isinstance(planned, Interceptor)
    return planned


def keep_plans(arguments: Namespace, path: Path, device: torch.device) -> None:
    """Train until the program is tuned, and keep its plans.

    Raises:
        SystemExit: if that takes longer than it may; all kernels have their first plans until then.
    """
    backend = None if arguments.backend == "cudnn" else arguments.backend
    with ucudnn.torch.enable(workspace_limit=arguments.workspace, backend=backend, tune=arguments.tune) as on:
        (step, _), begin, clock = step_of(arguments, device), monotonic(), Clock(device)
        while True:
            for _ in range(5):
                step()
            clock.wait()
            if is_settled(on) or monotonic() - begin > arguments.tuning_seconds:
                break
        if not is_settled(on):
            raise SystemExit(f"error: not settled after --tuning-seconds {arguments.tuning_seconds:g}: give more")
        on.save_plans(path)
    note(f"tuned for {monotonic() - begin:.0f} s: {path}")


def costliest(own_ms: dict[str, float], plans: Path, count: int) -> list[str]:
    """Return the costliest kernels, in the order in which the first call with these plans found them.

    Each call times the kernels anew. Shares of two orders would have a kernel twice and another one not at all, so the
    first order is kept in a file beside the plans.

    Args:
        own_ms: milliseconds of a step that each kernel takes by its plan.
        plans: file of the program's plans.
        count: number of kernels.
    """
    path = plans.with_suffix(".costliest.json")
    names: list[str] = json.loads(path.read_text()) if path.exists() else []
    if len(names) < min(count, len(own_ms)) or not own_ms.keys() >= set(names):
        names = sorted(own_ms, key=lambda each: -own_ms[each])[:count]
        path.write_text(json.dumps(names))
    return names[:count]


class Program:
    """The program with its plans, in which others take their place for a while."""

    def __init__(self, arguments: Namespace, plans: Path, device: torch.device) -> None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        backend = None if arguments.backend == "cudnn" else arguments.backend
        self.limit_bytes = parse_bytes(arguments.workspace)
        self.clock = Clock(device)
        self.times = KernelTimes(self.clock)
        self.on = ucudnn.torch.enable(workspace_limit=arguments.workspace, backend=backend, plans=plans, strict=True)
        planned = planned_of(self.on)
        process_overrides.use(planned)  # the gate would compute some of the calls that are to be timed
        self.step, _ = step_of(arguments, device)
        for _ in range(3):
            self.step()
        self.clock.wait()
        (self.handle,) = planned.handles().values()
        assert isinstance(self.handle.backend, ComputeBackend)
        self.backend = self.handle.backend
        begin = monotonic()
        own = self.times.take(self.step, _TIMED_STEPS)
        self.step_seconds = (monotonic() - begin) / _TIMED_STEPS
        self.calls = dict(self.times.calls)
        first, shares = arguments.share
        named = {str(each): each for each in own}
        names = costliest({name: own[each] for name, each in named.items()}, plans, arguments.kernels)
        self.costs = {named[name]: own[named[name]] for name in names[first::shares]}
        self.own = {each: self._plan_of(each) for each in self.costs}

    def _plan_of(self, problem: ConvolutionProblem) -> Configuration:
        entries = self.handle.plans.entries.values()
        found = [each.decision for each in entries if each.kernel.problem == problem and each.decision is not None]
        return found[0].configuration

    def put(self, problem: ConvolutionProblem, plan: Configuration) -> bool:
        """Let a kernel run by a plan from now on, and return whether it can."""
        try:
            with self.backend.lock:
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
        put = {problem: plan for problem, plan in plans.items() if self.put(problem, plan)}
        slow: dict[ConvolutionProblem, float] = {}

        def called(problem: ConvolutionProblem, time_ms: float) -> None:
            step_ms = time_ms * self.calls[problem]
            if problem in put and self._plan_of(problem) == put[problem] and step_ms > _SLOW * self.costs[problem]:
                slow[problem] = step_ms
                self.put(problem, self.own[problem])

        try:
            self.times.first_calls(self.step, called)  # makes the plans ready
            found = self.times.take(self.step, _TIMED_STEPS) if slow.keys() != put.keys() else {}
        except UcudnnError as error:
            note(f"a plan failed: {error}")
            found = {}
        there = [problem for problem in put if self._plan_of(problem) == put[problem]]  # others failed or were slow
        self.restore()
        return {problem: found[problem] for problem in there if problem in found} | slow

    def gain(self, problem: ConvolutionProblem, plan: Configuration) -> float:
        """Return the time of a step with one other plan over that without, in turns."""
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_BLOCKS):
            for other in (True, False):
                self.put(problem, plan if other else self.own[problem])
                taken[other] += steps_ms(self.step, self.clock, _BLOCK_STEPS)[1:]
        self.restore()
        return median(taken[True]) / median(taken[False])


class Builders:
    """Builds plans in threads, because the program would wait for up to a second for each.

    The program runs the plans that they lend it. What a thread has built is kept until the program has taken it.

    Args:
        backends: one for each thread; none if plans are built in no time, as on the CPU.
    """

    def __init__(self, backends: Sequence[ComputeBackend]) -> None:
        self._free: SimpleQueue[ComputeBackend] = SimpleQueue()
        for each in backends:
            self._free.put(each)
        self._pool = ThreadPoolExecutor(len(backends), initializer=relax) if backends else None
        self._building: dict[tuple[ConvolutionProblem, Configuration], Future[list[object]]] = {}

    def begin(self, problem: ConvolutionProblem, plan: Configuration) -> None:
        """Let a thread build a plan."""
        if self._pool is not None:
            self._building[problem, plan] = self._pool.submit(self._build, problem, plan)

    def take(self, problem: ConvolutionProblem, plan: Configuration) -> list[object]:
        """Return what a thread has built of a plan, once it has; the caller keeps it until the plan was run."""
        building = self._building.pop((problem, plan), None)
        return [] if building is None else building.result()

    def end(self) -> None:
        """Let threads end what they build now, and begin nothing."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _build(self, problem: ConvolutionProblem, plan: Configuration) -> list[object]:
        backend = self._free.get()
        try:
            with torch.cuda.device(0):
                return prepared(problem, plan, backend)
        except UcudnnError:
            return []  # the program will see it
        finally:
            self._free.put(backend)


@dataclass
class Kernel:
    """What is known of one of the costliest kernels.

    Attributes:
        case: the kernel's entry in the results: the commit, its plan, how many milliseconds of a step it takes by that
            plan and by each plan that was tried, and how long a step with another plan takes, relative to a step
            without it.
        waiting: the plans that have not been tried yet.
    """

    case: dict[str, Any]
    waiting: deque[Configuration]

    def to_compare(self) -> list[str]:
        """Return the plans whose steps are to be compared: the fastest ones, if the kernel takes less time by them."""
        times = {plan: ms for plan, ms in self.case["tried"].items() if ms is not None}
        faster = sorted((ms, plan) for plan, ms in times.items() if ms < _FASTER * self.case["own_ms"])
        return [plan for _, plan in faster[:_MOST_COMPARED] if plan not in self.case["gains"]]


class Search:
    """Tries all plans of the costliest kernels.

    Args:
        program: the program.
        builders: build plans.
        out: file that keeps what was found; None keeps nothing.
        commit: commit of the code; what was found at another one is looked for again.
    """

    def __init__(self, program: Program, builders: Builders, out: Path | None, commit: str) -> None:
        self._program = program
        self._builders = builders
        self._out = out
        self._plans: dict[tuple[ConvolutionProblem, str], Configuration] = {}
        known: dict[str, Any] = load(out)["cases"] if out is not None and out.exists() else {}
        self.kernels: dict[ConvolutionProblem, Kernel] = {}
        backend = program.backend
        begin = monotonic()
        for problem, own_ms in program.costs.items():
            begun = {"commit": commit, "plan": str(program.own[problem])}
            case = known.get(str(problem), {})
            goes_on = all(case.get(name) == value for name, value in begun.items())
            case = {**(case if goes_on else {**begun, "tried": {}, "gains": {}}), "own_ms": own_ms}
            waiting: deque[Configuration] = deque()
            with backend.lock:
                for each in plans_within(backend, problem, program.limit_bytes):
                    self._plans[problem, str(each)] = each
                    if str(each) not in case["tried"]:
                        waiting.append(each)
                        builders.begin(problem, each)
            self.kernels[problem] = Kernel(case, waiting)
        note(f"{len(self.kernels)} kernels, {self._left()} plans to try; listed in {monotonic() - begin:.0f} s")

    def run(self, deadline: float) -> bool:
        """Try and compare plans until a time, and return whether that was done with all."""
        gain_seconds = 2 * _BLOCKS * _BLOCK_STEPS * self._program.step_seconds
        round_seconds = 0.0
        while self._left():
            begin = monotonic()
            if begin + round_seconds + gain_seconds * len(self._to_compare()) >= deadline:
                break
            self._round()
            round_seconds = monotonic() - begin
        compared, left = self._to_compare(), self._left()
        seconds = gain_seconds * len(compared)
        note(f"{left} plans are left to try; {len(compared)} are compared, which takes some {seconds:.0f} s")
        for problem, name in compared:
            if monotonic() >= deadline:
                return False
            case = self.kernels[problem].case
            case["gains"][name] = self._program.gain(problem, self._plans[problem, name])
            save_case(self._out, str(problem), case)
        return not left

    def _left(self) -> int:
        """Return the number of plans that have not been tried yet."""
        return sum(len(each.waiting) for each in self.kernels.values())

    def _to_compare(self) -> list[tuple[ConvolutionProblem, str]]:
        """Return the kernels and plans whose steps are to be compared; those that may save most come first."""
        saved = {
            (problem, name): kernel.case["own_ms"] - kernel.case["tried"][name]
            for problem, kernel in self.kernels.items()
            for name in kernel.to_compare()
        }
        return sorted(saved, key=lambda each: -saved[each])

    def _round(self) -> None:
        """Put another plan in the place of each kernel that has one left."""
        plans = {problem: kernel.waiting.popleft() for problem, kernel in self.kernels.items() if kernel.waiting}
        built = [self._builders.take(problem, plan) for problem, plan in plans.items()]
        found = self._program.round(plans)
        del built
        for problem, plan in plans.items():
            self.kernels[problem].case["tried"][str(plan)] = found.get(problem)
        save_cases(self._out, {str(problem): self.kernels[problem].case for problem in plans})  # once: it is large


def report(search: Search, worth: float, *, complete: bool) -> bool:
    """Print what was found, and return whether no plan is better."""
    better = 0
    for problem, kernel in search.kernels.items():
        case = kernel.case
        gain = min(case["gains"].values(), default=1.0)
        better += gain < 1 - worth
        best = min((ms for ms in case["tried"].values() if ms is not None), default=float("nan"))
        print(
            f"{problem}: {case['plan']} {case['own_ms']:.3f} ms a step, {len(case['tried'])} others from {best:.3f} ms,"
            f" step at least {gain:.4f}"
        )
    print(json.dumps({"kernels": len(search.kernels), "better": better, "complete": complete}))
    return better == 0


def builders_of(arguments: Namespace, program: ComputeBackend) -> Builders:
    """Return what builds plans: --builders threads on a GPU, each with a cuDNN of its own; none on the CPU."""
    threads = 0 if arguments.backend == "cpu" else arguments.builders
    backends = [_open_gpu(0, Candidates.GRAPH, None) for _ in range(threads)]
    for each in backends:
        each.lend_plans(program)
    return Builders(backends)


def _share(text: str) -> tuple[int, int]:
    """Return the number of a share, from 0, and how many there are, of '1/4' and the like."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ArgumentTypeError(f"{text!r} is no share: say 1/4 for the first of four")
    return int(number) - 1, int(count)


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
    builders = builders_of(arguments, program.backend)
    try:
        search = Search(program, builders, out, commit_of(arguments))
        return report(search, arguments.worth, complete=search.run(deadline))
    finally:
        builders.end()


def _parser() -> ArgumentParser:
    parser = network_command_line(__doc__, __spec__.name, form="nchw")
    parser.add_argument("--workspace", default="64MiB", help="limit of each kernel (%(default)s)")
    parser.add_argument("--tune", choices=("first", "program"), help="how the program's plans are made")
    parser.add_argument("--plans", type=Path, help="file of the program's plans; it is made if it is not there")
    parser.add_argument("--kernels", type=int, default=20, help="number of kernels, the costliest (%(default)s)")
    parser.add_argument("--share", type=_share, default="1/1", help="which of how many shares of them (%(default)s)")
    parser.add_argument("--builders", type=int, default=12, help="threads that build plans on a GPU (%(default)s)")
    parser.add_argument("--worth", type=float, default=0.003, help="least gain of a better plan (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=120, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="most seconds of this call (no limit)")
    return parser


if __name__ == "__main__":
    run_main(main)
