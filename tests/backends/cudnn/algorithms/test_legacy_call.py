"""The numbers of legacy algorithms and math types, against the constants that are checked against cuDNN's headers."""

import pytest

from ucudnn import cudnn
from ucudnn.backends.cudnn.algorithms.legacy_call import ALGORITHMS
from ucudnn.backends.cudnn.api import enums
from ucudnn.problem import Operation

PREFIXES = {Operation.FORWARD: "FWD", Operation.BACKWARD_DATA: "BWD_DATA", Operation.BACKWARD_FILTER: "BWD_FILTER"}


@pytest.mark.parametrize("operation", Operation)
def test_algorithms_have_cudnns_numbers(operation):
    prefix = f"CUDNN_CONVOLUTION_{PREFIXES[operation]}_ALGO_"
    known = {name.removeprefix(prefix): getattr(cudnn, name) for name in dir(cudnn) if name.startswith(prefix)}
    ours = {name.removeprefix("ALGO_"): number for name, number in ALGORITHMS[operation].items()}
    assert len(ours) >= 6
    assert {name: known[name] for name in ours} == ours


def test_math_types_have_cudnns_numbers():
    assert cudnn.CUDNN_DEFAULT_MATH == enums.DEFAULT_MATH == 0
    assert cudnn.CUDNN_TENSOR_OP_MATH == enums.TENSOR_OP_MATH == 1
    assert enums.FMA_MATH == 3  # cudnnMathType_t; CuPy 13 does not name it
