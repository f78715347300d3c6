"""Tests of forward in blocks: where it is divided, what is dropped, and the peak that blocks are predicted to reach."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, chain, random_steps
from ucudnn.memory.plans.actions import recompute, run
from ucudnn.memory.plans.blocks import Block, ForwardBlocks
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role


def blocks_of(builder, count, graph=None):
    graph = graph or builder.graph()
    return ForwardBlocks(graph, builder.costs()).divide(count)


def test_a_line_is_divided_into_equal_blocks_that_keep_their_last_activation():
    builder = chain(9)
    graph = builder.graph()
    blocks = blocks_of(builder, 3)
    assert [block.operations for block in blocks] == [(0, 1), (3, 4), (6, 7, 8)]
    names = [[graph.storages[each].name for each in block.dropped] for block in blocks]
    assert names == [["a1", "a2"], ["a4", "a5"], ["a7", "a8", "a9"]]
    assert [graph.operations[block.trigger].name for block in blocks] == ["b3", "b6", "turn"]
    assert [block.time_ms for block in blocks] == [1.0 + 2.0, 4.0 + 5.0, 7.0 + 8.0 + 9.0]
    assert [[graph.storages[each].name for each in block.inputs] for block in blocks] == [[], ["a3"], ["a6"]]
    assert [block.extra_bytes for block in blocks] == [20, 20, 30]


def test_blocks_begin_where_few_bytes_cross():
    builder = StepBuilder(default=10).storage("wide", 50)
    builder.run("0", "", "a").run("1", "a", "wide").run("2", "wide", "b").run("3", "b", "c").run("4", "c", "d")
    builder.backward("5", "a wide b c d", "e")
    blocks = blocks_of(builder, 2)
    assert [block.operations for block in blocks] == [(0, 1), (3, 4)]


def test_a_skip_stays_because_it_crosses():
    builder = StepBuilder(default=10).run("0", "", "skip").run("1", "skip", "a").run("2", "a", "b")
    builder.run("3", "b", "c").run("4", "c skip", "d").backward("5", "skip a b c d", "e")
    graph = builder.graph()
    dropped = {graph.storages[each].name for block in blocks_of(builder, 2) for each in block.dropped}
    assert "skip" not in dropped
    assert len(dropped) >= 3


def test_what_cannot_be_made_again_stays_and_serves_the_rest_of_its_block():
    builder = StepBuilder(default=10).run("0", "", "a").run("drop", "a", "b", repeatable=False).run("2", "b", "c")
    builder.backward("3", "a b c", "e")
    graph = builder.graph()
    (block,) = blocks_of(builder, 1)
    assert [graph.storages[each].name for each in block.dropped] == ["a", "c"]
    assert [graph.storages[each].name for each in block.inputs] == ["b"]
    assert block.operations == (0, 2)


def test_what_backward_writes_before_it_reads_is_not_saved():
    builder = StepBuilder(default=10).run("0", "", "a b").run("1", "a b", "c")
    builder.backward("2", "c", "a").backward("3", "a b", "e")
    graph = builder.graph()
    saved = ForwardBlocks(graph, builder.costs()).saved
    assert [graph.storages[each].name for each in saved] == ["b", "c"]


def test_what_has_no_bytes_is_not_saved():
    builder = StepBuilder().storage("none", 0).run("make", "", "y none").backward("dmake", "y none", "d")
    graph = builder.graph()
    forward = ForwardBlocks(graph, builder.costs())
    assert [graph.storages[each].name for each in forward.saved] == ["y"]


def test_a_step_without_backward_has_nothing_to_drop():
    builder = StepBuilder().run("0", "", "a").run("1", "a", "b")
    assert all(block.operations == () for block in blocks_of(builder, 2))


def test_what_a_block_makes_beside_what_it_dropped_counts_while_it_runs():
    builder = StepBuilder(default=10).storage("skip", 100).storage("b", 5).run("0", "", "a skip").run("1", "a", "b")
    builder.run("2", "b skip", "c").backward("3", "a b c", "d")
    first, _ = blocks_of(builder, 2)
    assert [builder.graph().storages[each].name for each in first.dropped] == ["a"]
    assert first.extra_bytes == 10 + 100


def test_blocks_that_run_again_before_the_same_operation_add_up():
    """At the fourth layer's scratch, the second block finds what the first one has recomputed."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("0", "x", "a").run("1", "a", "b").run("2", "b", "c").run("3", "c", "d", scratch=100)
    builder.backward("4", "a b c d", "e")
    graph, costs = builder.graph(), builder.costs()
    forward = ForwardBlocks(graph, costs)
    blocks = forward.divide(2)
    assert [block.operations for block in blocks] == [(0,), (2, 3)]
    assert forward.peak_bytes(blocks) == 10 + 40 + 100
    again = [recompute(each) for block in blocks for each in block.operations]
    actions = with_frees(graph, [*(run(each) for each in range(4)), *again, run(4)])
    assert simulate(MemoryPlan(policy="blocks", graph=graph, actions=actions), costs).peak_bytes == 150


def test_an_input_stays_until_the_last_block_that_reads_it_has_run_again():
    builder = StepBuilder(default=10).storage("skip", 100).run("0", "", "skip").run("1", "skip", "a")
    builder.backward("2", "a", "b").backward("3", "a b", "c").backward("4", "a c", "d")
    forward = ForwardBlocks(builder.graph(), builder.costs())

    def reader(trigger):
        return Block(
            trigger=trigger, operations=(), time_ms=0.0, dropped=(), dropped_bytes=0, inputs=(0,), extra_bytes=0
        )

    late, early = reader(4), reader(3)
    assert forward.peak_bytes([late]) == 100 + 10 + 10 + 10  # skip, a, b and c at operation 3
    assert forward.peak_bytes([late, early]) == forward.peak_bytes([early, late]) == forward.peak_bytes([late])
    assert forward.peak_bytes([early]) == 100 + 10 + 10


@given(random_steps(), st.integers(1, 5), st.data())
def test_the_predicted_peak_is_never_below_the_simulated_one(step, count, data):
    graph, costs = step
    forward = ForwardBlocks(graph, costs)
    blocks = [block for block in forward.divide(count) if data.draw(st.booleans())]
    actions = []
    for operation in range(len(graph.operations)):
        actions += [recompute(each) for block in blocks if block.trigger == operation for each in block.operations]
        actions.append(run(operation))
    plan = MemoryPlan(policy="blocks", graph=graph, actions=with_frees(graph, actions))
    simulated = simulate(plan, costs).peak_bytes
    predicted = forward.peak_bytes(blocks)
    assert predicted >= simulated
    inputs = {storage for block in blocks for storage in block.inputs}
    assert predicted - simulated <= sum(costs.rounded(graph.sizes[each]) for each in inputs | set(_made(graph, blocks)))


def _made(graph, blocks):
    return [storage for block in blocks for each in block.operations for storage in graph.operations[each].writes]


def test_the_predicted_peak_of_a_line_is_exact():
    builder = chain(9)
    graph, costs = builder.graph(), builder.costs()
    forward = ForwardBlocks(graph, costs)
    for count in (1, 2, 3, 4, 9):
        blocks = forward.divide(count)
        actions = []
        for place in range(len(graph.operations)):
            actions += [recompute(each) for block in blocks if block.trigger == place for each in block.operations]
            actions.append(run(place))
        plan = MemoryPlan(policy="blocks", graph=graph, actions=with_frees(graph, actions))
        assert forward.peak_bytes(blocks) == simulate(plan, costs).peak_bytes


def test_the_peak_that_is_known_is_that_of_the_same_blocks():
    builder = chain(6)
    forward = ForwardBlocks(builder.graph(), builder.costs())
    blocks = [forward.divide(count) for count in (2, 3)]
    chosen = [each[: count + 1] for each in blocks for count in range(len(each))]
    peaks = [forward.peak_bytes(each) for each in chosen]
    known = forward.peak_bytes(chosen[0])
    assert [forward.peak_bytes([*each]) for each in chosen] == peaks
    again = ForwardBlocks(builder.graph(), builder.costs())
    assert [again.peak_bytes(each) for each in reversed(chosen)] == peaks[::-1]
    assert known == peaks[0]
    assert len({*peaks}) > 1
