"""Plans of problems that differ in nothing but the size of their images, where one may serve for another.

A program whose images change their size would wait for cuDNN's heuristics at each new size, for each of its kernels.
Engines with knobs compute other sizes too, and what is fast at one size is mostly fast at one nearby.
"""

from dataclasses import fields
from math import log, prod
from operator import attrgetter
from typing import final

from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem

MOST_APART = 2.0
"""The most by which the points of two images may differ, as a multiple."""

_MOST_TRIED = 3
_MOST_SIZES = 64
_MOST_KINDS = 1 << 12
_OF_SIZE = {"spatial", *(f"{tensor}_{of}_stride" for tensor in "xy" for of in ("batch", "channel"))}
_OTHERWISE = attrgetter(*(f.name for f in fields(ConvolutionProblem) if f.compare and f.name not in _OF_SIZE))


@final
class NearbyPlans:
    """Configurations by problem and limit, all in whole micro-batches.

    A plan that was made while memory was short had a smaller limit, and serves for no size that has more.
    """

    def __init__(self) -> None:
        self._kinds: BoundedDict[object, BoundedDict[tuple[int, ...], Configuration]] = BoundedDict(_MOST_KINDS)

    def learn(self, problem: ConvolutionProblem, limit_bytes: int, configuration: Configuration) -> None:
        """Note what a problem takes within a limit; slabs and float32 sums serve for no other problem."""
        if configuration.float32_sum is None and not any(part.slabs for part in configuration.parts):
            kind = limit_bytes, _OTHERWISE(problem)
            sizes = self._kinds.get(kind)
            if sizes is None:
                sizes = self._kinds[kind] = BoundedDict(_MOST_SIZES)
            sizes[problem.spatial] = configuration

    def nearest(self, problem: ConvolutionProblem, limit_bytes: int) -> list[Configuration]:
        """Return the configurations of nearby sizes within the same limit, nearest first; a few, each of them once."""
        points, most = prod(problem.spatial), log(MOST_APART)
        sizes = list(self._kinds.get((limit_bytes, _OTHERWISE(problem)), {}).items())
        apart = sorted((abs(log(prod(spatial) / points)), number) for number, (spatial, _) in enumerate(sizes))
        found: dict[object, Configuration] = {}
        for distance, number in apart:
            if distance > most or len(found) == _MOST_TRIED:
                break
            _, one = sizes[number]
            found.setdefault(tuple((part.size, part.algorithm) for part in one.parts), one)
        return list(found.values())
