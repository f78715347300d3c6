"""cuDNN if it is installed, and layers on host memory."""

import numpy as np
import pytest

from ucudnn import cudnn
from ucudnn.errors import BackendUnavailableError
from ucudnn.problem import Operation


@pytest.fixture(scope="session")
def libcudnn():
    """Return the package, or skip without cuDNN. Descriptors need cuDNN, but no GPU."""
    try:
        cudnn.getVersion()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return cudnn


class Layer:
    """A 2-D convolution with channels first: its arrays, their descriptors, and scalars at addresses."""

    def __init__(
        self, *, x=(12, 4, 9, 8), filters=6, kernel=(3, 3), pad=1, stride=1, groups=1, dtype="float32", seed=0
    ):
        rng = np.random.default_rng(seed)
        n, c, h, w = x
        output = [(size + 2 * pad - taps) // stride + 1 for size, taps in zip((h, w), kernel, strict=True)]
        self.arrays = {
            "x": rng.uniform(-1, 1, x).astype(dtype),
            "w": rng.uniform(-1, 1, (filters, c // groups, *kernel)).astype(dtype),
            "y": rng.uniform(-1, 1, (n, filters, *output)).astype(dtype),
        }
        self.scalar_type = dtype if dtype == "float64" else "float32"
        number = {"float32": 0, "float64": 1, "float16": 2}[dtype]
        self.x, self.y = cudnn.createTensorDescriptor(), cudnn.createTensorDescriptor()
        cudnn.setTensor4dDescriptor(self.x, 0, number, *x)
        cudnn.setTensor4dDescriptor(self.y, 0, number, *self.arrays["y"].shape)
        self.w = cudnn.createFilterDescriptor()
        cudnn.setFilter4dDescriptor_v4(self.w, number, 0, *self.arrays["w"].shape)
        self.convolution = cudnn.createConvolutionDescriptor()
        cudnn.setConvolution2dDescriptor_v5(
            self.convolution, pad, pad, stride, stride, 1, 1, 1, 1 if dtype == "float64" else 0
        )
        cudnn.setConvolutionGroupCount(self.convolution, groups)

    def descriptors(self, operation):
        """Return the four descriptors in cuDNN's order."""
        return {
            Operation.FORWARD: (self.x, self.w, self.convolution, self.y),
            Operation.BACKWARD_DATA: (self.w, self.y, self.convolution, self.x),
            Operation.BACKWARD_FILTER: (self.x, self.y, self.convolution, self.w),
        }[operation]

    def run(self, handle, operation, *, alpha=1.0, beta=0.0, algo=0):
        """Run an operation in place on the arrays."""
        scalars = np.array([alpha, beta], self.scalar_type)
        first, second, convolution, written = self.descriptors(operation)
        names, call = {
            Operation.FORWARD: ("xwy", cudnn.convolutionForward),
            Operation.BACKWARD_DATA: ("wyx", cudnn.convolutionBackwardData_v3),
            Operation.BACKWARD_FILTER: ("xyw", cudnn.convolutionBackwardFilter_v3),
        }[operation]
        a, b, c = (np.uint64(self.arrays[name].ctypes.data) for name in names)  # CuPy also took NumPy's integers
        one, two = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
        call(handle, one, first, a, second, b, convolution, algo, 0, 0, two, written, c)

    def destroy(self):
        cudnn.destroyTensorDescriptor(self.x)
        cudnn.destroyTensorDescriptor(self.y)
        cudnn.destroyFilterDescriptor(self.w)
        cudnn.destroyConvolutionDescriptor(self.convolution)


@pytest.fixture
def layer(libcudnn):
    """Return a maker of layers whose descriptors are destroyed after the test."""
    made = []

    def make(**sizes):
        made.append(Layer(**sizes))
        return made[-1]

    yield make
    for each in made:
        each.destroy()
