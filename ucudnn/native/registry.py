"""Registry: the kernels of all C++ handles of a GPU, among which one workspace is divided (WD).

A kernel is one problem of one handle, because the calls of one handle run in order. Frameworks register kernels on one
handle and compute them on several (Caffe on three for each group). So a handle that computes a kernel that it did not
register takes the place of a registered kernel that no handle has computed yet.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import final

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.errors import BackendError
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.planning.plan_file import LoadedPlans
from ucudnn.planning.replanning import Replanner
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.settings import Settings

_Key = tuple[int, ConvolutionProblem]


@final
class KernelRegistry:
    """Kernels and the latest division, for which plans were perhaps loaded from a file.

    Attributes:
        divisions: number of divisions so far.
        arena_bytes: size of the workspace in the latest division.
        decisions: the latest division alone, with the seconds of all; empty before the first.
        decided: the decisions that hold, by the names of their kernels.
    """

    def __init__(self, loaded: LoadedPlans) -> None:
        self._loaded = loaded
        self._names: Iterator[str] = (f"#{number}" for number in count(1))
        self._registered: set[_Key] = set()
        self._waiting: list[tuple[int, str, ConvolutionProblem]] = []  # registered by a handle, not computed yet
        self._taken: dict[_Key, str] = {}
        self.decided: dict[str, Decision] = {}
        self.decisions: list[Decisions] = []
        self.divisions = 0
        self.arena_bytes = 0

    def register(self, handle: int, problem: ConvolutionProblem) -> None:
        """Register a kernel; registering it again changes nothing.

        If the batch strides of x and y are k times their sample sizes, they are parts of tensors of k groups. Then the
        same problem will be computed for each group.
        """
        if (handle, problem) not in self._registered:
            self._registered.add((handle, problem))
            self._waiting += [(handle, next(self._names), problem) for _ in range(groups_apart(problem))]

    def forget(self, handle: int) -> list[str]:
        """Forget the kernels of a handle, and return their names; the next division reuses their segments."""
        self._registered = {key for key in self._registered if key[0] != handle}
        self._waiting = [each for each in self._waiting if each[0] != handle]
        gone = [self._taken.pop(key) for key in list(self._taken) if key[0] == handle]
        for name in gone:
            self.decided.pop(name, None)
        if not self._taken and not self._waiting:
            self.arena_bytes = 0
        return gone

    def decision(self, handle: int, problem: ConvolutionProblem, benchmark: Benchmark, settings: Settings) -> Decision:
        """Return the decision of a kernel with its segment; divide again if the latest division lacks the kernel.

        Raises:
            InfeasibleError: if the total is too small; it names the kernel and the workspace that it needs.
            MeasurementError: if no algorithm of a kernel could be measured.
        """
        key = handle, problem
        name = self._taken.get(key) or self._take(handle, problem)
        if name not in self.decided:
            try:
                self._divide(benchmark, settings)
            except BaseException:
                del self._taken[key]  # a kernel that cannot be planned must not stop the others
                raise
        return self.decided[name]

    def decide_again(self, handle: int, problem: ConvolutionProblem, replanner: Replanner) -> str:
        """Choose another configuration within a kernel's segment, without discarded algorithms; return its name.

        Raises:
            BackendError: if no algorithm is left.
        """
        name = self._taken[handle, problem]
        segment = self.decided[name].segment
        assert segment is not None
        decision = replanner.decide(Kernel(layer=name, problem=problem), segment.size_bytes)
        if decision is None:
            raise BackendError(f"{problem}: no algorithm is left for its segment of {segment.size_bytes} bytes")
        self.decided[name] = replace(decision, segment=segment)
        return name

    def _take(self, handle: int, problem: ConvolutionProblem) -> str:
        """Return the name of a kernel that is computed for the first time, that of a registered one if possible."""
        plain = as_registered(problem)
        alike = [each for each in self._waiting if each[2] == plain]
        if alike:
            place = next((each for each in alike if each[0] == handle), alike[0])
            self._waiting.remove(place)
            name = place[1]
            if plain != problem:
                self.decided.pop(name, None)  # it is less aligned than it was registered
        else:
            name = next(self._names)
        self._taken[handle, problem] = name
        return name

    def _divide(self, benchmark: Benchmark, settings: Settings) -> None:
        kernels = [Kernel(layer=name, problem=problem) for (_, problem), name in self._taken.items()]
        kernels += [Kernel(layer=name, problem=problem) for _, name, problem in self._waiting]
        decisions = decide(kernels, benchmark, settings, loaded=self._loaded)
        self.decisions = [decisions.after(self.decisions)]
        self.decided = {each.kernel.layer: each for each in decisions.kernels if each.segment is not None}
        segments = [each.segment for each in self.decided.values() if each.segment is not None]
        self.arena_bytes = max((each.offset_bytes + each.size_bytes for each in segments), default=0)
        self.divisions += 1


def as_registered(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return a problem as callers register it, before alignment and determinism are known."""
    return replace(problem, alignment=MOST_ALIGNMENT, deterministic=False)


def groups_apart(problem: ConvolutionProblem) -> int:
    """Return the number of groups of the tensors that x and y are parts of, as batch strides tell; 1 if they do not."""
    x, x_rest = divmod(problem.x_batch_stride, problem.x_sample)
    y, y_rest = divmod(problem.y_batch_stride, problem.y_sample)
    return x if x == y and not x_rest and not y_rest else 1
