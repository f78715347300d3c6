"""Descriptors of the real cuDNN, which need no GPU: they are set, read and kept, and errors have names."""

from array import array

import numpy as np
import pytest

from ucudnn.backends.cudnn.api.declarations import DECLARATIONS
from ucudnn.cudnn.cupyx_descriptors import (
    Descriptor,
    create_convolution_descriptor,
    create_filter_descriptor,
    create_tensor_descriptor,
    get_data_type,
)
from ucudnn.cudnn.descriptors import CONVOLUTIONS, FILTERS, TENSORS
from ucudnn.cudnn.loading import library

pytestmark = pytest.mark.usefixtures("libcudnn")


def made(kind):
    """Return a fixture of a descriptor."""

    @pytest.fixture
    def descriptor(libcudnn):
        descriptor = getattr(libcudnn, f"create{kind}Descriptor")()
        yield descriptor
        getattr(libcudnn, f"destroy{kind}Descriptor")(descriptor)

    return descriptor


tensor, filters, convolution = made("Tensor"), made("Filter"), made("Convolution")
operation, reduction = made("OpTensor"), made("ReduceTensor")
activation, pooling, dropout = made("Activation"), made("Pooling"), made("Dropout")


@pytest.fixture
def read_back(monkeypatch):
    """Return a caller of functions that the package does not declare, because it does not read these descriptors."""
    for name, letters in {
        "cudnnGetPooling2dDescriptor": "pIIIIIIII",
        "cudnnGetPoolingNdDescriptor": "piIIIppp",
        "cudnnGetActivationDescriptor": "pIID",
    }.items():
        monkeypatch.setitem(DECLARATIONS, name, letters)
    return library().call


def ints(*values):
    return array("i", values)


def at(numbers):
    return numbers.buffer_info()[0]


def test_versions(libcudnn):
    assert 90200 <= libcudnn.getVersion() < 100000
    assert libcudnn.get_build_version() == libcudnn.getVersion()


def test_a_tensor_of_four_and_five_dimensions(libcudnn, tensor):
    libcudnn.setTensor4dDescriptor(tensor, libcudnn.CUDNN_TENSOR_NCHW, libcudnn.CUDNN_DATA_HALF, 2, 3, 4, 5)
    assert libcudnn.getTensor4dDescriptor(tensor) == (2, 2, 3, 4, 5, 60, 20, 5, 1)
    facts = TENSORS[tensor]
    assert (facts.data_type, facts.sizes, facts.strides) == (2, (2, 3, 4, 5), (60, 20, 5, 1))
    assert TENSORS[tensor] is facts
    libcudnn.setTensor4dDescriptor(tensorDesc=tensor, format=libcudnn.CUDNN_TENSOR_NHWC, dataType=0, n=2, c=3, h=4, w=5)
    assert TENSORS[tensor].strides == (60, 1, 15, 3)
    libcudnn.setTensor4dDescriptorEx(tensor, 0, 2, 3, 4, 5, 100, 20, 5, 1)
    assert TENSORS[tensor].strides == (100, 20, 5, 1)
    sizes, strides = ints(2, 3, 4, 5, 6), ints(400, 120, 30, 6, 1)
    libcudnn.setTensorNdDescriptor(tensor, 0, 5, at(sizes), at(strides))
    assert (TENSORS[tensor].sizes, TENSORS[tensor].strides) == (tuple(sizes), tuple(strides))


def test_numpy_integers_are_integers(libcudnn, tensor, pooling, read_back):
    libcudnn.setTensor4dDescriptor(np.uint64(tensor), 0, 0, *np.array([2, 3, 4, 5]))
    assert TENSORS[np.uint64(tensor)].sizes == (2, 3, 4, 5)
    libcudnn.setPooling2dDescriptor_v4(pooling, np.int64(0), 0, *np.array([3, 2, 1, 0, 2, 1]))
    assert read_back("cudnnGetPooling2dDescriptor", pooling) == (0, 0, 3, 2, 1, 0, 2, 1)


def test_filters(libcudnn, filters):
    libcudnn.setFilter4dDescriptor_v4(filters, 9, libcudnn.CUDNN_TENSOR_NHWC, 8, 3, 5, 7)
    assert libcudnn.getFilterNdDescriptor(filters, 4) == (9, 1, 4, (8, 3, 5, 7))
    facts = FILTERS[filters]
    assert (facts.data_type, facts.format, facts.sizes) == (9, 1, (8, 3, 5, 7))
    sizes = ints(8, 3, 2, 3, 4)
    libcudnn.setFilterNdDescriptor_v4(filters, 0, 0, 5, at(sizes))
    assert libcudnn.getFilterNdDescriptor(filters, 6) == (0, 0, 5, (8, 3, 2, 3, 4, 0))
    assert FILTERS[filters].sizes == (8, 3, 2, 3, 4)


def test_a_convolution_of_two_and_three_dimensions(libcudnn, convolution):
    libcudnn.setConvolution2dDescriptor_v5(convolution, 1, 2, 3, 4, 5, 6, 1, 0)
    facts = CONVOLUTIONS[convolution]
    assert (facts.padding, facts.stride, facts.dilation) == ((1, 2), (3, 4), (5, 6))
    assert (facts.mode, facts.compute_type, facts.math_type, facts.groups) == (1, 0, 0, 1)
    libcudnn.setConvolutionMathType(convolution, libcudnn.CUDNN_FMA_MATH)
    libcudnn.setConvolutionGroupCount(convolution, 2)
    assert libcudnn.getConvolutionMathType(convolution) == CONVOLUTIONS[convolution].math_type == 3
    assert libcudnn.getConvolutionGroupCount(convolution) == CONVOLUTIONS[convolution].groups == 2
    libcudnn.setConvolution2dDescriptor_v4(convolution, 0, 0, 1, 1, 1, 1, 0)
    facts = CONVOLUTIONS[convolution]
    assert (facts.padding, facts.mode, facts.compute_type, facts.math_type, facts.groups) == ((0, 0), 0, 0, 3, 2)
    pad, stride, dilation = ints(1, 2, 3), ints(3, 2, 1), ints(1, 1, 2)
    libcudnn.setConvolutionNdDescriptor_v3(convolution, 3, at(pad), at(stride), at(dilation), 1, 1)
    facts = CONVOLUTIONS[convolution]
    assert (facts.padding, facts.stride, facts.dilation) == ((1, 2, 3), (3, 2, 1), (1, 1, 2))
    assert facts.compute_type == 1


def test_facts_are_forgotten_with_their_descriptor_and_those_of_one_made_elsewhere_at_once(libcudnn):
    tensor, call = libcudnn.createTensorDescriptor(), library().call
    assert TENSORS[tensor].sizes == ()
    libcudnn.setTensor4dDescriptor(tensor, 0, 0, 2, 3, 4, 5)
    assert TENSORS[tensor].sizes == (2, 3, 4, 5)
    libcudnn.destroyTensorDescriptor(tensor)
    other = call("cudnnCreateTensorDescriptor")  # most likely at the same address
    for batch in (6, 7):
        call("cudnnSetTensor4dDescriptor", other, 0, 0, batch, 7, 8, 9)
        assert TENSORS[other].sizes == (batch, 7, 8, 9)
    call("cudnnDestroyTensorDescriptor", other)


derived = made("Tensor")


def test_derived_descriptors_are_read_again(libcudnn, tensor, derived):
    libcudnn.setTensor4dDescriptor(tensor, 0, 2, 2, 3, 4, 5)
    libcudnn.setTensor4dDescriptor(derived, 0, 0, 1, 1, 1, 1)
    assert TENSORS[derived].sizes == (1, 1, 1, 1)
    libcudnn.deriveBNTensorDescriptor(derived, xDesc=tensor, mode=libcudnn.CUDNN_BATCHNORM_SPATIAL)
    assert (TENSORS[derived].data_type, TENSORS[derived].sizes) == (0, (1, 3, 1, 1))


def test_other_descriptors_keep_what_was_set(libcudnn, read_back, operation, reduction, activation, pooling, dropout):
    libcudnn.setOpTensorDescriptor(operation, libcudnn.CUDNN_OP_TENSOR_MAX, 0, 1)
    assert libcudnn.getOpTensorDescriptor(operation) == (3, 0, 1)
    libcudnn.setReduceTensorDescriptor(reduction, libcudnn.CUDNN_REDUCE_TENSOR_AVG, 0, 1, 0, 0)
    assert libcudnn.getReduceTensorDescriptor(reduction) == (5, 0, 1, 0, 0)
    libcudnn.setActivationDescriptor(activation, libcudnn.CUDNN_ACTIVATION_CLIPPED_RELU, 1, reluCeiling=6.0)
    assert read_back("cudnnGetActivationDescriptor", activation) == (3, 1, 6.0)
    window, pad, stride = ints(3, 2, 2), ints(1, 0, 0), ints(2, 2, 1)
    libcudnn.setPoolingNdDescriptor_v4(pooling, 1, 0, 3, at(window), at(pad), at(stride))
    read = [ints(0, 0, 0) for _ in range(3)]
    assert read_back("cudnnGetPoolingNdDescriptor", pooling, 3, *map(at, read)) == (1, 0, 3)
    assert read == [window, pad, stride]


def test_the_reserve_of_dropout_depends_on_its_tensor(libcudnn, tensor):
    libcudnn.setTensor4dDescriptor(tensor, 0, 0, 2, 3, 4, 5)
    small = libcudnn.getDropoutReserveSpaceSize(tensor)
    libcudnn.setTensor4dDescriptor(tensor, 0, 0, 20, 30, 4, 5)
    assert 0 < small < libcudnn.getDropoutReserveSpaceSize(xDesc=tensor)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("setConvolution2dDescriptor_v5", (-1, 0, 1, 1, 1, 1, 1, 0)),
        ("setConvolution2dDescriptor_v5", (0, 0, 0, 1, 1, 1, 1, 0)),
        ("setConvolutionMathType", (17,)),
    ],
)
def test_errors_have_names_and_statuses(libcudnn, convolution, function, arguments):
    with pytest.raises(
        libcudnn.CuDNNError, match="cuDNN Error: CUDNN_STATUS_BAD_PARAM from cudnnSetConvolution"
    ) as caught:
        getattr(libcudnn, function)(convolution, *arguments)
    assert caught.value.status // 1000 == 2


def test_an_error_leaves_no_stale_facts(libcudnn, tensor):
    libcudnn.setTensor4dDescriptor(tensor, 0, 0, 2, 3, 4, 5)
    before = TENSORS[tensor]
    with pytest.raises(libcudnn.CuDNNError, match="CUDNN_STATUS_BAD_PARAM"):
        libcudnn.setTensor4dDescriptor(tensor, 0, 0, 0, 3, 4, 5)
    assert TENSORS[tensor].sizes == libcudnn.getTensor4dDescriptor(tensor)[1:5] == before.sizes


def test_descriptors_of_arrays():
    tensor = create_tensor_descriptor(np.zeros((2, 4, 5, 3), np.float16), 1)
    assert (TENSORS[tensor.value].sizes, TENSORS[tensor.value].strides) == ((2, 3, 4, 5), (60, 1, 15, 3))
    volume = create_tensor_descriptor(np.zeros((2, 3, 4, 5, 6)))
    assert (TENSORS[volume.value].data_type, TENSORS[volume.value].strides) == (1, (360, 120, 30, 6, 1))
    weights = create_filter_descriptor(np.zeros((8, 5, 7, 3), np.float32), format=1)
    assert (FILTERS[weights.value].format, FILTERS[weights.value].sizes) == (1, (8, 3, 5, 7))
    convolution = create_convolution_descriptor((1, 2), (1, 1), np.dtype("e"), use_tensor_core=True, groups=2)
    facts = CONVOLUTIONS[convolution.value]
    assert (facts.padding, facts.dilation, facts.compute_type) == ((1, 2), (1, 1), 0)
    assert (facts.mode, facts.math_type, facts.groups) == (1, 1, 2)
    destroyed = []
    descriptor = Descriptor(1234, destroyed.append)
    assert descriptor.value == 1234
    del descriptor
    assert destroyed == [1234], "it owns what it describes"


def test_arrays_that_cudnn_cannot_describe():
    with pytest.raises(TypeError, match="type int32 is not supported in cuDNN: use one of float32, float64"):
        get_data_type(np.dtype("int32"))
    with pytest.raises(ValueError, match="are not C-contiguous"):
        create_tensor_descriptor(np.zeros((2, 3, 4, 5)).T)
    with pytest.raises(ValueError, match="format 2 is not known"):
        create_filter_descriptor(np.zeros((2, 3, 4, 5)), 2)
    with pytest.raises(ValueError, match="differ in length"):
        create_convolution_descriptor((1, 1), (1,), np.dtype("f"))
