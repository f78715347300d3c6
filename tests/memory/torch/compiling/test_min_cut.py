import random
from itertools import chain, combinations

import pytest

from ucudnn.memory.torch.compiling.min_cut import FlowNetwork


def crossing(edges, side):
    """Return the capacity of the edges that lead to one side."""
    return sum(capacity for begin, end, capacity in edges if begin not in side and end in side)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_least_of_all_and_the_nearest_to_the_sink(seed):
    dice = random.Random(seed)
    nodes = [*range(dice.randint(2, 7))]
    edges = [(dice.choice([*nodes, "s"]), dice.choice([*nodes, "t"]), dice.randint(0, 4)) for _ in range(20)]
    edges += [("s", 0, 9), (nodes[-1], "t", 9)]
    network = FlowNetwork()
    for each in edges:
        network.add(*each)
    found = network.sink_side("s", "t")
    every = [{"t", *some} for some in chain(*(combinations(nodes, count) for count in range(len(nodes) + 1)))]
    least = min(crossing(edges, side) for side in every)
    assert crossing(edges, found) == least
    assert "s" not in found
    nearest = set.intersection(*(side for side in every if crossing(edges, side) == least))
    assert found == nearest
