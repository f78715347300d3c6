"""The least capacity that separates a source from a sink, by Dinic's algorithm."""

from collections import deque
from collections.abc import Hashable
from typing import final


@final
class FlowNetwork:
    """A network of directed edges with whole capacities."""

    def __init__(self) -> None:
        self._ends: list[int] = []  # of each edge; its reverse is its neighbour, with the lowest bit flipped
        self._left: list[int] = []
        self._edges: list[list[int]] = []
        self._numbers: dict[Hashable, int] = {}

    def add(self, begin: Hashable, end: Hashable, capacity: int) -> None:
        """Add an edge."""
        for own, other, left in ((begin, end, capacity), (end, begin, 0)):
            self._edges[self._number(own)].append(len(self._ends))
            self._ends.append(self._number(other))
            self._left.append(left)

    def sink_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the nodes on the sink's side of the least cut; of several such cuts that nearest to the sink."""
        begin, end = self._number(source), self._number(sink)
        while (depths := self._depths(begin))[end] >= 0:
            positions = [0] * len(self._edges)
            while self._push(begin, end, depths, positions):
                pass
        reached, todo = {end}, [end]
        while todo:
            for edge in self._edges[todo.pop()]:
                if self._left[edge ^ 1] and self._ends[edge] not in reached:
                    reached.add(self._ends[edge])
                    todo.append(self._ends[edge])
        return {node for node, number in self._numbers.items() if number in reached}

    def _number(self, node: Hashable) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._edges)
            self._edges.append([])
        return self._numbers[node]

    def _depths(self, begin: int) -> list[int]:
        """Return how many edges with something left each node is away; -1 for nodes that nothing reaches."""
        depths = [-1] * len(self._edges)
        depths[begin] = 0
        todo = deque([begin])
        while todo:
            node = todo.popleft()
            for edge in self._edges[node]:
                if self._left[edge] and depths[self._ends[edge]] < 0:
                    depths[self._ends[edge]] = depths[node] + 1
                    todo.append(self._ends[edge])
        return depths

    def _push(self, begin: int, end: int, depths: list[int], positions: list[int]) -> bool:
        """Push flow along one of the shortest paths; return whether there was one."""
        path: list[int] = []
        node = begin
        while node != end:
            edges = self._edges[node]
            while positions[node] < len(edges):
                edge = edges[positions[node]]
                if self._left[edge] and depths[self._ends[edge]] == depths[node] + 1:
                    break
                positions[node] += 1
            else:
                if not path:
                    return False
                node = self._ends[path.pop() ^ 1]
                positions[node] += 1
                continue
            path.append(edge)
            node = self._ends[edge]
        most = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= most
            self._left[edge ^ 1] += most
        return True
