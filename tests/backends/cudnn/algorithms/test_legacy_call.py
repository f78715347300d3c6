"""The numbers of legacy algorithms and math types, against the constants that are checked against cuDNN's headers."""

from types import SimpleNamespace

import pytest

from tests.support.problems import make_problem
from ucudnn import cudnn
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.legacy_call import ALGORITHMS, HALF, LegacyCall, legacy_algorithms
from ucudnn.backends.cudnn.algorithms.listing import AlgorithmList
from ucudnn.backends.cudnn.algorithms.prepare import Preparer
from ucudnn.backends.cudnn.api import enums
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import DataType, Operation

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


class RecordingLibrary:
    """A stand-in for cuDNN that notes each call; every workspace has 256 bytes."""

    def __init__(self):
        self.calls = []

    def call(self, name, *arguments):
        self.calls.append((name, arguments))
        return 256 if name.endswith("WorkspaceSize") else len(self.calls)

    def function(self, name):
        return lambda *arguments: self.calls.append((name, arguments)) or 0

    def compute_types(self):
        """Return the data types in which convolutions accumulate, in the order of their descriptors."""
        return [arguments[-1] for name, arguments in self.calls if name == "cudnnSetConvolutionNdDescriptor"]


def listed(problem):
    library = RecordingLibrary()
    return legacy_algorithms(library, 1, problem), library


@pytest.mark.parametrize("operation", Operation)
def test_float16_is_also_summed_in_16_bits_and_says_so(operation):
    problem = make_problem(operation=operation, dtype=DataType.FLOAT16)
    found, library = listed(problem)
    assert library.compute_types() == [enums.DATA_FLOAT, enums.DATA_HALF]
    plain = [each for each in found if not each.name.endswith(HALF)]
    halves = found[len(plain) :]
    assert [each.name for each in plain] == list(ALGORITHMS[operation])
    assert [each.name for each in halves] == [name + HALF for name in ALGORITHMS[operation]]
    assert all("REDUCED_PRECISION_REDUCTION" in each.notes for each in halves)  # so every output is checked
    assert not any("REDUCED_PRECISION_REDUCTION" in each.notes for each in plain)
    for one, other in zip(plain, halves, strict=True):
        assert ("NONDETERMINISTIC" in one.notes) == ("NONDETERMINISTIC" in other.notes)


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT64, DataType.BFLOAT16])
def test_other_types_are_not_summed_in_16_bits(dtype):
    problem = make_problem(dtype=dtype)
    found, library = listed(problem)
    assert [each.name for each in found] == list(ALGORITHMS[problem.operation])
    assert enums.DATA_HALF not in library.compute_types()
    with pytest.raises(UnsupportedProblemError, match=r"GEMM\+half is not a legacy algorithm of Forward in "):
        LegacyCall(library, 1, problem, "GEMM+half")


def test_a_call_that_sums_in_16_bits_has_its_number_and_its_descriptor():
    problem = make_problem(dtype=DataType.FLOAT16)
    for name, compute in (("GEMM", enums.DATA_FLOAT), ("GEMM+half", enums.DATA_HALF)):
        library = RecordingLibrary()
        LegacyCall(library, 1, problem, name).launch(1 << 20, 2 << 20, 3 << 20, DeviceBuffer(4 << 20, 256))
        assert library.compute_types() == [compute]
        (arguments,) = [each for called, each in library.calls if called == "cudnnConvolutionForward"]
        assert arguments[7] == ALGORITHMS[Operation.FORWARD]["GEMM"]
    with pytest.raises(UnsupportedProblemError, match="EIGHT"):
        LegacyCall(library, 1, problem, "EIGHT")


@pytest.mark.parametrize(
    ("candidates", "halves"),
    [(Candidates.LEGACY, True), (Candidates.EVERY, True), (Candidates.BEST, False), (Candidates.GRAPH, False)],
)
def test_sums_of_16_bits_are_candidates_where_legacy_algorithms_are_wanted(candidates, halves):
    """BEST and GRAPH take legacy algorithms as a last resort: here, no engine computes the problem."""
    problem = make_problem(dtype=DataType.FLOAT16)
    preparer = Preparer(None, 1, SimpleNamespace(copier=None), SimpleNamespace(listed=lambda *_: []))
    found = AlgorithmList(candidates, preparer)
    found._legacy_known = {problem: listed(problem)[0]}
    names = [each.name for each in found.of(problem)]
    assert "GEMM" in names
    assert ("GEMM+half" in names) == halves
