"""Plans of problems that differ in nothing but the size of their images, where one may serve for another.

A program whose images change their size would wait for cuDNN's heuristics at each new size, for each of its kernels.
Engines with knobs compute other sizes too, and what is fast at one size is mostly fast at one nearby.
"""

from dataclasses import fields
from math import log, prod
from operator import attrgetter
from typing import NamedTuple, final

from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem

MOST_APART = 2.0
"""The most by which the points of two images may differ, as a multiple."""

_LEAST_SHARE = 0.8  # of the limit for each point, because spare memory is rounded down to an eighth of it
_MOST_TRIED = 3
_MOST_SIZES = 64
_MOST_KINDS = 1 << 12
_OF_SIZE = {"spatial", *(f"{tensor}_{of}_stride" for tensor in "xy" for of in ("batch", "channel"))}
_OTHERWISE = attrgetter(*(f.name for f in fields(ConvolutionProblem) if f.compare and f.name not in _OF_SIZE))


class _Known(NamedTuple):
    """What a size took: the limit within which it did, the points of its images, and its configuration."""

    limit_bytes: int
    points: int
    configuration: Configuration

    def may_serve(self, points: int, limit_bytes: int) -> bool:
        """Return whether it had about as much workspace as another size has, for each of its points or in all."""
        share = _LEAST_SHARE * limit_bytes * self.points
        return self.limit_bytes >= limit_bytes or self.limit_bytes * points >= share


@final
class NearbyPlans:
    """Configurations by problem, all in whole micro-batches.

    Memory that a call brings as workspace, such as room for a later gradient, grows with the images, and so does the
    limit where that is more than the stated one. A plan that was made while memory was short had a smaller limit, and
    serves for no size that has more for each point.
    """

    def __init__(self) -> None:
        self._kinds: BoundedDict[object, BoundedDict[tuple[tuple[int, ...], int], _Known]] = BoundedDict(_MOST_KINDS)

    def learn(self, problem: ConvolutionProblem, limit_bytes: int, configuration: Configuration) -> None:
        """Note what a problem takes within a limit; slabs and float32 sums serve for no other problem."""
        if configuration.float32_sum is None and not any(part.slabs for part in configuration.parts):
            kind = _OTHERWISE(problem)
            sizes = self._kinds.get(kind)
            if sizes is None:
                sizes = self._kinds[kind] = BoundedDict(_MOST_SIZES)
            sizes[problem.spatial, limit_bytes] = _Known(limit_bytes, prod(problem.spatial), configuration)

    def nearest(self, problem: ConvolutionProblem, limit_bytes: int) -> list[Configuration]:
        """Return configurations of nearby sizes within limits like this one, nearest first; a few, each of them once.

        They may need more than the limit.
        """
        points, most = prod(problem.spatial), log(MOST_APART)
        known = list(self._kinds.get(_OTHERWISE(problem), {}).values())
        apart = sorted((abs(log(each.points / points)), number) for number, each in enumerate(known))
        found: dict[object, Configuration] = {}
        for distance, number in apart:
            if distance > most or len(found) == _MOST_TRIED:
                break
            if known[number].may_serve(points, limit_bytes):
                one = known[number].configuration
                found.setdefault(tuple((part.size, part.algorithm) for part in one.parts), one)
        return list(found.values())
