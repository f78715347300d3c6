"""Random networks with parts in other types train under autocast to the bits of the plain loop."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import examples

torch = pytest.importorskip("torch")

from tests.support.autocast_networks import AROUND, PARTS, AutocastNetwork, loss  # noqa: E402
from ucudnn.errors import BudgetError  # noqa: E402
from ucudnn.memory.planner.planner import make_plan  # noqa: E402
from ucudnn.memory.policies.catalog import POLICIES  # noqa: E402
from ucudnn.memory.simulation.simulator import simulate  # noqa: E402
from ucudnn.memory.torch.measuring.operation_costs import step_costs  # noqa: E402
from ucudnn.memory.torch.running.fit import fit_plan  # noqa: E402
from ucudnn.memory.torch.subject.step_arguments import step_subject  # noqa: E402
from ucudnn.memory.torch.tracing.traced_program import trace_program  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),  # PyTorch's mean square norm
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*CPU autocast:UserWarning"),
]


def trained(model, call, data, around):
    """Take two steps, backward and update outside of autocast; return losses, gradients, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        with around():
            value = call(*data)
        value.backward()
        gradients = [each.grad for each in model.parameters()]
        found += [value.detach().clone(), *(None if each is None else each.clone() for each in gradients)]
        optimizer.step()
    return found + [each.clone() for each in model.state_dict().values()]


def planned(program, costs, name):
    """Return a policy's plan within four fifths of what the plain step takes, or without a bound."""
    stock = simulate(make_plan(program.graph, costs, None, "stock"), costs).peak_bytes
    try:
        return make_plan(program.graph, costs, stock * 4 // 5, name)
    except BudgetError:
        return make_plan(program.graph, costs, None, name)


def check(seed, around, policies):
    """Compare a network's training by policies with the plain loop; return whether the latter runs at all."""
    torch.manual_seed(seed)
    model, data = AutocastNetwork(seed), (torch.randn(6, 4, 16), torch.randn(6, 4, 16))
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    subject = step_subject(model, data, loss, None)
    try:
        expected = trained(plain, lambda x, y: loss(plain(x), y), data, around)
    except RuntimeError:  # types do not match: the cache of autocast has a weight in the type of the region around
        return False
    with around():
        program = trace_program(subject, "autocast", 6)
    costs = step_costs(program.graph, torch.device("cpu"))
    for name in policies:
        model.load_state_dict(before)
        model.zero_grad()
        step = fit_plan(subject, program, planned(program, costs, name), costs, debug=True)
        found = trained(model, step, data, around)
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert (mine is None) == (other is None), name
            assert mine is None or torch.equal(mine.nan_to_num(7), other.nan_to_num(7)), name
    return True


def test_every_part_occurs():
    assert {name for seed in range(20) for name, _ in AutocastNetwork(seed).parts} == {*PARTS}


@given(
    st.integers(0, 10_000), st.sampled_from([*AROUND]), st.sets(st.sampled_from([*POLICIES]), min_size=2, max_size=2)
)
@examples(1 / 3)
def test_a_network_with_parts_in_other_types_trains_to_the_bits_of_the_plain_loop(seed, around, policies):
    check(seed, AROUND[around], sorted(policies))
