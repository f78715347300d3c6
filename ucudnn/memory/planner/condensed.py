"""Condensed steps: the optimizer's operations as few, because no plan decides anything about them.

PyTorch's optimizer runs by itself. With AdamW, three of five operations of a transformer's step are its own. A plan for
the condensed step, in which each run of them is one operation, is a plan for the step itself. What such a run makes and
reads only itself is scratch of that one operation, so that the bytes of the step stay the same.
"""

from collections.abc import Iterable
from dataclasses import replace

from ucudnn.memory.plans.actions import Action, ActionKind, run
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan, drafts
from ucudnn.memory.policies.catalog import MemoryPolicy
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy
from ucudnn.memory.policies.swaps.hidden import HiddenSwapPolicy
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.policies.swaps.swap import SwapPolicy
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase, StepGraph, StepOperation
from ucudnn.memory.step.liveness import measure_liveness

_CONDENSING = (CheckpointPolicy, SelectivePolicy, JointPolicy, SpillPolicy, SwapPolicy, HiddenSwapPolicy)
"""Policies that keep the program's order."""
_LATEST = "_latest_condensed"  # of a step, beside its fields


def planned(policy: MemoryPolicy, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
    """Return the plan of a policy; raises as the policy does."""
    if not isinstance(policy, _CONDENSING) or len(graph.operations) - graph.optimizer_begins < 2:
        return policy.plan(graph, costs, budget)
    known: tuple[Costs, _CondensedStep] | None = vars(graph).get(_LATEST)
    if known is None or known[0] is not costs:
        known = vars(graph)[_LATEST] = costs, _CondensedStep(graph, costs)
    step = known[1]
    with drafts():
        plan = policy.plan(step.graph, step.costs, budget)
    return replace(plan, graph=graph, actions=step.expanded(plan.actions))


class _CondensedStep:
    """A step whose optimizer has few operations.

    Attributes:
        graph: the condensed step; storages have the same numbers.
    """

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self._begins = begins = graph.optimizer_begins
        groups = _groups(graph)
        passing = [_passing(graph, group) for group in groups]
        joined = [_joined(graph, group, own) for group, own in zip(groups, passing, strict=True)]
        self.graph = replace(graph, operations=(*graph.operations[:begins], *joined))

        def sums(values: tuple[float, ...]) -> tuple[float, ...]:
            return (*values[:begins], *(sum(values[group.start : group.stop]) for group in groups))

        bare = replace(
            costs,
            time_ms=sums(costs.time_ms),
            scratch_bytes=(*costs.scratch_bytes[:begins], *(0 for _ in groups)),
            issue_ms=sums(costs.issue_ms) if costs.issue_ms else (),
            configurations={each: front for each, front in costs.configurations.items() if each < begins},
            scratch_pieces={each: pieces for each, pieces in costs.scratch_pieces.items() if each < begins},
        )
        before, after = measure_liveness(graph, costs), measure_liveness(self.graph, bare).live_bytes
        most = [max(before.live_bytes[each] + before.scratch_bytes[each] for each in group) for group in groups]
        scratch = (running - live for running, live in zip(most, after[begins:], strict=True))
        self.costs = replace(bare, scratch_bytes=(*costs.scratch_bytes[:begins], *scratch))
        tails = (with_frees(graph, [*map(run, group)]) for group in groups)
        self._tails = [
            [each for each in tail if each.kind is ActionKind.RUN or each.target in own]
            for tail, own in zip(tails, passing, strict=True)
        ]

    def expanded(self, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Return the actions of a plan for the condensed step as those of the step itself."""
        found: list[Action] = []
        for action in actions:
            if action.kind is ActionKind.RUN and action.target >= self._begins:
                found += self._tails[action.target - self._begins]
            else:
                found.append(action)
        return tuple(found)


def _groups(graph: StepGraph) -> list[range]:
    """Return runs of the optimizer's operations, each of which ends where a storage goes that was there before it."""
    dying: list[list[int]] = [[] for _ in graph.operations]
    for storage, accesses in enumerate(graph.accesses):
        if accesses and not graph.exists_after[storage]:
            dying[accesses[-1]].append(accesses[0])
    groups, begin = [], graph.optimizer_begins
    for operation in range(begin, len(graph.operations)):
        if operation == len(graph.operations) - 1 or any(first < begin for first in dying[operation]):
            groups.append(range(begin, operation + 1))
            begin = operation + 1
    return groups


def _passing(graph: StepGraph, group: range) -> set[int]:
    """Return the storages that only a run of operations knows."""
    written = {storage for operation in group for storage in graph.operations[operation].writes}
    return {
        each
        for each in written
        if not (graph.exists_before[each] or graph.exists_after[each])
        and graph.accesses[each][0] in group
        and graph.accesses[each][-1] in group
    }


def _joined(graph: StepGraph, group: range, passing: set[int]) -> StepOperation:
    reads, writes = set[int](), set[int]()
    for operation in group:
        reads.update({*graph.operations[operation].reads} - writes)
        writes.update(graph.operations[operation].writes)
    return StepOperation(
        name=" to ".join(graph.operations[each].name for each in (group[0], group[-1])),
        kind="optimizer",
        phase=Phase.OPTIMIZER,
        reads=tuple(sorted(reads - passing)),
        writes=tuple(sorted(writes - passing)),
        repeatable=False,
    )
