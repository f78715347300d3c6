"""One configuration of one kernel, ready to run on the program's tensors."""

from typing import Any, final

import torch

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import ComputeBackend
from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.execution.entry import Entry
from ucudnn.execution.launcher import BoundKernel
from ucudnn.execution.plan import make_plan
from ucudnn.kernel import Kernel
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.torch.calls.direct_kernel import DirectKernel, direct_kernel
from ucudnn.torch.calls.fused_call import without_addition
from ucudnn.torch.device.gpu import current_device

_MOST_BOUND = 1 << 10

_Addresses = tuple[int, int | BiasedFilters, int]


@final
class TunedKernel:
    """Computes a problem by a fixed configuration; it never takes another one.

    The problem is at mini-batch size, for tensors that are aligned to 16 bytes.

    Attributes:
        configuration: its configuration.
        fuses: whether it adds the bias of a problem that has one; else that is left to the caller.
        workspace_bytes: workspace of a call.

    Raises:
        StepError: if an algorithm cannot compute its part.
    """

    __slots__ = (
        *("_backend", "_bound", "_calls", "_direct", "_entry", "_ordinal", "_plan", "configuration"),
        *("fuses", "workspace_bytes"),
    )

    def __init__(self, problem: ConvolutionProblem, configuration: Configuration, backend: ComputeBackend) -> None:
        self._backend = backend
        self._ordinal = backend.device()
        self.configuration = configuration
        problem, configuration = without_addition(problem, configuration)
        self.fuses = problem.biased
        self._entry = Entry(Kernel(layer="", problem=problem, fresh=True))
        with torch.cuda.device(self._ordinal), backend.lock:
            self._plan = self._entry.prepare(make_plan(problem, configuration, backend, fresh=True))
        self._bound: BoundedDict[_Addresses, BoundKernel] = BoundedDict(_MOST_BOUND)
        self.workspace_bytes = self._plan.workspace_bytes
        self._calls = 0
        self._direct: DirectKernel | None = None

    @property
    def calls(self) -> int:
        """Number of calls that were computed, in Python and behind the gate."""
        return self._calls + (0 if self._direct is None else self._direct.calls[0])

    def direct(self) -> DirectKernel | None:
        """Return the kernel as the gate computes it without Python; None if it cannot, or not on this stream."""
        with torch.cuda.device(self._ordinal):
            found = direct_kernel(self._plan, self._backend)
        if found is None:
            return None
        if self._direct is None:  # another one would count anew
            self._direct = found
        return self._direct

    def run(self, x: Any, w: Any, y: Any, bias: Any = None) -> bool:
        """Compute one of three tensors from the two others, and return whether that was done; it may fail.

        It is not done in a capture, or if a tensor is aligned to less than 16 bytes. Tensors are dense in the problem's
        layout; the bias is read only if the kernel adds it.
        """
        return self.run_at(x.data_ptr(), w.data_ptr(), y.data_ptr(), bias.data_ptr() if self.fuses else 0)

    def run_at(self, x: int, w: int, y: int, bias: int = 0) -> bool:
        """Do the same, given the addresses of the tensors."""
        addresses = (x, BiasedFilters(w, bias) if self.fuses else w, y)
        if current_device() == self._ordinal:
            return self._run_here(addresses, x | w | y | bias)
        with torch.cuda.device(self._ordinal):  # PyTorch calls kernels in Python on whatever GPU is the current one
            return self._run_here(addresses, x | w | y | bias)

    def _run_here(self, addresses: _Addresses, bits: int) -> bool:
        bound = self._bound.get(addresses)
        if bound is None or not bound():
            if bits & (MOST_ALIGNMENT - 1):
                return False
            backend = self._backend  # on another stream, what was bound does not run
            bound = BoundKernel(self._entry, self._plan, addresses, backend.queue(), backend)
            if not bound():
                return False
            self._bound[addresses] = bound
        self._calls += 1
        return True
