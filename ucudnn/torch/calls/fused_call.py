"""A convolution with its bias in one kernel, where the handle has a plan whose engines add the bias."""

import logging
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, final

import torch

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.errors import PlanFileError, UcudnnError
from ucudnn.execution.kernel_plans import KernelPlans
from ucudnn.execution.launcher import BoundKernel, Launcher
from ucudnn.handle import Handle
from ucudnn.kernel import KernelKey
from ucudnn.planning.choices import Origin
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.calls.direct_kernel import DirectKernel
from ucudnn.torch.calls.kernel_call import LOW_BITS, MOST_BOUND, Caller, PlannedCall
from ucudnn.torch.device.gpu import capturing, current_device
from ucudnn.workspace.spare import tail_step

_WORTH_FUSING = 0.97  # of the time of both kernels: less may be noise
_SAMPLES, _CALLS = 9, 8
_LEAD_MS = 0.5  # in which the host queues the calls of a sample


def is_fused(configuration: Configuration) -> bool:
    """Return whether the engines of a configuration add the bias themselves, in each part."""
    calls = [each for part in configuration.parts for each in part.slabs or (part,)]
    return not any(each.algorithm.endswith(ADDED) for each in calls)


def without_addition(
    problem: ConvolutionProblem, configuration: Configuration
) -> tuple[ConvolutionProblem, Configuration]:
    """Return what is left to compute if the caller adds the bias, where another kernel would add it."""
    if not problem.biased or not all(part.algorithm.endswith(ADDED) for part in configuration.parts):
        return problem, configuration
    parts = (replace(part, algorithm=part.algorithm.removesuffix(ADDED)) for part in configuration.parts)
    return problem.without_bias(), replace(configuration, parts=tuple(parts))


def measured_with_bias(handle: Handle, key: KernelKey, out: torch.Tensor, bias: torch.Tensor) -> Configuration | None:
    """Plan a kernel with its bias by measurements, and keep the plan if it is the faster one.

    It is compared with the plan without the bias, which is made first, and with PyTorch's addition behind it. Only
    engines that add the bias themselves are measured.

    Returns:
        The configuration. None if the other way is faster, if no engine adds the bias, or if the handle does not
        measure kernels one by one before they run; then the kernel has no plan.

    Raises:
        UcudnnError: if one of both cannot be planned.
        RuntimeError: if CUDA fails.
    """
    plans, backend, problem = handle.plans, handle.backend, key.problem
    if problem.deterministic or not plans.measures_each or not isinstance(backend, CudnnBackend):
        return None
    first = plans.planned(key._replace(problem=problem.without_bias())).decision
    if first is None or first.origin is not Origin.MEASURED:
        return None
    entry = plans.plan_without(key, lambda name: name.endswith(ADDED))
    if entry is None or entry.decision is None:
        return None
    found, faster = entry.decision.configuration, False
    try:
        run, lead = partial(_add, out.zero_(), bias.view(-1, *[1] * (out.dim() - 2))), partial(backend.delay, _LEAD_MS)
        added_ms = median(backend.elapsed_ms(run, lead) for _ in range(_SAMPLES)) / _CALLS
        both_ms = first.configuration.time_ms + added_ms
        faster = is_fused(found) and found.time_ms < _WORTH_FUSING * both_ms
    finally:
        if not faster:
            plans.forget(key)
    return found if faster else None


def _add(out: torch.Tensor, addend: torch.Tensor) -> None:
    for _ in range(_CALLS):
        out.add_(addend)


_LOG = logging.getLogger(__name__)

_Addresses = tuple[int, int, int, int]
"""Of x, w, y and the bias."""


@final
class FusedCall(PlannedCall):
    """The forward kernel of one layer with a bias on one GPU; off unless there is a plan whose engines add it.

    Such a plan was adopted, loaded, or measured before the first run. While it is off, the plan without the bias
    computes, and PyTorch adds the bias. It is looked up again when plans were adopted or loaded, never in a capture.
    The problem is for tensors that are aligned to 16 bytes.
    """

    __slots__ = ("_bound", "_configuration", "_epoch", "_launched", "_launcher", "_plans")

    def __init__(self, problem: ConvolutionProblem, layer: str, ordinal: int, caller: Caller) -> None:
        super().__init__(problem, layer, ordinal, caller)
        self._plans: KernelPlans | None = None
        self._epoch = 0
        self._launcher: Launcher | None = None
        self._launched = False
        self._configuration: Configuration | None = None
        self._bound: BoundedDict[_Addresses, BoundKernel | None] = BoundedDict(MOST_BOUND)  # None after one launch

    @property
    def is_on(self) -> bool:
        """Whether the handle has a plan now whose engines add the bias; not before the first call."""
        plans = self._plans
        if plans is not None and plans.epoch != self._epoch:
            self._look_up()
        return self._launcher is not None

    def direct(self) -> DirectKernel | None:
        """Return the kernel as the gate computes it; None if it is off, not launched yet, or no call of cuDNN alone."""
        return self._direct(self._launcher) if self.is_on and self._launcher is not None else None

    def run(self, x: Any, w: Any, y: Any, bias: Any) -> bool:
        """Compute y = conv(x, w) + bias, and return whether that was done.

        It is not done while it is off, if a tensor is aligned to less than 16 bytes, if its first launch would be in a
        capture, or if no algorithm is left that runs. All tensors are dense, in the problem's layout.

        Raises:
            PlanFileError: if a file of plans has one that cannot be used.
        """
        plans = self._plans
        if plans is None or plans.epoch != self._epoch:
            self._look_up(y, bias)
        if self._launcher is None:
            return False
        addresses = x.data_ptr(), w.data_ptr(), y.data_ptr(), bias.data_ptr()
        if current_device() != self._ordinal:
            with torch.cuda.device(self._ordinal):
                return self._launch(addresses)
        bound = self._bound.get(addresses)
        if bound is not None and bound():
            self.bound += 1
            return True
        return self._launch(addresses)

    def _look_up(self, y: Any = None, bias: Any = None) -> None:
        """Ask the handle for a plan; given tensors, one may be measured now, which overwrites y."""
        if capturing():
            return
        self._launcher = None
        try:
            with torch.cuda.device(self._ordinal):
                handle = self._caller.handle(self._ordinal)
                with handle.backend.lock:
                    self._plans, self._epoch = handle.plans, handle.plans.epoch
                    key = KernelKey(self._layer, self.problem, 0, tail_step(self.problem) > 0)
                    found = handle.plans.with_bias(key)
                    if found is None and y is not None:
                        found = measured_with_bias(handle, key, y, bias)
                    if found is not None and is_fused(found):
                        self._configuration, self._launched = found, False
                        self._launcher = handle.plans.launcher(self.problem, self._layer, fresh=True, plan=True)
        except PlanFileError:  # the plans that were asked for cannot be had
            raise
        except (UcudnnError, MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError for errors of CUDA
            _LOG.debug("%s: %s", self.problem, error)

    def _launch(self, addresses: _Addresses) -> bool:
        launcher, (x, w, y, bias) = self._launcher, addresses
        if launcher is None or (x | w | y | bias) & LOW_BITS or not (self._launched or not capturing()):
            return False
        filters = BiasedFilters(w, bias)
        self._note_filters(w)
        try:
            launcher(x, filters, y)
        except (UcudnnError, MemoryError, RuntimeError) as error:
            _LOG.warning("%s: PyTorch adds the bias from now on: %s", self.problem, str(error).split("\n", 1)[0])
            self._launcher = None
            self._caller.has_unlent = True
            return False
        self.looked_up += 1
        if launcher.plan is not self._lent:
            self._caller.has_unlent = True
        self._launched = True
        self._bound[addresses] = launcher.bind(x, filters, y) if addresses in self._bound else None
        if launcher.configuration is not self._configuration:  # it failed, or found no room
            self._configuration = launcher.configuration
            if not is_fused(self._configuration):
                self._launcher = None
        return True
