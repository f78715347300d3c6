"""Layers: tells kernels of the same problem apart where calls do not name their layer (WD gives each a segment)."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import final

from ucudnn.errors import SettingsError
from ucudnn.problem import ConvolutionProblem, Operation

_LOG = logging.getLogger(__name__)
_MOST = 256  # layers of the same filters' shape: more are filters that move, not layers
_MOST_PLACES = 4  # where a layer's filters were last


@dataclass(slots=True)
class _Layer:
    name: str
    round: int = -1  # in which it was called last; -1 where it is registered only
    places: dict[Hashable, set[ConvolutionProblem]] = field(default_factory=dict)


@final
class LayerIdentities:
    """Names for layers that have none: '#1', '#2', ... .

    A layer is known by its filters: where they lie in memory, and their shape. Unknown filters belong to a layer that
    was registered and not called yet, or, from the second round of calls on, to one whose filters have moved: the
    first, in call order, that this round has not called. A round ends when a layer is called again, and when Forward
    comes after BackwardFilter. Layers that are taken for one share a segment, and wait for each other.
    """

    def __init__(self) -> None:
        self._families: dict[Hashable, list[_Layer]] = {}
        self._known: dict[tuple[ConvolutionProblem, Hashable], _Layer] = {}
        self._count = 0
        self._round = 0
        self._warned = False
        self._backward = False

    def register(self, problem: ConvolutionProblem, filters: Hashable = None) -> str:
        """Return the name of the layer that has these filters; without filters, of the first of its shape."""
        family = self._family(problem)
        if filters is None:
            return (family[0] if family else self._new(family)).name
        layer = self._find(filters, family) or (self._new(family) if len(family) < _MOST else family[0])
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
        """Take the filters of a layer that there is no room for as those of the first of its shape, if it has one."""
        family = self._family(problem)
        unknown = self._find(filters, family)
        if unknown is None or unknown is family[0]:
            return None
        family.remove(unknown)
        for place, problems in unknown.places.items():
            for each in problems:
                self._known.pop((each, place), None)
        self._learn(problem, filters, family[0])
        return family[0].name

    def _family(self, problem: ConvolutionProblem) -> list[_Layer]:
        key = problem.operation, problem.w_shape, problem.groups, problem.dtype, problem.layout
        return self._families.setdefault(key, [])

    @staticmethod
    def _find(filters: Hashable, family: list[_Layer]) -> _Layer | None:
        return next((layer for layer in family if filters in layer.places), None)

    def _unclaimed(self, family: list[_Layer]) -> _Layer:
        claimable = [layer for layer in family if layer.round < 0] or [
            layer for layer in family if layer.round < self._round
        ]
        if claimable:
            return claimable[0]
        if len(family) < _MOST:
            return self._new(family)
        if not self._warned:
            _LOG.warning(
                "%d layers of one shape: their filters seem to move from call to call; name layers by layer=...", _MOST
            )
            self._warned = True
        return family[0]

    def _new(self, family: list[_Layer]) -> _Layer:
        self._count += 1
        layer = _Layer(f"#{self._count}")
        family.append(layer)
        return layer

    def _learn(self, problem: ConvolutionProblem, filters: Hashable, layer: _Layer) -> None:
        layer.places.setdefault(filters, set()).add(problem)
        self._known[problem, filters] = layer
        if len(layer.places) > _MOST_PLACES:
            oldest = next(iter(layer.places))
            for each in layer.places.pop(oldest):
                del self._known[each, oldest]


def checked_name(layer: str) -> str:
    """Return a layer's name.

    Raises:
        SettingsError: if it is one of those that are made up for layers without a name.
    """
    if layer.startswith("#"):
        raise SettingsError(f"layer={layer!r}: names that begin with # are those of layers that have none")
    return layer
