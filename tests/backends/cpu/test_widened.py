"""Problems of float16 on the CPU: one rounding, in the workspace, and sums in float32."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operands import operands, written
from tests.support.problems import make_problem, problems
from tests.support.reference import scaled_reference, terms
from ucudnn.backends import open_backend
from ucudnn.backends.base import Scaling
from ucudnn.problem import DataType, Operation

BACKEND = open_backend("cpu")
PROBLEM = make_problem(operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, channels=1, groups=1, kernel=(1, 1))
SCALINGS = [Scaling(1, 0), Scaling(1, 1), Scaling(-0.75, 0), Scaling(2, -0.5)]


def launched(problem, tensors, name, scaling):
    """Launch an algorithm on an output and a workspace of NaN where nothing may be read."""
    algorithm = BACKEND.algorithm(problem, name)
    out = written(problem, *tensors)
    if scaling.beta == 0:
        out.fill(np.nan)
    workspace = BACKEND.allocate(algorithm.workspace_bytes + 64)
    workspace.fill(0xFF)
    BACKEND.prepare(problem, name).launch(*tensors, workspace[: algorithm.workspace_bytes], scaling=scaling)
    assert (workspace[algorithm.workspace_bytes :] == 0xFF).all()


@given(problems(), st.sampled_from(SCALINGS), st.integers(0, 1 << 30), st.data())
def test_a_result_of_float16_is_rounded_once(problem, scaling, seed, data):
    problem = replace(problem, dtype=DataType.FLOAT16)
    name = data.draw(st.sampled_from([each.name for each in BACKEND.algorithms(problem)]))
    tensors = operands(problem, seed)
    exact = scaled_reference(problem, *tensors, *scaling)
    launched(problem, tensors, name, scaling)
    found = written(problem, *tensors).astype(np.float64)
    # One rounding to 11 bits, and sums in float32 whose transforms may amplify their rounding.
    own = 2.0**-11 * np.abs(exact) + 2.0**-25 + 3e-5 * terms(problem) ** 0.5
    assert (np.abs(found - exact) <= own).all()


@given(problems(), st.sampled_from(SCALINGS), st.integers(0, 1 << 30), st.data())
def test_a_float32_sum_is_not_rounded_to_16_bits(problem, scaling, seed, data):
    problem = replace(problem, operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, float32_sum=True)
    name = data.draw(st.sampled_from([each.name for each in BACKEND.algorithms(problem)]))
    x, w, y = operands(replace(problem, float32_sum=False), seed)
    tensors = x, (w + np.float32(1e-5)).astype(np.float32), y
    exact = scaled_reference(problem, *tensors, *scaling)
    launched(problem, tensors, name, scaling)
    assert np.abs(tensors[1] - exact).max() <= 3e-5 * (1 + terms(problem)) ** 0.5


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 10_000])
def test_a_sum_is_scaled_in_float32_and_rounded_once(scaling, size):
    problem = replace(PROBLEM, filters=size, y_batch_stride=0)
    prepared, expected_sum = BACKEND.prepare_sum(problem), BACKEND.float32_sum(problem)
    workspace = BACKEND.allocate(expected_sum.size_bytes + 128)
    total, rest = prepared.split(workspace)
    assert (total.shape, total.dtype, rest.nbytes) == (problem.w_shape, np.float32, 128)
    random = np.random.default_rng(size)
    total[...] = random.uniform(-3, 3, total.shape)
    w = random.uniform(-3, 3, problem.w_shape).astype(np.float16)
    exact = scaling.alpha * total.astype(np.float64)
    if scaling.beta:
        exact += scaling.beta * w.astype(np.float64)
    else:
        w.fill(np.nan)
    rest.fill(7)
    prepared.bind(total, w, scaling)()
    assert (np.abs(w - exact) <= 2.0**-11 * np.abs(exact) + 2.0**-21).all()
    assert (rest == 7).all()
