"""The first configurations of a graph: what heuristic mode A offers, without a question to the other modes."""

from dataclasses import replace

import pytest

from tests.support.described_graphs import DescribingLibrary
from tests.support.problems import make_problem
from ucudnn.backends.base import OVERWRITE
from ucudnn.backends.cudnn.algorithms import operation_graph
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.api.enums import Attribute, HeuristicMode

OFFERS = {HeuristicMode.A: (5, 3, 3, 8), HeuristicMode.B: (9, 5), HeuristicMode.FALLBACK: (0,)}
PROBLEM = make_problem(groups=1)


def graph_of(library, problem=PROBLEM):
    return OperationGraph(library, 5, problem, OVERWRITE)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_leading_configurations_are_the_first_of_all(most):
    library = DescribingLibrary(OFFERS)
    graph = graph_of(library)
    leading = graph.leading(most)
    assert [each.name for each in leading] == [f"eng7_k2={value}" for value in (5, 3, 8)][:most]
    assert graph.leading(1) == leading[:1]
    assert library.asked == [HeuristicMode.A], "once"
    listed = graph_of(library).algorithms()
    assert [each.name for each in listed] == [f"eng7_k2={value}" for value in (5, 3, 8, 9, 0)]
    assert leading == listed[:most]
    assert library.asked == [HeuristicMode.A, *HeuristicMode]


def test_configurations_that_do_not_compute_the_problem_do_not_lead(monkeypatch):
    monkeypatch.setattr(operation_graph, "computes_wrong", lambda name, _: name == "eng7_k2=5")
    for problem, most in ((PROBLEM, 2), (replace(PROBLEM, deterministic=True), 9)):
        leading = graph_of(DescribingLibrary(OFFERS), problem).leading(most)
        assert [each.name for each in leading] == ["eng7_k2=3", "eng7_k2=8"]


def test_a_plan_is_built_from_what_is_offered():
    library = DescribingLibrary(OFFERS)
    graph = graph_of(library)
    first = graph.leading(2)[0].name
    made = len(library.made)
    assert graph.named(first).workspace_bytes == 512
    plan = graph.plan(first)
    assert len(library.made) == made + 1, "nothing but the plan is described"
    (configuration,) = library.of(plan.address, Attribute.EXECUTION_PLAN_ENGINE_CONFIG)
    (knob,) = (library.made[each] for each in configuration[Attribute.ENGINECFG_KNOB_CHOICES])
    assert knob[Attribute.KNOB_CHOICE_KNOB_VALUE] == [5]


def test_what_is_offered_serves_one_plan_however_often_the_first_configurations_are_asked_for():
    library = DescribingLibrary(OFFERS)
    graph = graph_of(library)
    plans = []
    for most in (1, 2, 3):
        plans.append(graph.plan(graph.leading(most)[0].name))
    used = [library.made[plan.address][Attribute.EXECUTION_PLAN_ENGINE_CONFIG][0] for plan in plans]
    assert len(set(used)) == 3, "cuDNN builds no second plan from a descriptor whose engine is compiled"
    assert library.asked == [HeuristicMode.A]


def test_modes_that_offer_nothing_lead_with_nothing():
    assert graph_of(DescribingLibrary()).leading(2) == []
