"""Tests of what is said where a step does not fit a budget."""

import pytest

from tests.support.step_graphs import StepBuilder, alternatives
from ucudnn.errors import BudgetError, InfeasibleError
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.graph import Role
from ucudnn.problem import ConvolutionProblem, Operation


def step(scratch=0, fixed=0):
    """Return a builder whose second operation sets the floor: 100 for the parameter, 2 x 10 a sample, and scratch."""
    builder = StepBuilder(default=10).storage("w", 0, Role.PARAMETER, fixed=100).storage("a", 10, fixed=fixed)
    return builder.run("stem", "w", "a").run("conv", "a w", "b", scratch=scratch, module="layer1").run("2", "b", "c")


def refused(builder, budget, batch=8):
    with pytest.raises(BudgetError) as caught:
        check_budget(builder.graph(batch=batch), builder.costs(), budget)
    return caught.value


def test_a_budget_at_the_floor_is_enough_and_no_budget_is_no_bound():
    builder = step()
    check_budget(builder.graph(batch=8), builder.costs(), 260)
    check_budget(builder.graph(batch=8), builder.costs(), None)


def test_the_floor_the_operation_that_sets_it_and_the_remedies_are_named_in_one_line():
    error = refused(step(), 259)
    assert str(error) == (
        "a budget of 259 bytes is below the floor of hand, 260 bytes, which operation 1 (conv, layer1)"
        " sets: take a mini-batch of at most 7 instead of 8, or raise the budget to the floor"
    )
    assert (error.kernel, error.limit_bytes, error.required_bytes) == ("operation 1 (conv, layer1)", 259, 260)
    assert isinstance(error, InfeasibleError)


def test_less_scratch_is_the_first_remedy_where_it_is_enough():
    text = str(refused(step(scratch=50), 270))
    assert "sets: give it at most 10 bytes of scratch, or take a mini-batch of at most 6 instead of 8" in text
    assert "scratch" not in str(refused(step(scratch=50), 259))


def test_other_operations_that_need_less_scratch_are_counted():
    builder = step(scratch=50).run("last", "c", "d", scratch=40)
    assert "10 bytes of scratch and 1 other operations less, too" in str(refused(builder, 270))


def test_a_budget_that_the_context_alone_exceeds_is_no_number_below_0():
    assert str(refused(step(), -7)).startswith(
        "a budget of which nothing is left for tensors is below the floor of hand"
    )


def test_no_mini_batch_is_named_where_none_fits():
    assert str(refused(step(), 110)).endswith("sets: raise the budget to the floor")


def test_mini_batches_at_which_the_sizes_do_not_hold_are_not_named():
    """The size of a is 10 a sample less 40, so it holds from a mini-batch of 4 on."""
    builder = step(fixed=-40)
    text = str(refused(builder, 200, batch=6))
    assert text.endswith("sets: take a mini-batch of at most 5 instead of 6, or raise the budget to the floor")
    assert str(refused(builder, 170, batch=6)).endswith("sets: raise the budget to the floor")


def test_the_floor_that_convolutions_without_workspace_would_have_is_named_where_nothing_is_known_of_them():
    problem = ConvolutionProblem(
        operation=Operation.FORWARD, batch=8, channels=1, spatial=(8, 8), filters=1, kernel=(3, 3)
    )
    builder = step().run("conv2", "c w", "d", scratch=50, problem=problem).run("last", "d", "e w", scratch=30)
    assert str(refused(builder, 259)).endswith(
        "raise the budget to the floor, which convolutions= of fit lowers to 290 bytes at best, by algorithms"
        " with less workspace"
    )
    graph, known = builder.graph(batch=8), builder.costs(configurations={3: alternatives((1.0, 40))})
    with pytest.raises(BudgetError, match=r"raise the budget to the floor$"):
        check_budget(graph, known, 259)


def test_a_policy_that_needs_more_says_so_and_names_the_way_out():
    graph = step().graph(batch=8)
    check_need("stock", graph, 2**30, 2**30)
    check_need("stock", graph, 2**30, None)
    with pytest.raises(BudgetError) as refused:
        check_need("stock", graph, 2 * 2**30, 2**30)
    error = refused.value
    assert str(error) == (
        "policy stock needs 2 GiB for hand, and the budget is 1 GiB: take another policy or a larger budget"
    )
    assert (error.limit_bytes, error.required_bytes) == (2**30, 2 * 2**30)
