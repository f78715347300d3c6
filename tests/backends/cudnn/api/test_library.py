"""ctypes on libcudnn: the errors without it, and the real library if it is installed."""

import pickle
from array import array

import pytest

from tests.support.problems import make_problem
from ucudnn.backends.base import OVERWRITE
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph, allowed, round_up
from ucudnn.backends.cudnn.api.declarations import DECLARATIONS
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor
from ucudnn.backends.cudnn.api.enums import Attribute, DescriptorType, Type
from ucudnn.backends.cudnn.api.library import HostScalar, Library, read_scalar
from ucudnn.errors import BackendUnavailableError, CudnnError, UnsupportedProblemError
from ucudnn.problem import DataType, MathMode
from ucudnn.profiles.measurement import Algorithm


@pytest.fixture(scope="module")
def library():
    try:
        return Library()
    except BackendUnavailableError as error:
        pytest.skip(f"libcudnn is not installed: {str(error)[:60]}")


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_library_that_cannot_be_loaded_is_named_with_the_extra_and_the_variable(tmp_path, content):
    file = tmp_path / "libcudnn.so.9"
    if content is not None:
        file.write_bytes(content)
    message = rf"pip install 'ucudnn\[cuda13\]'.*UCUDNN_CUDNN_LIBRARY.*{file}"
    with pytest.raises(BackendUnavailableError, match=message):
        Library(str(file))


def test_another_library_is_not_taken_for_cudnn():
    with pytest.raises(BackendUnavailableError, match=r"libc\.so\.6 is not cuDNN"):
        Library("libc.so.6")


def test_declarations_are_known_letters():
    assert {letter for letters in DECLARATIONS.values() for letter in letters.lower()} <= set("pilzufd")
    assert all(name.startswith("cudnn") for name in DECLARATIONS)


@pytest.mark.parametrize("double", [False, True])
def test_host_scalars_are_read_at_their_address(double):
    scalar = HostScalar(-0.75, double=double)
    assert read_scalar(scalar.address, double=double) == -0.75


def test_version_and_errors(library):
    assert library.version >= 90200
    assert library.version_text.startswith("9.")
    with pytest.raises(
        CudnnError, match=r"CUDNN_STATUS_BAD_PARAM.* from cudnnSetTensorNdDescriptor \(cuDNN 9"
    ) as caught:
        library.call("cudnnSetTensorNdDescriptor", 0, 0, 4, 0, 0)
    assert caught.value.status // 1000 == 2
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.status, str(again)) == (caught.value.status, str(caught.value))


def test_every_declared_function_is_there(library):
    for name in DECLARATIONS:
        assert callable(library.function(name)), name
    DECLARATIONS["cudnnNoSuchFunction"] = "p"
    try:
        with pytest.raises(BackendUnavailableError, match="has no function cudnnNoSuchFunction"):
            library.function("cudnnNoSuchFunction")
    finally:
        del DECLARATIONS["cudnnNoSuchFunction"]


def test_descriptors_return_what_was_set(library):
    descriptor = library.call("cudnnCreateTensorDescriptor")
    sizes, strides = array("i", [2, 3, 5, 7, 4]), array("i", [999, 140, 28, 4, 1])
    library.call("cudnnSetTensorNdDescriptor", descriptor, 1, 5, sizes.buffer_info()[0], strides.buffer_info()[0])
    read_sizes, read_strides = array("i", [0] * 5), array("i", [0] * 5)
    dtype, count = library.call(
        "cudnnGetTensorNdDescriptor", descriptor, 5, read_sizes.buffer_info()[0], read_strides.buffer_info()[0]
    )
    library.call("cudnnDestroyTensorDescriptor", descriptor)
    assert (dtype, count) == (1, 5)
    assert (read_sizes, read_strides) == (sizes, strides)


def test_backend_descriptors(library):
    tensor = BackendDescriptor(library, DescriptorType.TENSOR)
    tensor.set(Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE, 0)
    tensor.set(Attribute.TENSOR_DIMENSIONS, Type.INT64, (2, 3, 4, 5))
    tensor.set(Attribute.TENSOR_STRIDES, Type.INT64, (60, 20, 5, 1))
    tensor.set(Attribute.TENSOR_UNIQUE_ID, Type.INT64, 7)
    with pytest.raises(CudnnError):
        tensor.numbers(Attribute.TENSOR_DIMENSIONS, Type.INT64, 8)  # not finalized yet
    tensor.set(Attribute.TENSOR_BYTE_ALIGNMENT, Type.INT64, 16).finalize()
    assert tensor.numbers(Attribute.TENSOR_DIMENSIONS, Type.INT64, 8) == [2, 3, 4, 5]
    assert tensor.number(Attribute.TENSOR_UNIQUE_ID, Type.INT64) == 7
    assert tensor.number(Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE) == 0
    with pytest.raises(CudnnError, match="cudnnBackendGetAttribute"):
        tensor.number(Attribute.TENSOR_UNIQUE_ID, Type.DATA_TYPE)
    with pytest.raises(CudnnError, match="CUDNN_STATUS"):
        BackendDescriptor(library, DescriptorType.CONVOLUTION).finalize()


def test_a_graph_without_a_handle_is_an_error(library):
    with pytest.raises(CudnnError):
        OperationGraph(library, 0, make_problem(), OVERWRITE)


@pytest.mark.parametrize("name", ["GEMM", "eng", "eng5_k2", "eng5_k2=x", "eng5_k2=1;"])
def test_names_that_are_no_engine_configurations(name):
    graph = OperationGraph.__new__(OperationGraph)  # names are parsed before the graph is used
    with pytest.raises(
        UnsupportedProblemError, match="not an engine configuration: their names are like eng67_k2=19_k13=0"
    ):
        graph._make_configuration(name)


def test_notes_decide_what_a_problem_allows():
    def may(note, problem, workspace_bytes=0):
        return allowed(Algorithm(name="eng1", workspace_bytes=workspace_bytes, api="graph", notes=(note,)), problem)

    plain = make_problem()
    fma = make_problem(math=MathMode.FMA)
    assert may("TENSOR_CORE", plain)
    assert not may("TENSOR_CORE", fma)
    assert not may("DOWN_CONVERT_INPUTS", fma)
    assert may("FFT", fma)
    assert not may("FFT", plain, -1), "cuDNN does not know its workspace"
    assert may("TENSOR_CORE", make_problem(math=MathMode.FMA, dtype=DataType.FLOAT16))
    assert may("NONDETERMINISTIC", plain)
    assert not may("NONDETERMINISTIC", make_problem(deterministic=True))
    assert not may("REDUCED_PRECISION_REDUCTION", plain)
    assert not may("REDUCED_PRECISION_REDUCTION", make_problem(dtype=DataType.FLOAT64))
    assert may("REDUCED_PRECISION_REDUCTION", make_problem(dtype=DataType.FLOAT16))
    assert may("REDUCED_PRECISION_REDUCTION", make_problem(dtype=DataType.BFLOAT16))


def test_workspaces_are_stated_in_multiples_of_the_alignment():
    assert [round_up(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]
