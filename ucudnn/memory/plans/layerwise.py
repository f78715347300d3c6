"""Plans that offload and prefetch layer by layer: what vDNN, vDNNExt and Dymem have in common.

The copy of a layer's inputs to the host runs beside the layer. In backward, a search says before each turn which
layers' inputs come back beside it. Inputs that no search has found are fetched at the latest before they are read.
"""

from collections.abc import Callable, Mapping, Sequence

from ucudnn.memory.plans.actions import Action, ActionKind, offload, prefetch, run, synchronize, wait
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import StepLayers

Search = Callable[[int, Callable[[int], bool]], Sequence[int]]
"""Takes the number of the layer whose turn it is, and what says whether a layer's inputs are still away. Returns the
numbers of the layers whose inputs are to come back, in order."""


def layerwise_actions(
    graph: StepGraph, layers: StepLayers, leaving: Mapping[int, Sequence[int]], search: Search, *, synchronous: bool
) -> tuple[Action, ...]:
    """Return the actions of a step whose layers offload some of their inputs.

    Args:
        graph: the step.
        layers: its layers.
        leaving: the inputs that each layer offloads, by its number.
        search: finds what is prefetched beside a turn of backward.
        synchronous: whether compute waits for all copies at the end of each layer (vDNN), so that memory is given back
            there. Else it waits at the end of forward, and before an operation that reads what a copy brings back
            (vDNNExt, Dymem).
    """
    actions: list[Action] = []
    for number, layer in enumerate(layers.forward):
        actions += map(offload, leaving.get(number, ()))
        actions += map(run, layer.operations)
        actions += [synchronize()] if synchronous and leaving.get(number) else []
    actions += [synchronize()] if leaving and not synchronous else []
    actions += _backward(graph, layers, leaving, search, synchronous=synchronous)
    plan = with_frees(graph, actions)
    return tuple(_free_at_synchronizations(plan)) if synchronous else plan


def _backward(
    graph: StepGraph, layers: StepLayers, leaving: Mapping[int, Sequence[int]], search: Search, *, synchronous: bool
) -> list[Action]:
    away = {storage for storages in leaving.values() for storage in storages}
    arriving: set[int] = set()
    actions: list[Action] = []

    def fetch(storages: Sequence[int]) -> None:
        actions.extend(prefetch(storage) for storage in storages)
        away.difference_update(storages)
        arriving.update(storages)

    def is_away(number: int) -> bool:
        return not away.isdisjoint(leaving.get(number, ()))

    for number, operations in layers.backward:
        read = dict.fromkeys(storage for each in operations for storage in graph.operations[each].reads)
        fetch([storage for storage in read if storage in away])
        late = [storage for storage in read if storage in arriving] if synchronous else []
        actions += map(wait, late)
        arriving.difference_update(late)
        found = search(number, is_away)
        for other in found:
            fetch([storage for storage in leaving[other] if storage in away])
        for operation in operations:
            needed = [storage for storage in graph.operations[operation].reads if storage in arriving]
            actions += map(wait, needed)
            arriving.difference_update(needed)
            actions.append(run(operation))
        if synchronous and found:
            actions.append(synchronize())
            arriving.clear()
    return actions


def _free_at_synchronizations(actions: Sequence[Action]) -> list[Action]:
    """Return actions in which the frees of storages that leave come after the next synchronization."""
    found: list[Action] = []
    leaving: set[int] = set()
    held: list[Action] = []
    for action in actions:
        if action.kind is ActionKind.FREE and action.target in leaving:
            held.append(action)
            continue
        found.append(action)
        if action.kind is ActionKind.OFFLOAD:
            leaving.add(action.target)
        elif action.kind is ActionKind.SYNCHRONIZE:
            found += held
            leaving, held = set(), []
    return found
