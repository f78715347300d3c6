"""The owner of plans while a program is tuned within a stated limit: the handle, which makes the heuristic plans."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import TypeVar, final

import torch

from ucudnn.benchmarking.unmeasured.untimed_division import is_direct
from ucudnn.configuration import Configuration
from ucudnn.errors import UcudnnError
from ucudnn.execution.kernel_plans import Replaced
from ucudnn.handle import Handle
from ucudnn.kernel import KernelKey
from ucudnn.planning.choices import Origin
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.calls.fused_call import without_addition
from ucudnn.torch.device.memory_limit import StatedHeadroom
from ucudnn.torch.trials.call_site import CallSite

_LOG = logging.getLogger("ucudnn.torch")

STEPS_TO_PLAN = 2
"""Steps in which calls come to Python after their plans have changed: these are made in the first one."""

UNSTEADY_STEPS = STEPS_TO_PLAN + 1
"""The same, and the step that waits while the gate is opened again."""

_MOST_AWAITED = 64  # steps in which the gate is awaited: it is built once for each version of PyTorch on a machine

_Taken = TypeVar("_Taken")


@final
class PlanOwner:
    """Tells a tuner which plans of a handle are final, and takes what the tuner has chosen."""

    def __init__(self, handle: Callable[[], Handle], headroom: StatedHeadroom) -> None:
        self.headroom = headroom
        self.changes = 0
        self._handle = handle
        self._known_plans = 0
        self._compared: dict[ConvolutionProblem, Configuration] = {}
        self._before: list[Mapping[KernelKey, Replaced]] = []

    def has_new_plans(self) -> bool:
        """Return whether the handle has planned kernels since this was last asked."""
        handle, before = self._handle(), self._known_plans
        with handle.backend.lock:
            self._known_plans = len(handle.plans.entries)
        return self._known_plans != before

    def checks_host(self, *, gated: bool | None, steps: int) -> bool | None:
        """Return whether to find out if the host bounds the program, whose heuristic plans stay then; None for not yet.

        A plan of many launches may be what keeps the host busy, so that others are tried. Calls in Python may be, too.
        And ranks have their gates in different steps, so that one would be delayed with another.

        Args:
            gated: whether the gate computes by plans; None if it may do so soon.
            steps: number of steps in which it may have been asked.
        """
        late = gated is None and steps > _MOST_AWAITED
        if gated is False or late or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        handle = self._handle()
        with handle.backend.lock:
            decided = [(each.kernel.problem, each.decision) for each in handle.plans.entries.values()]
        plans = [(problem, each.configuration) for problem, each in decided if each is not None]
        # The engine that computes groups directly launches a kernel for each of them.
        grouped = any(problem.groups > 1 and is_direct(plan.parts[0].algorithm) for problem, plan in plans)
        return False if grouped or any(plan.calls > 1 for _, plan in plans) else gated

    def planned_seconds(self) -> float:
        """Return how long the handle has planned so far, while calls of the program waited."""
        return self._handle().plans.seconds

    def is_final(self, problem: ConvolutionProblem) -> bool:
        """Return whether nothing is tried for a problem: its plan was loaded or measured, or PyTorch computes it.

        A heuristic plan has no bias, which PyTorch adds.
        """
        handle, plain = self._handle(), problem.without_bias()
        with handle.backend.lock:
            planned = problem.biased and handle.plans.origins(problem)
            return bool(planned) or handle.plans.origins(plain) != {Origin.RULE}

    def turn_to(self, kernels: Mapping[ConvolutionProblem, TunedKernel]) -> None:
        """Let the handle compute some problems by the configurations of kernels, and all others by what was there.

        So all steps that are compared run in the same way, and none makes calls in Python that the others spare.
        """
        wanted = {problem: each.configuration for problem, each in kernels.items()}
        if wanted == self._compared:
            return
        self._compared = wanted
        self.changes += 1
        plans = self._handle().plans
        with self._handle().backend.lock:
            while self._before:
                plans.put_back(self._before.pop())
            self._before += self._given(wanted, plans.take)

    def adopt(self, sites: Iterable[CallSite]) -> None:
        """Let the handle compute problems by configurations that were faster in the program."""
        chosen = {site.problem: site.adopted for site in sites if site.adopted is not None}
        timed = {problem: _timed(each.configuration, median(each.samples_ms)) for problem, each in chosen.items()}
        self._given(timed, self._handle().plans.adopt)

    def _given(
        self,
        configurations: Mapping[ConvolutionProblem, Configuration],
        take: Callable[[ConvolutionProblem, Configuration], _Taken],
    ) -> list[_Taken]:
        """Give the handle configurations of problems, and return what it answers; a refused one stays out.

        Where another kernel adds the bias, the configuration is that of the convolution without it. Calls that have no
        bias decide about that last.
        """
        found = []
        for problem, configuration in sorted(configurations.items(), key=lambda each: not each[0].biased):
            try:
                with self._handle().backend.lock:
                    found.append(take(*without_addition(problem, configuration)))
            except UcudnnError as error:
                _LOG.warning("%s: %s", problem, error)
        return found


def _timed(configuration: Configuration, time_ms: float) -> Configuration:
    """Return a configuration whose parts share a time that was taken of all of them together."""
    each_ms = time_ms / len(configuration.parts)
    return replace(configuration, parts=tuple(replace(part, time_ms=each_ms) for part in configuration.parts))
