"""The known faults of cuDNN are avoided, and nothing else is left out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import divisible
from ucudnn.backends.cudnn.algorithms.operation_graph import allowed, computes_wrong, ends_process
from ucudnn.backends.cudnn.api.enums import HeuristicMode
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm

SEEN = [  # spatial sizes, kernel, padding before and after, and whether the process ended: an H200 with cuDNN 9.19
    ((3, 27), (5, 5), (0, 2), (2, 2), True),
    ((3, 3), (5, 5), (0, 2), (2, 2), True),
    ((4, 27), (5, 5), (0, 2), (2, 2), True),
    ((2, 27), (3, 3), (0, 1), (1, 1), True),
    ((5, 27), (5, 5), (0, 2), (2, 2), False),
    ((3, 27), (5, 5), (2, 2), (0, 2), False),
    ((2, 27), (5, 5), (2, 2), (1, 2), False),
    ((3, 27), (5, 5), (1, 2), (1, 2), False),
    ((1, 27), (3, 3), (1, 1), (1, 1), False),
]


@pytest.mark.parametrize(("spatial", "kernel", "before", "after", "ended"), SEEN)
def test_questions_that_ended_the_process_are_not_asked(spatial, kernel, before, after, ended):
    problem = ConvolutionProblem(
        operation=Operation.BACKWARD_FILTER, batch=1, channels=64, spatial=spatial, filters=192, kernel=kernel,
        padding=before, post_padding=after,
    )  # fmt: skip
    assert ends_process(HeuristicMode.B, problem) is ended
    for mode in (HeuristicMode.A, HeuristicMode.FALLBACK):
        assert not ends_process(mode, problem)
    for operation in (Operation.FORWARD, Operation.BACKWARD_DATA):
        assert not ends_process(HeuristicMode.B, replace(problem, operation=operation))


@given(divisible(symmetric=True), st.sampled_from(HeuristicMode), st.integers(0, 99))
def test_problems_with_equal_paddings_have_no_fault(problem, mode, engine):
    assert not ends_process(mode, problem)
    assert not computes_wrong(f"eng{engine}", problem)


@given(divisible(), st.sampled_from(["eng50", "eng50_k2=1", "eng5", "eng71_k2=16_k13=0"]))
def test_one_engine_is_wrong_for_different_paddings(problem, name):
    wrong = (
        name == "eng50"
        and problem.operation is Operation.BACKWARD_DATA
        and problem.padding != (problem.post_padding or problem.padding)
    )
    assert computes_wrong(name, problem) is wrong
    assert allowed(Algorithm(name=name, workspace_bytes=0, api="graph"), problem) is not wrong
