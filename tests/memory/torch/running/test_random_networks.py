"""Random networks with random plans and policies train to the bits of the plain loop."""

import random

import pytest

torch = pytest.importorskip("torch")

from tests.support.memory_plans import random_plan_in_parts  # noqa: E402
from tests.support.plain_training import Race  # noqa: E402
from tests.support.random_networks import OPERATIONS, RandomNetwork, random_network  # noqa: E402
from ucudnn.memory.policies.catalog import POLICIES  # noqa: E402

SEEDS = (0, 1, 9, 22)


def test_every_operation_occurs():
    assert {name for seed in SEEDS for name in RandomNetwork(seed).names} == {*OPERATIONS}


@pytest.mark.filterwarnings("ignore:.*CPU autocast:UserWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_network_trains_to_the_bits_of_the_plain_loop(seed):
    dice = random.Random(seed)
    race = Race(random_network(seed), dice.choice(["sgd", "adam"]), steps=3, outside=dice.random() < 0.5)
    race.check(race.fitted(random_plan_in_parts(race.program.graph, race.costs, seed)))
    race.check(race.fitted(dice.choice([*POLICIES])))
