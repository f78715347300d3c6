"""Lists the algorithms of cuDNN that compute a problem, and those that compute it on copies or add to a sum."""

from collections.abc import Sequence
from contextlib import suppress
from typing import final

from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import GATHERING, dense_of, skips
from ucudnn.backends.cudnn.algorithms.heuristics import graph_algorithms, listing_scaling
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDING, HALF, legacy_algorithms
from ucudnn.backends.cudnn.algorithms.operation_graph import allowed, is_engine
from ucudnn.backends.cudnn.algorithms.packed import PACKING, dense, has_gaps
from ucudnn.backends.cudnn.algorithms.prepare import Preparer, wrapping_of
from ucudnn.backends.cudnn.algorithms.summed import summed_algorithms
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm


@final
class AlgorithmList:
    """The candidates of each problem; each list is made once."""

    def __init__(self, candidates: Candidates, preparer: Preparer) -> None:
        self._candidates = candidates
        self._preparer = preparer
        self.known: dict[ConvolutionProblem, tuple[Algorithm, ...]] = {}
        self._legacy_known: dict[ConvolutionProblem, Sequence[Algorithm]] = {}

    def of(self, problem: ConvolutionProblem) -> tuple[Algorithm, ...]:
        """Return the candidates that can compute a problem, with their workspaces; no plan is built."""
        if problem not in self.known:
            listed = self._sums if problem.float32_sum else self._biased if problem.biased else self._list
            self.known[problem] = tuple(listed(problem))
        if not self.known[problem]:
            raise UnsupportedProblemError(f"cuDNN {self._preparer.library.version_text} has no algorithm for {problem}")
        return self.known[problem]

    def leading(self, problem: ConvolutionProblem, most: int) -> Sequence[Algorithm]:
        """Return the first algorithms of the list, at most some, as heuristic mode A offers them, or fewer.

        None are returned where the list does not begin with what mode A offers.
        """
        if problem in self.known:
            return self.known[problem][:most]
        if problem.float32_sum or problem.biased or not self._candidates.offers("graph", problem):
            return ()
        if self.gathers(problem):
            return [GATHERING.algorithm(problem, each) for each in self.leading(dense_of(problem), most)]
        try:
            return self._preparer.graph(problem, listing_scaling(problem)).leading(most)
        except BackendError:
            return ()

    def named(self, problem: ConvolutionProblem, name: str) -> Algorithm | None:
        """Return an algorithm by its name, even if heuristics do not offer it; None if it does not apply."""
        wrapping = wrapping_of(name)
        if wrapping is not None:
            applies = wrapping.applies(problem) and (wrapping is not GATHERING or self.gathers(problem))
            inner = self.named(*wrapping.asked(problem, name)) if applies else None
            return None if inner is None else wrapping.algorithm(problem, inner)
        if not is_engine(name):
            legacy = () if problem.biased else self._legacy(problem)
            return next((each for each in legacy if each.name == name), None)
        try:
            found = self._preparer.graph(problem, listing_scaling(problem)).named(name)
        except BackendError:
            return None
        return found if allowed(found, problem) else None

    def gathers(self, problem: ConvolutionProblem) -> bool:
        """Return whether a problem is also computed on a copy of the samples of x that strides read."""
        possible = self._candidates.gathers and not problem.float32_sum and skips(problem)
        return possible and self._preparer.device.copier is not None

    def _list(self, problem: ConvolutionProblem) -> list[Algorithm]:
        offers = self._candidates.offers
        found: list[Algorithm] = []
        if self.gathers(problem):  # first, because they are the fastest if the workspace is large enough
            with suppress(UnsupportedProblemError):
                found += [GATHERING.algorithm(problem, each) for each in self.of(dense_of(problem))]
        found += self._engines(problem)
        if not found:  # a last resort, which sums in 16 bits only if legacy algorithms are wanted
            legacy = self._legacy(problem)
            found += [each for each in legacy if not each.name.endswith(HALF) or offers("legacy", problem, each.name)]
        elif offers("legacy", problem):
            found += [each for each in self._legacy(problem) if offers("legacy", problem, each.name)]
        if has_gaps(problem):
            with suppress(UnsupportedProblemError):
                found += [PACKING.algorithm(problem, each) for each in self.of(dense(problem))]
        return found

    def _engines(self, problem: ConvolutionProblem) -> list[Algorithm]:
        if not self._candidates.offers("graph", problem):
            return []
        handle = self._preparer.handle
        listed = self._preparer.compiler.listed(problem, handle)
        return graph_algorithms(self._preparer.library, handle, problem) if listed is None else listed

    def _biased(self, problem: ConvolutionProblem) -> list[Algorithm]:
        """Return the engines that add the bias themselves, and all other algorithms, with a kernel that adds it."""
        found = self._engines(problem)
        with suppress(UnsupportedProblemError):
            found += [ADDING.algorithm(problem, each) for each in self.of(problem.without_bias())]
        return found

    def _sums(self, problem: ConvolutionProblem) -> list[Algorithm]:
        asked = self._candidates.offers("graph", problem)
        engines = graph_algorithms(self._preparer.library, self._preparer.handle, problem) if asked else []

        def listed(other: ConvolutionProblem) -> Sequence[Algorithm]:
            with suppress(UnsupportedProblemError):
                return self.of(other)
            return ()

        return summed_algorithms(problem, engines, listed)

    def _legacy(self, problem: ConvolutionProblem) -> Sequence[Algorithm]:
        if problem.float32_sum:
            return ()  # the legacy API writes the type that it reads
        if problem not in self._legacy_known:
            self._legacy_known[problem] = legacy_algorithms(self._preparer.library, self._preparer.handle, problem)
        return self._legacy_known[problem]
