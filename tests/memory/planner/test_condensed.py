"""Tests of condensed steps: plans for them are plans for the step, with the same times and bytes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import BudgetError
from ucudnn.memory.planner.condensed import _CondensedStep, planned
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import measure_liveness


@st.composite
def updates(draw):
    """Return a step of some layers whose optimizer has operations that overlap in some way."""
    builder = StepBuilder().storage("x", 8, Role.INPUT)
    layers = draw(st.integers(1, 4))
    for layer in range(layers):
        size = draw(st.integers(1, 9))
        builder.storage(f"w{layer}", size, Role.PARAMETER).storage(f"m{layer}", size, Role.OPTIMIZER_STATE)
        builder.storage(f"a{layer}", draw(st.integers(1, 30))).storage(f"g{layer}", size, Role.GRADIENT)
        builder.run(f"f{layer}", f"w{layer} {f'a{layer - 1}' if layer else 'x'}", f"a{layer}")
    for layer in reversed(range(layers)):
        builder.storage(f"d{layer}", draw(st.integers(1, 30)))
        builder.backward(
            f"b{layer}", f"a{layer} w{layer} {'' if layer == layers - 1 else f'd{layer + 1}'}", f"d{layer}"
        )
        builder.backward(f"c{layer}", f"d{layer}", f"g{layer}")
    for layer in range(layers):
        if draw(st.booleans()):  # what backward left goes in the update
            builder.storage(f"t{layer}", draw(st.integers(1, 20)))
            builder.run(f"t{layer}", f"g{layer} d0", f"t{layer}", phase=Phase.OPTIMIZER)
            builder.run(f"m{layer}", f"m{layer} t{layer}", f"m{layer}", phase=Phase.OPTIMIZER)
        scratch = draw(st.integers(0, 9))
        builder.run(f"u{layer}", f"g{layer} m{layer} w{layer}", f"w{layer}", phase=Phase.OPTIMIZER, scratch=scratch)
    return builder


@given(builder=updates(), share=st.floats(0, 1))
def test_a_plan_for_the_condensed_step_is_one_for_the_step(builder, share):
    graph, costs = builder.graph(), builder.costs()
    assume(len(graph.operations) - graph.optimizer_begins > 1)
    step, whole = _CondensedStep(graph, costs), measure_liveness(graph, costs)
    condensed = measure_liveness(step.graph, step.costs)
    assert len(step.graph.operations) <= len(graph.operations)
    assert (condensed.peak_bytes, condensed.floor_bytes) == (whole.peak_bytes, whole.floor_bytes)
    budget = int(whole.floor_bytes + share * (whole.peak_bytes - whole.floor_bytes))
    for name in ("spill", "joint", "checkpoint", "checkpoint-selective", "swap-capped", "swap-hidden"):
        policy = find_policy(name)
        try:
            found = planned(policy, graph, costs, budget)
        except BudgetError as error:
            with pytest.raises(BudgetError, match=str(error.required_bytes)):
                policy.plan(graph, costs, budget)
            continue
        assert found.graph is graph
        assert simulate(found, costs).peak_bytes <= budget
        taken_ms, own_ms = (simulate(each, costs).time_ms for each in (found, policy.plan(graph, costs, budget)))
        # What 'joint' finds depends on how many operations there are beside copies, of which the optimizer has fewer.
        assert taken_ms == pytest.approx(own_ms) or (name == "joint" and taken_ms < own_ms)
