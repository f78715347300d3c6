"""Tests of the replay of PyTorch's allocator: lost holes, the optimizer's state between gradients, and live bytes."""

from hypothesis import given

from tests.support.block_plans import MIB, PAGE, step_of
from tests.support.memory_plans import random_plans
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.allocator.growing_range import GrowingRange
from ucudnn.memory.allocator.replay import ReplayedReturns, replay_allocator, replay_returns
from ucudnn.memory.allocator.step_replay import StepReplay, replayed_step
from ucudnn.memory.plans.actions import free, offload, recompute, run
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.simulation.simulator import fixed_bytes, simulate
from ucudnn.memory.step.costs import ScratchPieces
from ucudnn.memory.step.costs import returned as result
from ucudnn.memory.step.graph import Phase, Role


def line(*sizes):
    """Return a line of layers whose outputs have sizes in MiB, with a backward that reads the last one."""
    builder = StepBuilder().storage("x", MIB, Role.INPUT)
    before = "x"
    for number, size in enumerate(sizes):
        name = f"a{number}"
        builder.storage(name, size * MIB).run(f"f{number}", before, name)
        before = name
    return builder.storage("d", MIB).backward("b", before, "d")


def replayed(builder, plan=None, **options):
    costs = builder.costs()
    plan = plan or StockPolicy().plan(builder.graph(), costs, None)
    return replay_allocator(step_of(plan, costs), **options)


def test_a_hole_that_is_too_small_is_lost():
    found = replayed(line(30, 40, 50))
    assert found.live_bytes == 90 * MIB
    assert found.reserved_bytes == 122 * MIB  # 50 MiB do not fit where 30 were; d lies in the small range
    assert found.paged_bytes == 100 * MIB  # the page of the first 20 MiB can go back
    assert replayed(line(50, 40, 30)).reserved_bytes == 102 * MIB  # 90 MiB in pages of 20


def test_the_smallest_hole_that_is_large_enough_is_taken():
    builder = StepBuilder()
    for name, size in (("a", 40), ("b", 2), ("c", 21), ("d", 2), ("e", 20), ("f", 40)):
        builder.storage(name, size * MIB).run(f"make {name}", "", name)
    graph = builder.backward("b", "a b c d e f", "").graph()
    actions = [run(number) for number in range(4)]
    # with holes of 40 and 21 MiB, 20 MiB go into the latter, and 40 MiB into the former
    plain = MemoryPlan(policy="hand", graph=graph, actions=(*actions, run(4), run(5), run(6), *map(free, range(6))))
    assert replayed(builder, plain).reserved_bytes == 140 * MIB  # 125 MiB


def test_what_is_returned_lies_behind_scratch_that_was_allocated_before_it():
    # a leaves a hole of 40 MiB, in which the last operation's 30 MiB lie, unless a piece of scratch takes it before
    builder = StepBuilder()
    for name, size in (("a", 40), ("b", 60), ("c", 2)):
        builder.storage(name, size * MIB).run(f"make {name}", "", name)
    graph = builder.storage("d", 30 * MIB).backward("last", "b c", "d", scratch=70 * MIB).graph()
    plan = MemoryPlan(
        policy="hand", graph=graph, actions=(run(0), run(1), run(2), free(0), run(3), *map(free, (1, 2, 3)))
    )

    def places(**given):
        costs = builder.costs(**given)
        space = Lines()
        StepReplay(graph, space, state_exists=True).step(replayed_step(plan, costs, {}).events)
        return space.taken[-3:]

    assert places()[-2:] == [(0, 30 * MIB), (102 * MIB, 70 * MIB)]
    pieces = {3: ScratchPieces((35 * MIB, result(0), 35 * MIB))}
    assert places(scratch_pieces=pieces) == [(0, 35 * MIB), (102 * MIB, 30 * MIB), (132 * MIB, 35 * MIB)]


def test_what_is_returned_lies_in_the_order_of_allocation_again_where_it_is_recomputed():
    builder = StepBuilder()
    for name, size in (("x", 8), ("a", 30), ("b", 40), ("c", 10), ("empty", 0)):
        builder.storage(name, size * MIB)
    graph = builder.run("x", "", "x").run("all", "x", "empty a b c").backward("last", "a b c", "").graph()
    every = [graph.storages.index(each) for each in graph.storages if each.name in "abc"]
    again = (run(0), run(1), free(every[1]), recompute(1), run(2), *map(free, every))
    plan = MemoryPlan(policy="hand", graph=graph, actions=again)

    def sizes(**given):
        space = Lines()
        StepReplay(graph, space, state_exists=True).step(replayed_step(plan, builder.costs(**given), {}).events)
        return [size // MIB for _, size in space.taken[1:]]

    assert sizes() == [30, 40, 10] * 2
    pieces = {1: ScratchPieces((result(2), 5 * MIB, result(0), result(1)), (5 * MIB,))}
    assert sizes(scratch_pieces=pieces) == [10, 5, 30, 40] * 2
    pieces = {1: ScratchPieces((result(1),))}
    assert sizes(scratch_pieces=pieces) == [30, 10, 40] * 2, "what no order names comes first"


class Lines:
    """A range that grows, and remembers what was taken."""

    def __init__(self):
        self._range, self.taken = GrowingRange(MIB), []

    def take(self, size):
        address = self._range.find(size)
        if address is None:
            address = self._range.grow(size)
        self._range.take(address, size)
        self.taken.append((address, size))
        return address, size

    def give_back(self, piece):
        self._range.give_back(*piece)


def updated():
    """Return a step whose optimizer has a state of 20 MiB."""
    builder = StepBuilder()
    builder.storage("w", 30 * MIB, Role.PARAMETER).storage("m", 20 * MIB, Role.OPTIMIZER_STATE)
    builder.storage("a", 40 * MIB).run("f", "w", "a")
    builder.storage("g", 30 * MIB, Role.GRADIENT).backward("b", "a", "g")
    return builder.run("update", "g m w", "m w", phase=Phase.OPTIMIZER)


def test_the_state_that_the_first_update_makes_stays_between_activations():
    builder = updated()
    assert replayed(builder, state_exists=True).reserved_bytes == 80 * MIB  # 40 of a and 30 of g
    # the state lies where a was, so a comes behind it in the second step
    found = replayed(builder)
    assert found.live_bytes == 90 * MIB
    assert found.reserved_bytes == 100 * MIB


def test_bytes_that_an_offload_still_reads_are_free_when_it_has_ended():
    builder = line(30, 40, 30)
    graph = builder.graph()
    away = (run(0), offload(1), run(1), free(1), run(2), free(2), run(3), free(3), free(4))
    plan = MemoryPlan(policy="hand", graph=graph, actions=away)
    slow = builder.costs(offload_bytes_per_ms=15.0 * MIB)  # the copy of 30 MiB ends behind the third layer
    fast = builder.costs(offload_bytes_per_ms=60.0 * MIB)
    live = [replay_allocator(step_of(plan, each)).live_bytes for each in (slow, fast)]
    assert live == [100 * MIB, 70 * MIB]


def returned(builder, most, **options):
    costs = builder.costs()
    plan = StockPolicy().plan(builder.graph(), costs, None)
    return replay_returns(step_of(plan, costs), most * MIB, **options)


def test_empty_pages_go_back_in_each_step_where_a_tensor_finds_no_room():
    step = line(30, 40, 50)  # takes 122 MiB; without the page of the first 20 of 30 MiB, 102
    assert returned(step, 162) == ReplayedReturns(fits=True, times=0, returned_bytes=0)
    # when 50 MiB are asked for, 102 are there; two pages in which 30 MiB were, and that of d, hold nothing
    assert returned(step, 110) == ReplayedReturns(fits=True, times=1, returned_bytes=42 * MIB)
    assert not returned(step, 109).fits


def test_the_whole_tensor_counts_though_the_range_grows_by_less():
    step = line(50, 45)
    assert replayed(step).reserved_bytes == 102 * MIB
    assert returned(step, 105) == ReplayedReturns(fits=True, times=0, returned_bytes=0)  # 60 are there, and 45 asked
    assert not returned(step, 104).fits
    assert returned(line(20, 5), 42).times == 0
    assert not returned(line(20, 5), 39).fits  # 5 MiB count as a page


def test_the_first_update_counts():
    assert returned(updated(), 80, state_exists=True).times == 0
    assert returned(updated(), 80).fits is False  # the state and both of them


@given(step=random_plans())
def test_with_room_for_all_nothing_goes_back_and_without_it_no_tensor_is_lost(step):
    plan, costs = step
    replayed = step_of(plan, costs)
    found = replay_allocator(replayed)
    wide = found.reserved_bytes + max(plan.graph.sizes, default=0) + max(costs.scratch_bytes, default=0) + PAGE
    assert replay_returns(replayed, wide).times == 0
    assert replay_returns(replayed, found.paged_bytes - 1).fits is (found.paged_bytes == 0)


@given(step=random_plans())
def test_live_bytes_are_those_of_the_simulation(step):
    plan, costs = step
    simulation = simulate(plan, costs)
    found = replay_allocator(step_of(plan, costs), state_exists=True)
    assert found.live_bytes + fixed_bytes(plan, costs) == simulation.peak_bytes
    assert found.reserved_bytes >= found.paged_bytes >= found.live_bytes
