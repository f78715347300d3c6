"""Policy 'checkpoint': forward keeps only what crosses from block to block, and each block runs again in backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016: a step with n saved storages has √n blocks. Within a
budget, the policy looks for the division, and the blocks of it that run again, that take the least time.
"""

from collections.abc import Sequence
from math import isqrt

from ucudnn.memory.plans.blocks import Block, ForwardBlocks
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.plans.recomputation import actions_with
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

_Blocks = tuple[Block, ...]


class CheckpointPolicy:
    """Recomputation by blocks, in the program's order."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step: √n blocks without a budget, else the cheapest that was found within it.

        Raises:
            BudgetError: if no division that was tried keeps the budget.
        """
        check_budget(graph, costs, budget)
        forward = ForwardBlocks.latest(graph, costs)
        if budget is None:
            blocks = forward.divide(isqrt(len(forward.saved)))[:-1]
        else:
            blocks = _Search(graph, forward, budget).best()
        again: dict[int, list[int]] = {}
        for block in blocks:
            again.setdefault(block.trigger, []).extend(block.operations)
        return MemoryPlan(policy="checkpoint", graph=graph, actions=actions_with(graph, again), budget=budget)


class _Search:
    """Looks for the blocks to run again that keep a budget and take the least time."""

    def __init__(self, graph: StepGraph, forward: ForwardBlocks, budget: int) -> None:
        self._graph, self._forward, self._budget = graph, forward, budget
        self._peaks: list[int] = []  # those that were seen

    def best(self) -> _Blocks:
        if self._fits(()):
            return ()
        found = []
        most = min(len(self._forward.saved), 4 * isqrt(len(self._forward.saved)))
        # The numbers of blocks that are tried are 2, 3, 4, 6, 8, 12, 16 and so on, to about four times √n.
        for count in (each for bit in range(1, most.bit_length()) for each in (1 << bit, 3 << bit - 1)):
            blocks = self._forward.divide(count)
            cheapest = sorted(blocks, key=lambda block: block.time_ms / (block.dropped_bytes or 1))
            found += [fewest for ranking in (blocks, cheapest) if (fewest := self._fewest(ranking)) is not None]
        if not found:
            check_need("checkpoint", self._graph, min(self._peaks), self._budget)
        best = min(found, key=lambda blocks: sum(block.time_ms for block in blocks))
        for block in sorted(best, key=lambda block: -block.time_ms):
            fewer = tuple(each for each in best if each is not block)
            best = fewer if self._fits(fewer) else best
        return best

    def _fewest(self, blocks: Sequence[Block]) -> _Blocks | None:
        """Return the fewest first ones of ranked blocks that keep the budget if they run again; None if none do.

        One ranking is the order of forward, because what the last blocks drop is needed again at once, at the turn from
        forward to backward. The other one takes the blocks first that cost least time for each byte.
        """
        high = next((count for count in (len(blocks) - 1, len(blocks)) if self._fits(blocks[:count])), None)
        if high is None:
            return None
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(blocks[:middle]) else (middle, high)
        return tuple(blocks[:high])

    def _fits(self, blocks: Sequence[Block]) -> bool:
        self._peaks.append(self._forward.peak_bytes(blocks))
        return self._peaks[-1] <= self._budget
