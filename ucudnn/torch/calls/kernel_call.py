"""One kernel of one layer: from PyTorch's tensors to a handle, or back to PyTorch if the handle fails."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, final

import torch

from ucudnn.bounded import BoundedDict
from ucudnn.errors import PlanFileError, UcudnnError
from ucudnn.execution.launcher import BoundKernel, Launcher
from ucudnn.execution.plan import Plan
from ucudnn.handle import Handle
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.torch.calls.direct_kernel import DirectKernel, direct_kernel
from ucudnn.torch.calls.fallbacks import Fallbacks
from ucudnn.torch.calls.problem import OutputForm
from ucudnn.torch.device.gpu import capturing, current_device

LOW_BITS = MOST_ALIGNMENT - 1
"""The bits of addresses that tell how they are aligned."""

MOST_BOUND = 1 << 10
"""A training step gives the same addresses again, a few for each layer that shares the kernel."""

_MOST_SKIPPED = 1 << 10

_Addresses = tuple[int, int, int]
"""Of x, w and y."""

_Launch = Callable[[Any, Any, Any], None]
"""Computes the kernel on x, w and y: addresses of a GPU's memory, or arrays of the CPU."""

IN_CAPTURE = "a CUDA graph is captured, and nothing is planned in a capture: call it once before"


class Caller(Protocol):
    """Has the handles by which kernels are computed.

    Attributes:
        fallbacks: counts what is left to PyTorch.
        has_unlent: set after a launch by a plan that `direct` has not been asked about.
    """

    fallbacks: Fallbacks
    has_unlent: bool

    def handle(self, ordinal: int, /) -> Handle:
        """Return the handle of a device, which is opened first if necessary."""
        ...


class PlannedCall:
    """One kernel of one layer on one device, whose number is -1 for the CPU, and how it is computed by its plan.

    Attributes:
        filters: addresses of the filters that it was given in the longer way, the first ones of many.
        bound: number of calls on addresses that recurred, with nothing left to look up.
        native_calls: what `Launcher.lend` has returned last, which kernel calls may share; None before.
        looked_up: number of calls that were launched in the longer way.
    """

    __slots__ = (
        *("_caller", "_layer", "_lent", "_ordinal"),
        *("bound", "native_calls", "filters", "looked_up", "problem"),
    )

    def __init__(self, problem: ConvolutionProblem, layer: str, ordinal: int, caller: Caller) -> None:
        self.problem = problem
        self.filters: set[int] = set()
        self.bound = 0
        self.looked_up = 0
        self.native_calls: array[int] | None = None
        self._layer = layer
        self._ordinal = ordinal
        self._caller = caller
        self._lent: Plan | None = None

    def _note_filters(self, address: int) -> None:
        if len(self.filters) < MOST_BOUND:  # copies of weights may lie elsewhere at each step
            self.filters.add(address)

    def _direct(self, launcher: Launcher) -> DirectKernel | None:
        """Return the plan of a launcher as the gate computes it; None before the first launch, or if it cannot."""
        lent = launcher.lend()
        if lent is None:
            return None
        self._lent, self.native_calls = lent
        with torch.cuda.device(self._ordinal):
            found = direct_kernel(self._lent, self._caller.handle(self._ordinal).backend)
        return None if found is None else replace(found, calls=self.native_calls)


@final
class KernelCall(PlannedCall):
    """A kernel that PyTorch computes where the handle fails.

    It is tried again later, less and less often until it runs, because memory may have become free by then, or ranks
    may have been initialized.

    PyTorch allocates a tensor of `later_bytes` right after the kernel has run. The kernel's workspace may exceed the
    limit by as much, because the peak of memory stays what it is.
    """

    __slots__ = ("_bound", "_failures", "_later_bytes", "_launches", "_skip", "form")

    def __init__(
        self, problem: ConvolutionProblem, layer: str, ordinal: int, caller: Caller, later_bytes: int = 0
    ) -> None:
        super().__init__(problem, layer, ordinal, caller)
        self._later_bytes = later_bytes
        self._launches: dict[int, _Launch] = {}  # by the low bits of the addresses
        self._bound: BoundedDict[_Addresses, BoundKernel | None] = BoundedDict(MOST_BOUND)  # None after one launch
        self._failures = 0
        self._skip = 0
        self.form = OutputForm(problem, ordinal)

    def direct(self) -> DirectKernel | None:
        """Return the kernel as the gate computes it; None if it has no plan yet, or is more than calls of cuDNN."""
        launch = self._launches.get(0)
        return self._direct(launch) if isinstance(launch, Launcher) else None

    def run(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> bool:
        """Compute one of three tensors from the two others, and return whether that was done.

        All are dense in the problem's layout.
        """
        if self._ordinal < 0:
            self._note_filters(w.data_ptr())
            return self._launch(0, *(array_of(each, self.problem) for each in (x, w, y)))
        at_x, at_w, at_y = addresses = x.data_ptr(), w.data_ptr(), y.data_ptr()
        low_bits = (at_x | at_w | at_y) & LOW_BITS
        if current_device() != self._ordinal:
            with torch.cuda.device(self._ordinal):
                return self._launch(low_bits, at_x, at_w, at_y)
        bound = self._bound.get(addresses)
        if bound is not None and bound():
            self.bound += 1
            return True
        self._note_filters(at_w)
        done = self._launch(low_bits, at_x, at_w, at_y)
        launch = self._launches.get(low_bits) if addresses in self._bound else None
        self._bound[addresses] = launch.bind(*addresses) if isinstance(launch, Launcher) else None
        return done

    def _launch(self, low_bits: int, x: Any, w: Any, y: Any) -> bool:
        """Compute the kernel on addresses or arrays, and return whether that was done; it is planned first."""
        try:
            launch = self._launches.get(low_bits)
            if launch is None:
                if not self._may_plan():
                    return False
                launch = self._launches[low_bits] = self._plan(low_bits)
            launch(x, w, y)
            self.looked_up += 1
            self._failures = 0
            if not low_bits and isinstance(launch, Launcher) and launch.plan is not self._lent:
                self._caller.has_unlent = True
        except PlanFileError:  # the plans that were asked for cannot be had, and PyTorch's kernels are none of them
            raise
        except (UcudnnError, MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError for errors of CUDA
            self._launches.pop(low_bits, None)
            fallbacks = self._caller.fallbacks
            if fallbacks.strict:
                raise
            self._skip = min(1 << self._failures, _MOST_SKIPPED)
            self._failures += 1
            what = str(error).split("\n", 1)[0]
            fallbacks.add(f"{type(error).__name__}: {what}", warn=True)
            return False
        return True

    def _may_plan(self) -> bool:
        """Return whether the kernel may be planned now; if not, count the reason."""
        fallbacks = self._caller.fallbacks
        if self._skip:
            self._skip -= 1
            fallbacks.add("it failed before, and is tried again later")
            return False
        if self._ordinal >= 0 and capturing():
            fallbacks.refuse(IN_CAPTURE)
            fallbacks.add(IN_CAPTURE, warn=True)
            return False
        return True

    def _plan(self, low_bits: int) -> _Launch:
        """Plan the kernel, and return what computes it; under WD, the first call plans."""
        problem = replace(self.problem, alignment=low_bits & -low_bits) if low_bits else self.problem
        handle, later = self._caller.handle(self._ordinal), self._later_bytes
        limit_bytes = handle.plans.spare_workspace_bytes(handle.settings.workspace_limit_bytes + later) if later else 0
        launcher = handle.plans.launcher(problem, self._layer, limit_bytes, fresh=True, plan=True)
        if launcher is None:
            return partial(handle.convolve, problem, layer=self._layer, fresh=True)
        return launcher


def array_of(tensor: torch.Tensor, problem: ConvolutionProblem) -> Any:
    """Return a tensor of the CPU as an array in the problem's layout."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)  # NumPy has no bfloat16; backends go by the problem's type
    if problem.layout.channels_last:
        tensor = tensor.movedim(1, -1)
    return tensor.numpy()
