"""Lanes: the way of one kernel of one layer from PyTorch's tensors to a handle, and its end where that fails."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from threading import Lock
from typing import Any, final

import torch

from ucudnn.backends.base import ComputeBackend, Spare
from ucudnn.errors import UcudnnError
from ucudnn.execution.launcher import BoundKernel, Launcher
from ucudnn.handle import Handle
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, Operation
from ucudnn.torch.fast_tensors import empty_of
from ucudnn.torch.gpu import capturing, current_device
from ucudnn.torch.problem import DTYPES, format_of, shapes_of

_LOG = logging.getLogger(__name__)
_LOW = MOST_ALIGNMENT - 1
_MOST_SKIPPED = 1 << 10
_MOST_PLACES = 64  # addresses that recur are few
_WRITTEN = {Operation.FORWARD: 2, Operation.BACKWARD_DATA: 0, Operation.BACKWARD_FILTER: 1}  # of x, w and y

_Place = tuple[int, int, int, int]
"""Addresses of x, w and y, and the memory that is needed later."""

IN_CAPTURE = "a CUDA graph is captured, and nothing is planned in a capture: call it once before"


@final
class Fallbacks:
    """Convolutions that were left to PyTorch, counted by reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, reason: str, *, warn: bool = False) -> None:
        """Count one; the first of a reason that is nobody's wish is logged."""
        with self._lock:
            self._counts[reason] += 1
            first = self._counts[reason] == 1
        if first and warn:
            _LOG.warning("left to PyTorch: %s", reason)

    def counts(self) -> dict[str, int]:
        """Return how many there were, by reason."""
        with self._lock:
            return dict(self._counts)


@final
class KernelCall:
    """One kernel of one layer on one device.

    What fails is tried again later, less and less often: memory may be there again, or ranks be initialized.

    Args:
        problem: what is computed.
        layer: the layer's name, or ''.
        ordinal: number of the GPU; -1 for the CPU.
        open_handle: opens the handle, or returns it.
        left: counts what is left to PyTorch.
    """

    __slots__ = (
        "_bound",
        "_failures",
        "_launchers",
        "_layer",
        "_left",
        "_open_handle",
        "_ordinal",
        "_output",
        "_output_elsewhere",
        "_problem",
        "_skip",
        "output_bytes",
    )

    def __init__(
        self, problem: ConvolutionProblem, layer: str, ordinal: int, open_handle: Callable[[], Handle], left: Fallbacks
    ) -> None:
        self._problem = problem
        self._layer = layer
        self._ordinal = ordinal
        self._open_handle = open_handle
        self._left = left
        # By the low bits of addresses, and the memory that is needed later.
        self._launchers: dict[tuple[int, int], Callable[[Any, Any, Any], None]] = {}
        self._bound: dict[_Place, BoundKernel | None] = {}  # None where it was launched once
        self._failures = 0
        self._skip = 0
        shape = shapes_of(problem)[_WRITTEN[problem.operation]]
        strides = torch.empty(shape, device="meta", memory_format=format_of(problem)).stride()
        device = torch.device("cpu") if ordinal < 0 else torch.device("cuda", ordinal)
        dtype = DTYPES[problem.dtype]
        self._output = partial(empty_of(device.type), shape, strides, dtype)
        self._output_elsewhere = partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
        self.output_bytes = prod(shape) * problem.dtype.itemsize

    def new(self) -> torch.Tensor:
        """Return a tensor that it may write."""
        here = self._ordinal < 0 or current_device() == self._ordinal
        return self._output() if here else self._output_elsewhere()

    def run(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, later_bytes: int = 0) -> bool:
        """Compute one of three tensors from the others; whether that was done.

        Args:
            x: input or its gradient, dense in the problem's layout, as all three.
            w: filters or their gradient.
            y: output or its gradient.
            later_bytes: memory that is needed once this is computed, and not before: workspace may be so much larger.
        """
        if self._ordinal < 0:
            near, filters, far = (_array(each, self._problem) for each in (x, w, y))
            return self._launch(0, near, filters, far, later_bytes)
        at_x, at_w, at_y = x.data_ptr(), w.data_ptr(), y.data_ptr()
        if current_device() != self._ordinal:
            with torch.cuda.device(self._ordinal):
                return self._launch((at_x | at_w | at_y) & _LOW, at_x, at_w, at_y, later_bytes)
        place = at_x, at_w, at_y, later_bytes
        bound = self._bound.get(place)
        if bound is not None and bound():
            return True
        low = (at_x | at_w | at_y) & _LOW
        done = self._launch(low, at_x, at_w, at_y, later_bytes)
        recurs = place in self._bound
        if not recurs and len(self._bound) >= _MOST_PLACES:
            self._bound.clear()
        launch = self._launchers.get((low, later_bytes)) if recurs else None
        self._bound[place] = launch.bound(at_x, at_w, at_y) if isinstance(launch, Launcher) else None
        return done

    def _launch(self, low: int, x: Any, w: Any, y: Any, later_bytes: int) -> bool:
        key = low, later_bytes
        try:
            launch = self._launchers.get(key)
            if launch is None:
                if not self._may_begin():
                    return False
                launch = self._launchers[key] = self._begin(low, later_bytes)
            launch(x, w, y)
        except (UcudnnError, MemoryError, RuntimeError) as error:  # the last is how PyTorch and CUDA say what is wrong
            self._launchers.pop(key, None)
            self._skip = min(1 << self._failures, _MOST_SKIPPED)
            self._failures += 1
            what = str(error).split("\n", 1)[0]
            self._left.add(f"{type(error).__name__}: {what}", warn=True)
            return False
        return True

    def _may_begin(self) -> bool:
        """Whether it may be planned now."""
        if self._skip:
            self._skip -= 1
            self._left.add("it failed before, and is tried again later")
            return False
        if self._ordinal >= 0 and capturing():
            self._left.add(IN_CAPTURE, warn=True)
            return False
        return True

    def _begin(self, low: int, later_bytes: int) -> Callable[[Any, Any, Any], None]:
        """Plan it, and return what computes it; under WD that is planned by the first call."""
        problem = replace(self._problem, alignment=low & -low) if low else self._problem
        handle = self._open_handle()
        room = handle.useful(handle.settings.workspace_limit_bytes + later_bytes) if later_bytes else 0
        launcher = handle.launcher(problem, self._layer, room, fresh=True, plan=True)
        if launcher is None:
            return partial(handle.convolve, problem, layer=self._layer, fresh=True)
        if not room:
            return launcher
        assert isinstance(handle.backend, ComputeBackend), "else there is no launcher"
        return partial(_launch_in_room, launcher, handle.backend.allocate)


def _launch_in_room(launcher: Launcher, allocate: Callable[[int], Any], x: Any, w: Any, y: Any) -> None:
    """Compute with as much memory as a launcher needs, or as it gets by with."""
    while True:
        needed = launcher.needs()
        try:
            room = Spare(allocate(needed), needed)
            break
        except MemoryError as error:
            launcher.shrink(needed, error)
    launcher(x, w, y, room)


def _array(tensor: torch.Tensor, problem: ConvolutionProblem) -> Any:
    """Return a tensor of the CPU as an array in the problem's layout."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)  # NumPy has no such type; backends go by the problem's
    if problem.layout.channels_last:
        tensor = tensor.movedim(1, -1)
    return tensor.numpy()
