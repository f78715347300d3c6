"""A small CNN on CuPy arrays whose layers are functions of `ucudnn.cudnn`, on any handle."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucudnn import cudnn
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module

SIZE, COLOURS, CLASSES = 64, 3, 10
BLOCKS = ((64, 5), (192, 5), (384, 3))
"""Filters of each convolution and their height."""

NCHW, FLOAT = cudnn.CUDNN_TENSOR_NCHW, cudnn.CUDNN_DATA_FLOAT

Array = Any
"""A CuPy array."""

_scalars: dict[float, "array[float]"] = {}


def at(value: float) -> int:
    """Return the address of a host float, for alpha and beta."""
    if value not in _scalars:
        _scalars[value] = array("f", [value])
    return _scalars[value].buffer_info()[0]


def described(*sizes: int) -> int:
    """Return a new descriptor of a dense float tensor (n, c, h, w)."""
    descriptor = cudnn.createTensorDescriptor()
    cudnn.setTensor4dDescriptor(descriptor, NCHW, FLOAT, *sizes)
    return descriptor


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a network chooses its algorithms.

    Attributes:
        handle: address of the handle, cuDNN's or μ-cuDNN's.
        limit: bytes of workspace for each convolution.
        math_type: math type of the convolution descriptors.
        find: whether find...AlgorithmEx measures algorithms; otherwise get...Algorithm_v7 names them.
    """

    handle: int
    limit: int
    math_type: int
    find: bool


class Kernel:
    """One operation of one layer, as frameworks keep it: its convolution descriptor, algorithm and workspace size.

    Args:
        setup: how to choose the algorithm.
        operation: 'Forward', 'BackwardData' or 'BackwardFilter'.
        descriptors: descriptors of the two inputs and of the output, in cuDNN's order.
        arrays: the arrays of these descriptors.
        kernel: height of the filters.
    """

    def __init__(
        self, setup: Setup, operation: str, descriptors: tuple[int, int, int], arrays: tuple[Array, ...], kernel: int
    ) -> None:
        self.convolution = cudnn.createConvolutionDescriptor()
        pad = kernel // 2
        cudnn.setConvolution2dDescriptor_v5(
            self.convolution, pad, pad, 1, 1, 1, 1, cudnn.CUDNN_CROSS_CORRELATION, FLOAT
        )
        cudnn.setConvolutionMathType(self.convolution, setup.math_type)
        self.operation = operation
        self._handle = setup.handle
        self._descriptors = descriptors
        self._call = {
            "Forward": cudnn.convolutionForward,
            "BackwardData": cudnn.convolutionBackwardData_v3,
            "BackwardFilter": cudnn.convolutionBackwardFilter_v3,
        }[operation]
        perf = self._choose(setup, arrays)
        if setup.math_type != cudnn.CUDNN_FMA_MATH:
            cudnn.setConvolutionMathType(self.convolution, perf.mathType)
        self.algorithm, self.workspace_bytes = perf.algo, perf.memory

    def _choose(self, setup: Setup, arrays: tuple[Array, ...]) -> cudnn.CuDNNAlgoPerf:
        first, second, written = self._descriptors
        if setup.find:
            find = getattr(cudnn, f"findConvolution{self.operation}AlgorithmEx_v7")
            scratch = cupy_module().cuda.alloc(setup.limit)
            a, b, c = (each.data.ptr for each in arrays)
            addressed = (first, a, second, b, self.convolution, written, c)
            perfs: list[cudnn.CuDNNAlgoPerf] = find(setup.handle, *addressed, 8, scratch.ptr, setup.limit)
        else:
            get = getattr(cudnn, f"getConvolution{self.operation}Algorithm_v7")
            perfs = get(setup.handle, first, second, self.convolution, written, 8)
        for perf in perfs:
            if perf.status == cudnn.CUDNN_STATUS_SUCCESS and perf.memory <= setup.limit:
                return perf
        raise SystemExit(f"error: cuDNN has no {self.operation} algorithm within {setup.limit} bytes")

    def run(self, first: Array, second: Array, written: Array, workspace: Array) -> None:
        """Compute the output from the inputs."""
        a, b, c = self._descriptors
        inputs = (a, first.data.ptr, b, second.data.ptr, self.convolution, self.algorithm)
        scratch = (workspace.ptr if workspace else 0, self.workspace_bytes)
        self._call(self._handle, at(1), *inputs, *scratch, at(0), c, written.data.ptr)


class Block:
    """Convolution, bias, ReLU and 2 x 2 max pooling, with the arrays of forward and backward.

    Args:
        cupy: CuPy.
        setup: how to choose algorithms.
        x: input, shape (N, C, H, W).
        weights: filters (K, C, R, R) on the host.
        dx: gradient of the input; None for the first block, which needs none.
    """

    def __init__(self, cupy: Any, setup: Setup, x: Array, weights: np.ndarray[Any, Any], dx: Array | None) -> None:
        batch, _, height, width = x.shape
        filters, _, kernel, _ = weights.shape
        self._handle = setup.handle
        self.x, self.dx = x, dx
        self.w, self.dw = cupy.asarray(weights), cupy.zeros(weights.shape, np.float32)
        self.b, self.db = cupy.zeros(filters, np.float32), cupy.zeros(filters, np.float32)
        whole, half = (batch, filters, height, width), (batch, filters, height // 2, width // 2)
        self.y, self.dy, self.a, self.da = (cupy.zeros(whole, np.float32) for _ in range(4))
        self.p, self.dp = cupy.zeros(half, np.float32), cupy.zeros(half, np.float32)
        self._x, self._y, self._p, self._b = (
            described(*x.shape),
            described(*whole),
            described(*half),
            described(1, filters, 1, 1),
        )
        self._w = cudnn.createFilterDescriptor()
        cudnn.setFilter4dDescriptor_v4(self._w, FLOAT, NCHW, *weights.shape)
        self._relu = cudnn.createActivationDescriptor()
        cudnn.setActivationDescriptor(self._relu, cudnn.CUDNN_ACTIVATION_RELU, cudnn.CUDNN_NOT_PROPAGATE_NAN, 0.0)
        self._pooling = cudnn.createPoolingDescriptor()
        cudnn.setPooling2dDescriptor_v4(
            self._pooling, cudnn.CUDNN_POOLING_MAX_DETERMINISTIC, cudnn.CUDNN_NOT_PROPAGATE_NAN, 2, 2, 0, 0, 2, 2
        )
        self._forward = Kernel(setup, "Forward", (self._x, self._w, self._y), (x, self.w, self.y), kernel)
        self._filter = Kernel(setup, "BackwardFilter", (self._x, self._y, self._w), (x, self.dy, self.dw), kernel)
        self.kernels = [self._forward, self._filter]
        if dx is not None:
            self._data = Kernel(setup, "BackwardData", (self._w, self._y, self._x), (self.w, self.dy, dx), kernel)
            self.kernels.append(self._data)

    def forward(self, workspace: Array) -> None:
        """Compute p from x."""
        self._forward.run(self.x, self.w, self.y, workspace)
        handle, y, a = self._handle, self.y.data.ptr, self.a.data.ptr
        cudnn.addTensor_v3(handle, at(1), self._b, self.b.data.ptr, at(1), self._y, y)
        cudnn.activationForward_v4(handle, self._relu, at(1), self._y, y, at(0), self._y, a)
        cudnn.poolingForward(handle, self._pooling, at(1), self._y, a, at(0), self._p, self.p.data.ptr)

    def backward(self, workspace: Array) -> None:
        """Compute db, dw and dx from dp."""
        handle, y, dy, a, da = self._handle, *(each.data.ptr for each in (self.y, self.dy, self.a, self.da))
        output = (self._p, self.p.data.ptr, self._p, self.dp.data.ptr)
        cudnn.poolingBackward(handle, self._pooling, at(1), *output, self._y, a, at(0), self._y, da)
        output = (self._y, a, self._y, da)
        cudnn.activationBackward_v4(handle, self._relu, at(1), *output, self._y, y, at(0), self._y, dy)
        cudnn.convolutionBackwardBias(handle, at(1), self._y, dy, at(0), self._b, self.db.data.ptr)
        self._filter.run(self.x, self.dy, self.dw, workspace)
        if self.dx is not None:
            self._data.run(self.w, self.dy, self.dx, workspace)


class Network:
    """The network on one handle.

    Args:
        cupy: CuPy.
        setup: how to choose algorithms.
        batch: mini-batch size.
        weights: filters of each block, and the matrix of the fully connected layer, on the host.
        rate: learning rate.
    """

    def __init__(
        self, cupy: Any, setup: Setup, batch: int, weights: Sequence[np.ndarray[Any, Any]], rate: float
    ) -> None:
        self._handle = setup.handle
        self._rate = rate
        self._batch = batch
        self.images = cupy.zeros((batch, COLOURS, SIZE, SIZE), np.float32)
        self._blocks: list[Block] = []
        x: Array = self.images
        dx: Array = None
        for filters in weights[:-1]:
            self._blocks.append(Block(cupy, setup, x, filters, dx))
            x, dx = self._blocks[-1].p, self._blocks[-1].dp
        self._features, self._dfeatures = x.reshape(batch, -1), dx.reshape(batch, -1)
        self._v, self._dv = cupy.asarray(weights[-1]), cupy.zeros(weights[-1].shape, np.float32)
        self._c, self._dc = cupy.zeros(CLASSES, np.float32), cupy.zeros(CLASSES, np.float32)
        self._logits, self._dlogits, self.probabilities = (cupy.zeros((batch, CLASSES), np.float32) for _ in range(3))
        self._rows, self._row = described(batch, CLASSES, 1, 1), described(1, CLASSES, 1, 1)
        learned = [pair for block in self._blocks for pair in ((block.w, block.dw), (block.b, block.db))]
        learned += [(self._v, self._dv), (self._c, self._dc)]
        self._learned = [(described(1, value.size, 1, 1), value, gradient) for value, gradient in learned]
        self.kernels = [kernel for block in self._blocks for kernel in block.kernels]
        self.workspace_bytes = max(kernel.workspace_bytes for kernel in self.kernels)
        self._workspace = cupy.cuda.alloc(self.workspace_bytes) if self.workspace_bytes else None

    def step(self, targets: Array) -> None:
        """Train on `images`; `targets` has a row of 0 and 1 for the class of each."""
        handle, rows = self._handle, self._rows
        for block in self._blocks:
            block.forward(self._workspace)
        self._features.dot(self._v, out=self._logits)
        logits, found, gradient = (each.data.ptr for each in (self._logits, self.probabilities, self._dlogits))
        cudnn.addTensor_v3(handle, at(1), self._row, self._c.data.ptr, at(1), rows, logits)
        softmax = (cudnn.CUDNN_SOFTMAX_ACCURATE, cudnn.CUDNN_SOFTMAX_MODE_INSTANCE)
        cudnn.softmaxForward(handle, *softmax, at(1), rows, logits, at(0), rows, found)
        # The gradient of the mean cross-entropy: (probabilities - targets) / N
        cudnn.addTensor_v3(handle, at(1 / self._batch), rows, found, at(0), rows, gradient)
        cudnn.addTensor_v3(handle, at(-1 / self._batch), rows, targets.data.ptr, at(1), rows, gradient)
        cudnn.convolutionBackwardBias(handle, at(1), rows, gradient, at(0), self._row, self._dc.data.ptr)
        self._features.T.dot(self._dlogits, out=self._dv)
        self._dlogits.dot(self._v.T, out=self._dfeatures)
        for block in reversed(self._blocks):
            block.backward(self._workspace)
        for descriptor, value, change in self._learned:
            arguments = (descriptor, change.data.ptr, at(1), descriptor, value.data.ptr)
            cudnn.addTensor_v3(handle, at(-self._rate), *arguments)

    def loss(self, labels: np.ndarray[Any, Any]) -> float:
        """Return the mean cross-entropy of the last step, with the weights before the step."""
        found = self.probabilities.get().astype(np.float64)[np.arange(len(labels)), labels]
        return float(-np.log(np.maximum(found, 1e-300)).mean())


def initial_weights(rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Return random filters (He et al.) of each block, and the matrix of the fully connected layer."""
    weights, channels = [], COLOURS
    for filters, kernel in BLOCKS:
        deviation = (2 / (channels * kernel * kernel)) ** 0.5
        weights.append(rng.normal(0, deviation, (filters, channels, kernel, kernel)).astype(np.float32))
        channels = filters
    features = channels * (SIZE // 2 ** len(BLOCKS)) ** 2
    return [*weights, rng.normal(0, 0.1 * features**-0.5, (features, CLASSES)).astype(np.float32)]
