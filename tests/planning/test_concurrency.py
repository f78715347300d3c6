"""Which kernels may run at the same time: the sets agree with the rule for each pair of kernels."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.groups import groupings, networks, places_of
from tests.support.problems import make_problem
from ucudnn.errors import SettingsError
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import concurrent_sets, parse_groups
from ucudnn.problem import Operation


def positions(sets):
    return {
        index: (number, branch)
        for number, branches in enumerate(sets)
        for branch, indices in enumerate(branches)
        for index in indices
    }


def same_layer(one, other):
    return bool(one.layer) and (one.layer, one.operation) == (other.layer, other.operation)


@given(groupings(), st.data())
def test_every_kernel_is_in_one_branch_of_one_set(groups, data):
    kernels = data.draw(networks(groups))
    sets = concurrent_sets(kernels, groups)
    assert sorted(index for branches in sets for branch in branches for index in branch) == list(range(len(kernels)))
    assert all(branch for branches in sets for branch in branches)
    assert all(sets)


@given(networks(()))
def test_without_groups_only_shapes_of_one_layer_exclude_each_other(kernels):
    sets = concurrent_sets(kernels)
    assert len(sets) == bool(kernels)
    at = positions(sets)
    for one, other in product(range(len(kernels)), repeat=2):
        assert (at[one] == at[other]) == (one == other or same_layer(kernels[one], kernels[other]))


@given(groupings().filter(bool), st.data())
def test_only_branches_of_one_group_and_direction_run_at_once(groups, data):
    kernels = data.draw(networks(groups))
    at = positions(concurrent_sets(kernels, groups))
    place = places_of(groups)
    for one, other in product(range(len(kernels)), repeat=2):
        first, second = kernels[one], kernels[other]
        together, in_line = at[one][0] == at[other][0], at[one] == at[other]
        if first.layer in place and second.layer in place:
            forward = [each.operation is Operation.FORWARD for each in (first, second)]
            assert together == (place[first.layer][0] == place[second.layer][0] and forward[0] == forward[1])
            assert in_line == (together and place[first.layer] == place[second.layer])
        else:
            assert together == in_line == (one == other or same_layer(first, second))


@pytest.mark.parametrize("operation", Operation)
def test_layers_of_a_group_are_named_one_by_one(operation):
    kernel = Kernel(layer="a", problem=make_problem(operation=operation), count=3)
    with pytest.raises(SettingsError, match="'a' stands for 3 layers: name each of them"):
        concurrent_sets([kernel], parse_groups([["a", "b"]]))


@given(groupings(), st.booleans())
def test_a_branch_of_one_layer_may_be_its_name(groups, short):
    written = [
        [branch[0] if short and len(branch) == 1 else list(branch) for branch in branches] for branches in groups
    ]
    assert parse_groups(written) == groups


@pytest.mark.parametrize(
    ("given_groups", "message"),
    [
        ("conv1", "'conv1' are no groups: give a sequence of them"),
        (3, "3 are no groups: give a sequence of them"),
        ([None], "None is no group: give a sequence of branches"),
        ([[3]], "3 is no layer's name, nor a sequence of them"),
        (["conv1", "conv2"], "'conv1' is no group: give a sequence of branches"),
        ([["conv1", ["conv2", 3]]], "3 is no layer's name"),
        ([["conv1", [None]]], "None is no layer's name"),
        ([["conv1", [["conv2"]]]], r"\['conv2'\] is no layer's name"),
        ([["conv1", ""]], "'' is no layer's name"),
        ([["conv1", "conv2"], ["conv2"]], "layer 'conv2' is named twice, but it can only run in one branch, once"),
        ([["a", ["b", "a"]]], "layer 'a' is named twice, but it can only run in one branch, once"),
        ([[["a", "a"]]], "layer 'a' is named twice, but it can only run in one branch, once"),
    ],
)
def test_an_invalid_group_is_refused_with_its_value(given_groups, message):
    with pytest.raises(SettingsError, match=f"^groups: {message}$"):
        parse_groups(given_groups)
