"""Which failures tell that an algorithm is of no use, and when recovery ends."""

import pytest

from tests.support.problems import make_problem
from ucudnn.backends.base import Scaling
from ucudnn.execution.recovery import MOST_FAILURES, given_up, is_measured
from ucudnn.problem import Operation


@pytest.mark.parametrize(
    ("alpha", "beta", "measured"),
    [
        (1.0, 0.0, set(Operation)),
        (1.0, 1.0, {Operation.BACKWARD_FILTER}),
        (1.0, 0.5, set()),
        (0.5, 0.0, set()),
        (0.5, 1.0, set()),
    ],
)
def test_algorithms_are_measured_as_micro_batches_use_them(alpha, beta, measured):
    assert {each for each in Operation if is_measured(make_problem(operation=each), Scaling(alpha, beta))} == measured


def test_the_error_of_a_call_that_is_given_up_names_the_kernel():
    assert str(given_up("conv2 (Forward)")) == (
        f"conv2 (Forward): {MOST_FAILURES} configurations failed one after another"
    )
