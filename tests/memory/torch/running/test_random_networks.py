"""Random networks with random plans and policies, under autocast, too, train to the bits of the plain loop."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.autocast_networks import AROUND, PARTS, AutocastNetwork, loss
from tests.support.memory_plans import random_plan_in_parts
from tests.support.plain_training import Race, race_or_none
from tests.support.random_networks import OPERATIONS, RandomNetwork, random_network
from tests.support.strategies import examples
from ucudnn.errors import BudgetError
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.simulation.simulator import simulate

pytestmark = [
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),  # PyTorch's mean square norm
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*CPU autocast:UserWarning"),
]
SEEDS = (0, 1, 9, 22)


def test_every_operation_and_every_part_occurs():
    assert {name for seed in SEEDS for name in RandomNetwork(seed).names} == {*OPERATIONS}
    assert {name for seed in range(20) for name, _ in AutocastNetwork(seed).parts} == {*PARTS}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_network_trains_to_the_bits_of_the_plain_loop(seed):
    dice = random.Random(seed)
    race = Race(random_network(seed), dice.choice(["sgd", "adam"]), steps=3, outside=dice.random() < 0.5)
    race.check(race.fitted(random_plan_in_parts(race.program.graph, race.costs, seed)))
    race.check(race.fitted(dice.choice([*POLICIES])))


@given(
    st.integers(0, 10_000), st.sampled_from([*AROUND]), st.sets(st.sampled_from([*POLICIES]), min_size=2, max_size=2)
)
@examples(1 / 3)
def test_a_network_with_parts_in_other_types_trains_to_the_bits_of_the_plain_loop(seed, around, policies):
    torch.manual_seed(seed)
    subject = AutocastNetwork(seed), (torch.randn(6, 4, 16), torch.randn(6, 4, 16)), loss
    race = race_or_none(subject, steps=2, around=AROUND[around])
    if race is None:  # types do not match: the cache of autocast has a weight in the type of the region around
        return
    budget = simulate(race.plan("stock"), race.costs).peak_bytes * 4 // 5
    for policy in sorted(policies):
        try:
            step = race.fitted(policy, budget)
        except BudgetError:
            step = race.fitted(policy)
        race.check(step)
