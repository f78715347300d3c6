"""What every pool promises: pieces that are alive together share no byte, and all lie within the pool."""

from itertools import combinations

import pytest
from hypothesis import given

from tests.support.lifetimes import lives, random_lifetimes, unavoidable_gaps
from tests.support.memory_plans import random_plans
from tests.support.strategies import examples
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import Placement, in_order, live_bytes
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.pools.two_ended import Mobility, TwoEndedPool, mobility_in
from ucudnn.memory.simulation.simulator import simulate

KINDS = list(Mobility)
POOLS = {
    "best fit": BestFitPool(),
    "two-ended": TwoEndedPool(lambda life: KINDS[life.storage % 3]),
    "planned": PlannedPool(),
}


def assert_sound(placement, lifetimes):
    assert placement.lifetimes == tuple(lifetimes)
    assert len(placement.addresses) == len(lifetimes)
    pieces = list(zip(placement.addresses, lifetimes, strict=True))
    for (address, life), (other_address, other) in combinations(pieces, 2):
        together = life.begin < other.end and other.begin < life.end
        share = address < other_address + other.size and other_address < address + life.size
        assert not (together and share)
    assert all(address >= 0 and address + life.size <= placement.extent_bytes for address, life in pieces)
    assert placement.live_bytes <= placement.extent_bytes <= sum(life.size for life in lifetimes)


@pytest.mark.parametrize("name", sorted(POOLS))
@given(lifetimes=random_lifetimes())
def test_random_pieces_never_overlap(name, lifetimes):
    assert_sound(POOLS[name].place(lifetimes), lifetimes)


@examples(1 / 2)  # each is placed by three pools
@given(random_plans())
def test_the_pieces_of_random_plans_never_overlap(drawn):
    plan, costs = drawn
    lifetimes = simulate(plan, costs).lifetimes
    for pool in (BestFitPool(), TwoEndedPool(mobility_in(plan)), PlannedPool()):
        assert_sound(pool.place(lifetimes), lifetimes)


@pytest.mark.parametrize("name", sorted(POOLS))
def test_the_sequence_with_unavoidable_gaps_is_placed_soundly(name):
    lifetimes = unavoidable_gaps()
    placement = POOLS[name].place(lifetimes)
    assert_sound(placement, lifetimes)
    assert placement.live_bytes == 144 < placement.extent_bytes


@pytest.mark.parametrize("name", sorted(POOLS))
def test_nothing_needs_no_pool(name):
    placement = POOLS[name].place([])
    assert (placement.addresses, placement.extent_bytes, placement.waste) == ((), 0, 0.0)


@given(random_lifetimes())
def test_live_bytes_are_counted_at_every_event(lifetimes):
    at = [sum(life.size for life in lifetimes if life.begin <= event < life.end) for event in range(30)]
    assert live_bytes(lifetimes) == max(at)


@given(random_lifetimes())
def test_a_pool_gets_back_first_what_ends_when_other_pieces_begin(lifetimes):
    alive, seen = set(), []
    for ended, begun in in_order(lifetimes):
        alive -= {*ended}
        alive |= {*begun}
        seen += begun
        event = lifetimes[begun[0]].begin if begun else lifetimes[ended[0]].end
        assert alive == {index for index, life in enumerate(lifetimes) if life.begin <= event < life.end}
    assert sorted(seen) == list(range(len(lifetimes)))


def test_waste_is_what_the_pool_has_beyond_the_bytes_that_are_alive():
    lifetimes = lives((10, 0, 2), (5, 1, 3), (7, 2, 4))
    assert Placement(lifetimes=tuple(lifetimes), addresses=(5, 0, 5), extent_bytes=18).waste == 18 / 15 - 1
