"""Which set of kernels makes whole steps the fastest: steps with a set and steps of PyTorch's own take turns."""

from collections.abc import Sequence
from typing import final

from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.steps.step_times import StepTimes

_WORTH_KEEPING = 0.995  # of PyTorch's step: else no call is to make a detour through Python
_BLOCKS, _MOST_BLOCKS = 3, 12  # of steps with the kernels of a set, and as many without

BLOCK_STEPS = 5
"""Steps of a block whose first one does not count, because the step before was another one."""

KernelSet = dict[ConvolutionProblem, TunedKernel]
"""The kernels that replace PyTorch's own, by problem."""


@final
class Turns:
    """Says which steps are with what is compared: blocks of steps with it and without it take turns.

    The first steps of each block are unsteady, and do not count.
    """

    def __init__(self, unsteady_steps: int = 1) -> None:
        self.is_on = True
        self._unsteady_steps = unsteady_steps
        self._steps = 0  # of this block that have ended

    @property
    def begins_block(self) -> bool:
        """Whether the step that runs is one of the first ones of its block, which do not count."""
        return self._steps < self._unsteady_steps

    def step_ended(self) -> bool:
        """End a step, and return whether the next one begins another block."""
        self._steps = (self._steps + 1) % (BLOCK_STEPS - 1 + self._unsteady_steps)
        if self._steps == 0:
            self.is_on = not self.is_on
        return self._steps == 0


@final
class StepComparison:
    """Compares steps with one set of kernels after the other with steps of PyTorch's own, and chooses the best set.

    A launch costs the host time that the times of kernels do not contain as long as the GPU has other work. So kernels
    of many launches are compared with kernels of one.

    Where times of steps are far apart, as where a busy host bounds them, a set that may be chosen is compared in more
    steps. Where PyTorch's own kernels stay else, it is not chosen if it may be none the faster after all of them.

    Args:
        times: reads the times of steps.
        must_be_certain: whether a set is chosen only if it is certainly faster. Where heuristic plans stay else, what
            kernels were timed at says more for a set than for those, because heuristics alone chose them.
        unsteady_steps: the first steps with other kernels than before, whose times tell nothing.

    Attributes:
        kernels: the set that is compared now; in the end the one that was chosen, which is empty if PyTorch's own
            kernels stay.
        is_over: whether nothing is left to be compared.
        gain: time of a step with the chosen set over PyTorch's own, or with the set that seemed best if none was
            chosen; None if nothing was compared.
        turns: says which steps are with the set, and which ones do not count.
    """

    def __init__(self, times: StepTimes, *, must_be_certain: bool, unsteady_steps: int = 1) -> None:
        self.kernels: KernelSet = {}
        self.is_over = False
        self.gain: float | None = None
        self._times = times
        self._must_be_certain = must_be_certain
        self._unsteady_steps = unsteady_steps
        self._left: list[KernelSet] = []
        self._better: list[tuple[float, KernelSet]] = []
        self._gains: list[float] = []
        self._blocks = _BLOCKS  # in which this set is compared
        self.turns = Turns(unsteady_steps)

    @property
    def running(self) -> KernelSet:
        """The set that runs in this step; empty in steps of PyTorch's own kernels."""
        return self.kernels if self.turns.is_on and not self.is_over else {}

    def begin(self, sets: Sequence[KernelSet]) -> None:
        """Begin to compare sets of kernels; empty ones are left out."""
        self._left = [each for each in sets if each]
        self._next()

    def step_ended(self) -> None:
        """End a step, and decide which kernels run in the next one."""
        if not self.turns.step_ended():
            return
        gain = self._times.gain(self._blocks * (BLOCK_STEPS - 1))
        if gain is None:
            return
        doubt = self._times.doubt()
        is_better, is_certain = gain <= _WORTH_KEEPING, abs(gain - 1) > doubt
        may_be_chosen = is_better if self._must_be_certain else gain - doubt <= _WORTH_KEEPING
        if may_be_chosen and not is_certain and self._blocks < _MOST_BLOCKS:
            self._blocks *= 2
            return
        self._gains.append(gain)
        if is_better and (is_certain or not self._must_be_certain):
            self._better.append((gain, self.kernels))
        self._next()

    def _next(self) -> None:
        if self._left:
            self.kernels = self._left.pop(0)
            self.turns, self._blocks = Turns(self._unsteady_steps), _BLOCKS
            self._times.compare_anew()
            return
        self.is_over, self.kernels = True, {}
        self.gain = min(self._gains, default=None)
        if self._better:
            self.gain, self.kernels = min(self._better, key=lambda each: each[0])
