"""Graphs that share their parts say what graphs with parts of their own say, and describe less."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.described_graphs import DescribingLibrary
from tests.support.problems import DENSE, make_problem, problems
from ucudnn.backends.base import ACCUMULATE, OVERWRITE
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.api.descriptor import GraphParts
from ucudnn.backends.cudnn.api.enums import DescriptorType
from ucudnn.problem import Operation

NAME = "eng7_k2=5_k3=1"


def described(asked, parts_of):
    """Return what plans of problems and scalings were given, and the library."""
    library = DescribingLibrary()
    parts = parts_of(library)
    plans = [OperationGraph(library, 5, problem, scaling, parts).plan(NAME) for problem, scaling in asked]
    return [library.contents(plan.address) for plan in plans], library


def counted(library):
    return Counter(each["kind"] for each in library.made.values() if "kind" in each)


@given(st.lists(st.tuples(problems(), st.sampled_from([OVERWRITE, ACCUMULATE])), min_size=1, max_size=4))
def test_graphs_that_share_parts_say_what_others_say(asked):
    asked = [(each, OVERWRITE if each.biased else scaling) for each, scaling in asked]
    asked += [(replace(each, operation=operation), s) for each, s in asked[:1] for operation in Operation]
    shared, library = described(asked, GraphParts)
    alone, other = described(asked, lambda _: None)
    assert shared == alone
    assert counted(library)[DescriptorType.TENSOR] < counted(other)[DescriptorType.TENSOR]


def test_kernels_of_a_layer_have_the_same_tensors_and_sizes_of_its_images_the_same_filters():
    problem = make_problem(groups=1)
    kernels = [replace(problem, operation=operation) for operation in Operation]
    _, library = described([(each, OVERWRITE) for each in kernels], GraphParts)
    found = counted(library)
    assert found[DescriptorType.TENSOR] == 3
    assert found[DescriptorType.CONVOLUTION] == 1
    assert found[DescriptorType.KNOB_CHOICE] == 2
    larger = replace(problem, spatial=tuple(each + 2 for each in problem.spatial), **DENSE)
    _, library = described([(problem, OVERWRITE), (larger, OVERWRITE)], GraphParts)
    found = counted(library)
    assert found[DescriptorType.TENSOR] == 5, "x, y, w, and another x and y"
    assert found[DescriptorType.CONVOLUTION] == 1


@pytest.mark.parametrize("name", ["alignment", "padding", "stride"])
def test_parts_that_differ_in_one_number_are_others(name):
    problem = make_problem(groups=1)
    given = {"alignment": problem.alignment // 2, "padding": (2, 3), "stride": (3, 2)}
    other = replace(problem, **{name: given[name]}, **DENSE)
    shared, _ = described([(problem, OVERWRITE), (other, OVERWRITE)], GraphParts)
    alone, _ = described([(other, OVERWRITE)], lambda _: None)
    assert shared[1] == alone[0] != shared[0]
