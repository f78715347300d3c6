"""Orders in which the operations of a step may run: the program's, depth first, memory-greedy.

An operation must follow the writers of what it reads; a writer must follow the readers and the writer of the version
before. All orders here keep to that, so each operation reads what the program lets it read.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from ucudnn.errors import InvalidValueError
from ucudnn.memory.step.graph import StepGraph


def dependencies(graph: StepGraph) -> tuple[tuple[int, ...], ...]:
    """Return for each operation those that must run before it, ascending.

    For each storage that it accesses, these are the last writer and, before a write, the readers since then; what must
    run before those follows from them.
    """
    needed: list[set[int]] = [set() for _ in graph.operations]
    writer = [-1] * len(graph.storages)  # the last one so far
    readers: list[list[int]] = [[] for _ in graph.storages]  # those since then
    for index, operation in enumerate(graph.operations):
        for storage in operation.reads:
            if writer[storage] >= 0:
                needed[index].add(writer[storage])
        for storage in operation.writes:
            if writer[storage] >= 0:
                needed[index].add(writer[storage])
            needed[index].update(readers[storage])
            writer[storage], readers[storage] = index, []
        for storage in operation.reads:
            readers[storage].append(index)
    return tuple(tuple(sorted(each)) for each in needed)


def program_order(graph: StepGraph) -> tuple[int, ...]:
    """Return the operations as the program runs them."""
    return tuple(range(len(graph.operations)))


def depth_first_order(graph: StepGraph) -> tuple[int, ...]:
    """Return the operations depth first: a branch runs to its end before the next one begins (Dymem, algorithm 1).

    An operation with several predecessors enters when the last of them has.
    """
    before = dependencies(graph)
    after = _followers(before)
    missing = [len(each) for each in before]
    order = []
    for source in range(len(before)):
        if before[source]:
            continue
        order.append(source)
        branches = [iter(after[source])]
        while branches:
            following = next(branches[-1], None)
            if following is None:
                branches.pop()
                continue
            missing[following] -= 1
            if not missing[following]:
                order.append(following)
                branches.append(iter(after[following]))
    return tuple(order)


def memory_greedy_order(graph: StepGraph) -> tuple[int, ...]:
    """Return the operations so that each next one leaves the fewest bytes, among all that could run next.

    Among equals the program's order decides. Storages count from their first write to their last access.
    """
    before = dependencies(graph)
    after = _followers(before)
    missing = [len(each) for each in before]
    accessed = [{*each.reads, *each.writes} for each in graph.operations]
    memory = _Memory(graph)
    ready: list[tuple[int, int]] = []
    growth: dict[int, int] = {}  # of the operations that could run next; the heap may hold older values, too
    order: list[int] = []

    def weigh(operation: int) -> None:
        growth[operation] = sum(map(memory.growth, accessed[operation]))
        heappush(ready, (growth[operation], operation))

    for operation, count in enumerate(missing):
        if not count:
            weigh(operation)
    while ready:
        value, operation = heappop(ready)
        if growth.get(operation) != value:
            continue
        del growth[operation]
        order.append(operation)
        for storage in accessed[operation]:
            memory.access(storage)
        for other in {each for storage in accessed[operation] for each in graph.accesses[storage]} & growth.keys():
            weigh(other)
        for following in after[operation]:
            missing[following] -= 1
            if not missing[following]:
                weigh(following)
    return tuple(order)


class _Memory:
    """Which storages exist, and how many accesses each still has."""

    def __init__(self, graph: StepGraph) -> None:
        self.sizes = graph.sizes
        self.left = [len(each) for each in graph.accesses]
        self.exists = list(graph.exists_before)
        self.stays = graph.exists_after

    def growth(self, storage: int) -> int:
        """Return by how many bytes one more access to a storage lets memory grow, in the end."""
        exists_then = self.left[storage] > 1 or self.stays[storage]
        return self.sizes[storage] * (int(exists_then) - int(self.exists[storage]))

    def access(self, storage: int) -> None:
        self.left[storage] -= 1
        self.exists[storage] = self.left[storage] > 0 or self.stays[storage]


ORDERS: dict[str, Callable[[StepGraph], tuple[int, ...]]] = {
    "program": program_order,
    "depth-first": depth_first_order,
    "memory-greedy": memory_greedy_order,
}
"""All orders by name."""


def find_order(name: str) -> Callable[[StepGraph], tuple[int, ...]]:
    """Return an order by its name.

    Raises:
        InvalidValueError: if there is none of this name; the message lists all.
    """
    if name not in ORDERS:
        raise InvalidValueError(f"order {name!r} is not known: take one of {', '.join(ORDERS)}")
    return ORDERS[name]


def _followers(before: Sequence[Sequence[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for index, each in enumerate(before):
        for needed in each:
            after[needed].append(index)
    return after
