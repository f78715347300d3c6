"""What an operation of a step must follow, and an order that keeps to that: depth first.

An operation must follow the writers of what it reads; a writer must follow the readers and the writer of the version
before. Then each operation reads what the program lets it read.
"""

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


def depth_first_order(graph: StepGraph) -> tuple[int, ...]:
    """Return the operations depth first: a branch runs to its end before the next one begins (Dymem, algorithm 1).

    An operation with several predecessors enters when the last of them has.
    """
    before = dependencies(graph)
    after: list[list[int]] = [[] for _ in before]
    for index, each in enumerate(before):
        for needed in each:
            after[needed].append(index)
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
