"""Makes the kernels of candidates in the program's own thread, which waits meanwhile, so it makes few at a time."""

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import final

from ucudnn.errors import UcudnnError
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import FAILED, SLOW_PLAN, Candidate
from ucudnn.torch.trials.candidate_source import CandidateSource

_LOG = logging.getLogger("ucudnn.torch")

_SLOW_SECONDS = 0.1  # a plan whose engine is compiled already takes some milliseconds
_USUAL_SECONDS = 0.01
_MOST_REMEMBERED = 8
_MOST_SLOW = 2  # plans of an engine, after which none of its others is made
_ENGINE = re.compile(r"eng\d+")


@final
class KernelMaker:
    """Makes the kernels of candidates, and keeps those that may run again: those that are timed in the program.

    A thread has built their plans before. Where a plan has to be built again all the same, it takes milliseconds, or
    longer while a thread compiles other engines, because cuDNN compiles one at a time. Once that has happened, kernels
    are made only while no thread builds. Algorithms whose plans keep the program waiting are given up.
    """

    def __init__(self, source: CandidateSource, clock: Callable[[], float] = perf_counter) -> None:
        self.waits = False
        self.seconds = 0.0
        self.slowest_seconds = 0.0
        self._source = source
        self._clock = clock
        self._recent = deque([_USUAL_SECONDS] * _MOST_REMEMBERED, _MOST_REMEMBERED)
        self._slow: set[str] = set()
        self._kernels: dict[ConvolutionProblem, dict[Candidate, TunedKernel]] = {}

    def needed_seconds(self, site: CallSite, candidate: Candidate | None) -> float:
        """Return the time that the kernel of a candidate is expected to take; 0 if it is made already.

        It is a median, because a plan that took long says little about those of other algorithms, and would keep all of
        them waiting until the share of the time covers as much again.
        """
        ready = candidate is None or candidate in self._kernels.get(site.problem, ())
        return 0.0 if ready else median(self._recent)

    def may_make(self) -> bool:
        """Return whether a kernel may be made now."""
        return not (self.waits and self._source.is_busy)

    def made(self, site: CallSite, candidate: Candidate) -> TunedKernel | None:
        """Return the kernel of a candidate; None if it cannot be made, and the candidate is given up."""
        known = self._kernels.get(site.problem, {})
        if candidate in known:
            return known[candidate]
        names = {part.algorithm for part in candidate.configuration.parts}
        slow = Counter(map(_engine, self._slow))
        if names & self._slow or any(slow[_engine(name)] >= _MOST_SLOW for name in names):
            candidate.reject(SLOW_PLAN)
            return None
        backend, busy = self._source.backend, self._source.is_busy
        assert backend is not None
        begin = self._clock()
        kernel: TunedKernel | None = None
        try:
            kernel = TunedKernel(site.problem, candidate.configuration, backend)
        except (UcudnnError, RuntimeError) as error:
            _LOG.debug("%s: %s: %s", site.problem, candidate.configuration, error)
            candidate.reject(FAILED)
        self._took(self._clock() - begin, names, busy=busy)
        if kernel is not None:
            again = {each: known[each] for each in site.fastest if each in known}
            self._kernels[site.problem] = {**again, candidate: kernel}
        return kernel

    def all_made(self, chosen: Mapping[CallSite, Candidate | None]) -> dict[ConvolutionProblem, TunedKernel]:
        """Return the kernels of chosen candidates, by problem; those that cannot be made are left out."""
        made = {site.problem: self.made(site, each) for site, each in chosen.items() if each is not None}
        return {problem: kernel for problem, kernel in made.items() if kernel is not None}

    def forget(self) -> None:
        """Keep no kernel any more."""
        self._kernels.clear()

    def _took(self, seconds: float, names: set[str], *, busy: bool) -> None:
        self._recent.append(seconds)
        self.seconds += seconds
        self.slowest_seconds = max(self.slowest_seconds, seconds)
        if seconds > _SLOW_SECONDS:
            if busy:
                self.waits = True
            else:
                self._slow |= names


def _engine(name: str) -> str:
    found = _ENGINE.search(name)
    return name if found is None else found[0]
