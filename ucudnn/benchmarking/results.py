"""Measurements that this process knows, by problem and algorithm."""

from collections.abc import Iterable, Mapping
from typing import final

from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Measurement

MeasuredProblem = tuple[ConvolutionProblem, Measurement]
"""A problem at micro-batch size, and the measurement of one algorithm."""


@final
class Results:
    """Measurements by problem at micro-batch size and by the algorithm's name."""

    def __init__(self) -> None:
        self._results: dict[ConvolutionProblem, dict[str, Measurement]] = {}

    def of(self, part: ConvolutionProblem) -> Mapping[str, Measurement]:
        """Return the measurements of a problem by algorithm."""
        return self._results.get(part, {})

    def batches(self) -> list[int]:
        """Return each micro-batch size of which anything is known, of any problem, in ascending order."""
        return sorted({part.batch for part, known in self._results.items() if known})

    def parts(self) -> list[ConvolutionProblem]:
        """Return all problems with measurements."""
        return list(self._results)

    def put(self, part: ConvolutionProblem, measurement: Measurement) -> None:
        """Keep a measurement. It replaces an earlier one of the same algorithm."""
        self._results.setdefault(part, {})[measurement.algorithm.name] = measurement

    def update(self, items: Iterable[MeasuredProblem]) -> None:
        """Keep several measurements."""
        for part, measurement in items:
            self.put(part, measurement)

    def forget(self, parts: Iterable[ConvolutionProblem]) -> None:
        """Forget all measurements of some problems."""
        for part in parts:
            self._results.pop(part, None)
