"""Which layer a call belongs to, if the call does not name it: WD gives each layer a segment of its own."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import final

from ucudnn.errors import SettingsError
from ucudnn.problem import ConvolutionProblem, Operation

_LOG = logging.getLogger(__name__)
_MOST_LAYERS = 256  # with filters of one shape: if there are more, filters move from call to call
_MOST_FILTERS = 4  # that are remembered of one layer


@dataclass(slots=True)
class _Layer:
    name: str
    round: int = -1  # the round of its last call; -1 if it is registered but was never called
    filters: dict[Hashable, set[ConvolutionProblem]] = field(default_factory=dict)  # and what was computed with them


@final
class LayerIdentities:
    """Makes up the names '#1', '#2', ... for layers that have none.

    A layer is known by its filters: by their place in memory, and their shape. Calls come in rounds: a new round
    begins when a layer is called again, and when Forward comes after BackwardFilter. Filters that are not known yet are
    assigned to the first layer of their shape that was registered but never called. If all were called, the filters
    have moved: they are assigned to the first layer, in the order of calls, that this round has not called yet. Two
    layers that are taken for one share a segment, and wait for each other.
    """

    def __init__(self) -> None:
        self._families: dict[Hashable, list[_Layer]] = {}
        self._known: dict[tuple[ConvolutionProblem, Hashable], _Layer] = {}
        self._count = 0
        self._round = 0
        self._warned = False
        self._backward = False

    def register(self, problem: ConvolutionProblem, filters: Hashable = None) -> str:
        """Return the name of the layer with these filters, or without filters that of the first layer of the shape."""
        family = self._family(problem)
        if filters is None:
            return (family[0] if family else self._new(family)).name
        layer = self._find(filters, family) or (self._new(family) if len(family) < _MOST_LAYERS else family[0])
        self._learn(problem, filters, layer)
        return layer.name

    def call(self, problem: ConvolutionProblem, filters: Hashable) -> str:
        """Return the name of the layer that is called now."""
        if problem.operation is Operation.BACKWARD_FILTER:
            self._backward = True
        elif problem.operation is Operation.FORWARD and self._backward:
            self._round, self._backward = self._round + 1, False
        layer = self._known.get((problem, filters))
        if layer is None:
            family = self._family(problem)
            layer = self._find(filters, family) or self._unclaimed(family)
            self._learn(problem, filters, layer)
        if layer.round == self._round:
            self._round += 1
        layer.round = self._round
        return layer.name

    def share(self, problem: ConvolutionProblem, filters: Hashable) -> str | None:
        """Merge a layer without a segment into the first of its shape, and return its name; None if it cannot be."""
        family = self._family(problem)
        unknown = self._find(filters, family)
        if unknown is None or unknown is family[0]:
            return None
        family.remove(unknown)
        for known, problems in unknown.filters.items():
            for each in problems:
                self._known.pop((each, known), None)
        self._learn(problem, filters, family[0])
        return family[0].name

    def _family(self, problem: ConvolutionProblem) -> list[_Layer]:
        key = problem.operation, problem.w_shape, problem.groups, problem.dtype, problem.layout
        return self._families.setdefault(key, [])

    @staticmethod
    def _find(filters: Hashable, family: list[_Layer]) -> _Layer | None:
        return next((layer for layer in family if filters in layer.filters), None)

    def _unclaimed(self, family: list[_Layer]) -> _Layer:
        claimable = [layer for layer in family if layer.round < 0] or [
            layer for layer in family if layer.round < self._round
        ]
        if claimable:
            return claimable[0]
        if len(family) < _MOST_LAYERS:
            return self._new(family)
        if not self._warned:
            _LOG.warning(
                "%d layers of one shape: their filters seem to move from call to call; name layers by layer=...",
                _MOST_LAYERS,
            )
            self._warned = True
        return family[0]

    def _new(self, family: list[_Layer]) -> _Layer:
        self._count += 1
        layer = _Layer(f"#{self._count}")
        family.append(layer)
        return layer

    def _learn(self, problem: ConvolutionProblem, filters: Hashable, layer: _Layer) -> None:
        layer.filters.setdefault(filters, set()).add(problem)
        self._known[problem, filters] = layer
        if len(layer.filters) > _MOST_FILTERS:
            oldest = next(iter(layer.filters))
            for each in layer.filters.pop(oldest):
                del self._known[each, oldest]


def is_made_up(layer: str) -> bool:
    """Return whether the name of a layer was made up because the layer has none."""
    return layer.startswith("#")


def checked_name(layer: str) -> str:
    """Return the name of a layer; SettingsError if it is like those that are made up."""
    if is_made_up(layer):
        raise SettingsError(f"layer={layer!r}: names that begin with # are those of layers that have none")
    return layer
