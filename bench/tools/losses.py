"""Distances between the losses of two trainings."""

from collections.abc import Sequence
from math import fsum, inf, isnan, sqrt


def distance(one: float, other: float) -> float:
    """Return the absolute difference of two losses; infinity if one is no number."""
    return inf if isnan(one) or isnan(other) else abs(one - other)


def root_mean_square(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the root mean square of the differences of two equally long lists of losses."""
    return sqrt(fsum(distance(a, b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))
