"""`ucudnn.cudnn` on a GPU: convolutions on a micro-batching and on a foreign handle, and cuDNN's own functions."""

from array import array

import numpy as np
import pytest

from tests.support.gpu import Operands, captured, open_or_skip, tolerance
from ucudnn import cudnn
from ucudnn.backends.candidates import Candidates
from ucudnn.cudnn.loading import library
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation

CODES = {DataType.FLOAT32: cudnn.CUDNN_DATA_FLOAT, DataType.FLOAT64: cudnn.CUDNN_DATA_DOUBLE}
ONE, ZERO, HALF = (np.array(value, np.float32) for value in (1, 0, 0.5))


def at(value, dtype=DataType.FLOAT32):
    """Return a host scalar; keep it while its address is used."""
    return np.array(value, np.float64 if dtype is DataType.FLOAT64 else np.float32)


@pytest.fixture(params=["ucudnn", "foreign"])
def handle(request, cupy, monkeypatch):
    open_or_skip(Candidates.GRAPH)
    monkeypatch.setenv("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "256KiB")
    address = cudnn.create() if request.param == "ucudnn" else library().call("cudnnCreate")
    yield address
    cudnn.destroy(address)


def in_order(operation, x, w, y):
    """Return what an operation reads, and what it writes, in the order of cuDNN's arguments."""
    return {
        Operation.FORWARD: (x, w, y),
        Operation.BACKWARD_DATA: (w, y, x),
        Operation.BACKWARD_FILTER: (x, y, w),
    }[operation]


class Described:
    """A problem described by descriptors."""

    def __init__(self, problem, math=0):
        dtype = CODES[problem.dtype]
        self.problem = problem
        self.x, self.y = cudnn.createTensorDescriptor(), cudnn.createTensorDescriptor()
        n, c, h, w = problem.x_shape
        cudnn.setTensor4dDescriptorEx(self.x, dtype, n, c, h, w, problem.x_batch_stride, h * w, w, 1)
        cudnn.setTensor4dDescriptor(self.y, cudnn.CUDNN_TENSOR_NCHW, dtype, *problem.y_shape)
        self.w = cudnn.createFilterDescriptor()
        cudnn.setFilter4dDescriptor_v4(self.w, dtype, cudnn.CUDNN_TENSOR_NCHW, *problem.w_shape)
        self.convolution = cudnn.createConvolutionDescriptor()
        cudnn.setConvolution2dDescriptor_v5(
            self.convolution, *problem.padding, *problem.stride, *problem.dilation, cudnn.CUDNN_CROSS_CORRELATION, dtype
        )
        cudnn.setConvolutionGroupCount(self.convolution, problem.groups)
        cudnn.setConvolutionMathType(self.convolution, math)

    def functions(self):
        """Return what the names of the operation's functions have in common, and its descriptors in their order."""
        operation = self.problem.operation
        first, second, out = in_order(operation, self.x, self.w, self.y)
        return f"Convolution{operation.value}", (first, second, self.convolution, out)

    def run(self, handle, algorithm, workspace, size, alpha, beta, addresses):
        name, (first, second, convolution, out) = self.functions()
        a, b, c = in_order(self.problem.operation, *addresses)
        suffix = "" if self.problem.operation is Operation.FORWARD else "_v3"
        function = getattr(cudnn, name[0].lower() + name[1:] + suffix)
        read = alpha.ctypes.data, first, a, second, b
        function(handle, *read, convolution, algorithm, workspace, size, beta.ctypes.data, out, c)


def problem_of(operation, **values):
    base = dict(batch=16, channels=8, spatial=(14, 13), filters=12, kernel=(3, 3), padding=(1, 1))
    return ConvolutionProblem(operation=operation, **(base | values))


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize(
    "values",
    [
        dict(),
        dict(groups=4, dilation=(2, 1)),
        dict(dtype=DataType.FLOAT64),
        dict(math=MathMode.FMA, stride=(2, 2)),
        dict(x_batch_stride=8 * 14 * 13 + 36),
    ],
    ids=["plain", "groups", "double", "fma", "strided"],
)
def test_convolutions(cupy, handle, operation, values):
    problem = problem_of(operation, **values)
    described = Described(problem, math=3 if problem.math is MathMode.FMA else 0)
    name, descriptors = described.functions()
    (choice, *_) = getattr(cudnn, f"get{name}Algorithm_v7")(handle, *descriptors, 1)
    size = getattr(cudnn, f"get{name}WorkspaceSize")(handle, *descriptors, choice.algo)
    workspace = cupy.empty(max(size, 1), cupy.uint8)
    for alpha, beta in ((1.0, 0.0), (0.5, 0.5)):
        operands = Operands.random(cupy, problem)
        if not beta:
            operands.poison()
        scalars = at(alpha, problem.dtype), at(beta, problem.dtype)
        described.run(handle, choice.algo, workspace.data.ptr, size, *scalars, operands.addresses())
        assert operands.error(cupy, operands.expected(alpha, beta)) <= max(tolerance(problem), 1e-12)


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_all_ways_to_an_algorithm(cupy, handle, operation):
    problem = problem_of(operation, channels=16)
    described = Described(problem)
    name, (first, second, convolution, out) = described.functions()
    operands = Operands.random(cupy, problem)
    a, b, c = in_order(operation, *operands.addresses())
    workspace = cupy.empty(2**20, cupy.uint8)
    own = cudnn.handles.micro_handle(handle) is not None
    answers = [
        getattr(cudnn, f"find{name}Algorithm")(handle, first, second, convolution, out, 3),
        getattr(cudnn, f"get{name}Algorithm_v7")(handle, first, second, convolution, out, 3),
    ]
    for suffix in ("", "_v7"):
        find = getattr(cudnn, f"find{name}AlgorithmEx{suffix}")
        answers.append(find(handle, first, a, second, b, convolution, out, c, 3, workspace.data.ptr, 2**20))
    chosen = {each[0].algo for each in answers}
    for answer in answers:
        assert answer[0].status == 0
        assert answer[0].determinism in (0, 1)
        assert answer[0].memory == 0 if own else 0 <= answer[0].memory < 2**34
    pick = getattr(cudnn, f"get{name}Algorithm_v6")
    for preference, limit in ((0, 0), (1, 0), (2, 2**20)):
        chosen.add(pick(handle, first, second, convolution, out, preference, limit))
    for algorithm in chosen:
        size = getattr(cudnn, f"get{name}WorkspaceSize")(handle, first, second, convolution, out, algorithm)
        room = cupy.empty(max(size, 1), cupy.uint8)
        fresh = Operands.random(cupy, problem)
        fresh.poison()
        described.run(handle, algorithm, room.data.ptr, size, ONE, ZERO, fresh.addresses())
        assert fresh.error(cupy, fresh.expected()) <= tolerance(problem)


def test_a_call_is_captured_and_replayed(cupy, handle):
    problem = problem_of(Operation.FORWARD, filters=16)
    described, operands = Described(problem), Operands.random(cupy, problem)
    described.run(handle, 0, 0, 0, ONE, ZERO, operands.addresses())
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = captured(stream, lambda: described.run(handle, 0, 0, 0, ONE, ZERO, operands.addresses()))
    operands.poison()
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert operands.error(cupy, operands.expected()) <= tolerance(problem)


def random(cupy, *shape):
    return cupy.asarray(np.random.default_rng().random(shape, np.float32) - np.float32(0.5))


def tensor(*shape):
    descriptor = cudnn.createTensorDescriptor()
    cudnn.setTensor4dDescriptor(descriptor, cudnn.CUDNN_TENSOR_NCHW, cudnn.CUDNN_DATA_FLOAT, *shape)
    return descriptor


def close(cupy, found, expected, bound=1e-5):
    return float(cupy.linalg.norm((found - expected).ravel()) / cupy.linalg.norm(expected.ravel())) <= bound


def test_bias_and_its_gradient(cupy, handle):
    y, b = random(cupy, 4, 6, 5, 5), random(cupy, 1, 6, 1, 1)
    expected = y + b
    cudnn.addTensor_v3(
        handle, ONE.ctypes.data, tensor(1, 6, 1, 1), b.data.ptr, ONE.ctypes.data, tensor(*y.shape), y.data.ptr
    )
    assert close(cupy, y, expected)
    db = cupy.full_like(b, float("nan"))
    cudnn.convolutionBackwardBias(
        handle, ONE.ctypes.data, tensor(*y.shape), y.data.ptr, ZERO.ctypes.data, tensor(1, 6, 1, 1), db.data.ptr
    )
    assert close(cupy, db.ravel(), y.sum(axis=(0, 2, 3)))


def test_tensors_are_set_and_scaled(cupy, handle):
    y = cupy.full((2, 3, 4, 5), float("nan"), np.float32)
    value = at(3)
    cudnn.setTensor(handle, tensor(*y.shape), y.data.ptr, value.ctypes.data)
    cudnn.scaleTensor(handle, tensor(*y.shape), y.data.ptr, HALF.ctypes.data)
    assert bool((y == 1.5).all())


@pytest.mark.parametrize("mode", ["MAX", "AVERAGE_COUNT_INCLUDE_PADDING"])
def test_pooling(cupy, handle, mode):
    x = random(cupy, 4, 3, 8, 6)
    y, dy, dx = (
        cupy.full((4, 3, 4, 3), float("nan"), np.float32),
        random(cupy, 4, 3, 4, 3),
        cupy.full_like(x, float("nan")),
    )
    pooling = cudnn.createPoolingDescriptor()
    cudnn.setPooling2dDescriptor_v4(pooling, getattr(cudnn, f"CUDNN_POOLING_{mode}"), 0, 2, 2, 0, 0, 2, 2)
    blocks = x.reshape(4, 3, 4, 2, 3, 2).transpose(0, 1, 2, 4, 3, 5).reshape(4, 3, 4, 3, 4)
    expected = blocks.max(axis=-1) if mode == "MAX" else blocks.mean(axis=-1)
    one, zero = ONE.ctypes.data, ZERO.ctypes.data
    cudnn.poolingForward(handle, pooling, one, tensor(*x.shape), x.data.ptr, zero, tensor(*y.shape), y.data.ptr)
    assert close(cupy, y, expected)
    cudnn.poolingBackward(
        handle, pooling, one, tensor(*y.shape), y.data.ptr, tensor(*y.shape), dy.data.ptr,
        tensor(*x.shape), x.data.ptr, zero, tensor(*x.shape), dx.data.ptr,
    )  # fmt: skip
    share = (blocks == expected[..., None]) if mode == "MAX" else cupy.full_like(blocks, 0.25)
    gradient = (share * dy[..., None]).reshape(4, 3, 4, 3, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(x.shape)
    assert close(cupy, dx, gradient)
    cudnn.destroyPoolingDescriptor(pooling)


@pytest.mark.parametrize("mode", ["RELU", "SIGMOID", "TANH"])
def test_activations(cupy, handle, mode):
    x, dy = random(cupy, 4, 3, 5, 6), random(cupy, 4, 3, 5, 6)
    y, dx = cupy.full_like(x, float("nan")), cupy.full_like(x, float("nan"))
    activation = cudnn.createActivationDescriptor()
    cudnn.setActivationDescriptor(activation, getattr(cudnn, f"CUDNN_ACTIVATION_{mode}"), 0, 0.0)
    one, zero, shape = ONE.ctypes.data, ZERO.ctypes.data, tensor(*x.shape)
    cudnn.activationForward_v4(handle, activation, one, shape, x.data.ptr, zero, shape, y.data.ptr)
    expected, slope = {
        "RELU": (cupy.maximum(x, 0), (x > 0).astype(np.float32)),
        "SIGMOID": (1 / (1 + cupy.exp(-x)), cupy.exp(-x) / (1 + cupy.exp(-x)) ** 2),
        "TANH": (cupy.tanh(x), 1 - cupy.tanh(x) ** 2),
    }[mode]
    assert close(cupy, y, expected)
    cudnn.activationBackward_v4(
        handle, activation, one, shape, y.data.ptr, shape, dy.data.ptr, shape, x.data.ptr, zero, shape, dx.data.ptr
    )
    assert close(cupy, dx, dy * slope)
    cudnn.destroyActivationDescriptor(activation)


def test_softmax(cupy, handle):
    x, dy = random(cupy, 8, 10, 1, 1), random(cupy, 8, 10, 1, 1)
    y, dx = cupy.full_like(x, float("nan")), cupy.full_like(x, float("nan"))
    how = cudnn.CUDNN_SOFTMAX_ACCURATE, cudnn.CUDNN_SOFTMAX_MODE_CHANNEL
    one, zero, shape = ONE.ctypes.data, ZERO.ctypes.data, tensor(*x.shape)
    cudnn.softmaxForward(handle, *how, one, shape, x.data.ptr, zero, shape, y.data.ptr)
    expected = cupy.exp(x) / cupy.exp(x).sum(axis=1, keepdims=True)
    assert close(cupy, y, expected)
    cudnn.softmaxBackward(handle, *how, one, shape, y.data.ptr, shape, dy.data.ptr, zero, shape, dx.data.ptr)
    assert close(cupy, dx, expected * (dy - (dy * expected).sum(axis=1, keepdims=True)))


def test_batch_normalization(cupy, handle):
    x, dy = random(cupy, 8, 5, 6, 6), random(cupy, 8, 5, 6, 6)
    scale, bias = random(cupy, 1, 5, 1, 1) + 1, random(cupy, 1, 5, 1, 1)
    y, dx = cupy.full_like(x, float("nan")), cupy.full_like(x, float("nan"))
    running_mean, running_variance = cupy.zeros_like(scale), cupy.ones_like(scale)
    saved_mean, saved_inverse = cupy.empty_like(scale), cupy.empty_like(scale)
    dscale, dbias = cupy.full_like(scale, float("nan")), cupy.full_like(scale, float("nan"))
    mode, epsilon = cudnn.CUDNN_BATCHNORM_SPATIAL, 1e-4
    one, zero, shape, per = ONE.ctypes.data, ZERO.ctypes.data, tensor(*x.shape), tensor(1, 5, 1, 1)
    cudnn.batchNormalizationForwardTraining(
        handle, mode, one, zero, shape, x.data.ptr, shape, y.data.ptr, per, scale.data.ptr, bias.data.ptr, 1.0,
        running_mean.data.ptr, running_variance.data.ptr, epsilon, saved_mean.data.ptr, saved_inverse.data.ptr,
    )  # fmt: skip
    mean = x.mean(axis=(0, 2, 3), keepdims=True)
    inverse = 1 / cupy.sqrt(x.var(axis=(0, 2, 3), keepdims=True) + epsilon)
    normal = (x - mean) * inverse
    assert close(cupy, y, normal * scale + bias)
    assert close(cupy, saved_inverse, inverse)
    assert close(cupy, running_mean, mean, 1e-4)
    cudnn.batchNormalizationBackward(
        handle, mode, one, zero, one, zero, shape, x.data.ptr, shape, dy.data.ptr, shape, dx.data.ptr, per,
        scale.data.ptr, dscale.data.ptr, dbias.data.ptr, epsilon, saved_mean.data.ptr, saved_inverse.data.ptr,
    )  # fmt: skip
    axes = dict(axis=(0, 2, 3), keepdims=True)
    assert close(cupy, dbias, dy.sum(**axes), 1e-4)
    assert close(cupy, dscale, (dy * normal).sum(**axes), 1e-4)
    expected = scale * inverse * (dy - dy.mean(**axes) - normal * (dy * normal).mean(**axes))
    assert close(cupy, dx, expected, 1e-4)
    cudnn.batchNormalizationForwardInference(
        handle, mode, one, zero, shape, x.data.ptr, shape, y.data.ptr, per, scale.data.ptr, bias.data.ptr,
        running_mean.data.ptr, running_variance.data.ptr, epsilon,
    )  # fmt: skip
    assert close(cupy, y, (x - running_mean) / cupy.sqrt(running_variance + epsilon) * scale + bias)


def test_dropout(cupy, handle):
    x, dy = random(cupy, 16, 8, 8, 8) + 2, random(cupy, 16, 8, 8, 8) + 2
    y, dx = cupy.full_like(x, float("nan")), cupy.full_like(x, float("nan"))
    states = cupy.empty(cudnn.dropoutGetStatesSize(handle), cupy.uint8)
    dropout, shape = cudnn.createDropoutDescriptor(), tensor(*x.shape)
    cudnn.setDropoutDescriptor(dropout, handle, 0.25, states.data.ptr, states.size, 7)
    reserve = cupy.empty(cudnn.getDropoutReserveSpaceSize(shape), cupy.uint8)
    cudnn.dropoutForward(handle, dropout, shape, x.data.ptr, shape, y.data.ptr, reserve.data.ptr, reserve.size)
    cudnn.dropoutBackward(handle, dropout, shape, dy.data.ptr, shape, dx.data.ptr, reserve.data.ptr, reserve.size)
    kept = y != 0
    assert 0.6 < float(kept.mean()) < 0.9
    assert close(cupy, y, x * kept / 0.75)
    assert close(cupy, dx, dy * kept / 0.75)
    cudnn.destroyDropoutDescriptor(dropout)


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
def test_high_level_convolutions(cupy, last, monkeypatch):
    open_or_skip(Candidates.GRAPH)
    monkeypatch.setenv("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "256KiB")
    cudnn.reset_handles()
    layout = cudnn.CUDNN_TENSOR_NHWC if last else cudnn.CUDNN_TENSOR_NCHW
    formats = dict(d_layout=layout, w_layout=layout, auto_tune=True, tensor_core="auto")
    parameters = (1, 1), (1, 1), (1, 1), 1
    x, w, b, dy = random(cupy, 8, 8, 9, 9), random(cupy, 12, 8, 3, 3), random(cupy, 12), random(cupy, 8, 12, 9, 9)

    def arranged(each):
        return cupy.ascontiguousarray(cupy.moveaxis(each, 1, -1)) if last else each

    def back(each):
        return cupy.moveaxis(each, -1, 1) if last else each

    def expected(operation):
        problem = problem_of(operation, batch=8, spatial=(9, 9))
        exact = {name: each.astype(np.float64) for name, each in zip("xwy", (x, w, dy), strict=True)}
        return Operands(problem, {}, {}, exact).expected()

    y, dx, dw = (cupy.full_like(arranged(each), float("nan")) for each in (dy, x, w))
    cudnn.convolution_forward(arranged(x), arranged(w), b, y, *parameters, **formats)
    assert close(cupy, back(y), expected(Operation.FORWARD) + b[:, None, None], 2e-3)
    cudnn.convolution_backward_data(arranged(w), arranged(dy), None, dx, *parameters, deterministic=False, **formats)
    assert close(cupy, back(dx), expected(Operation.BACKWARD_DATA), 2e-3)
    cudnn.convolution_backward_filter(arranged(x), arranged(dy), dw, *parameters, deterministic=True, **formats)
    assert close(cupy, back(dw), expected(Operation.BACKWARD_FILTER), 2e-3)
    cudnn.reset_handles()


def test_volumes_by_nd_descriptors(cupy, handle):
    problem = ConvolutionProblem(
        operation=Operation.FORWARD,
        batch=4,
        channels=4,
        spatial=(5, 6, 7),
        filters=8,
        kernel=(3, 3, 3),
        padding=(1, 1, 1),
    )
    x, y = cudnn.createTensorDescriptor(), cudnn.createTensorDescriptor()
    for descriptor, shape in ((x, problem.x_shape), (y, problem.y_shape)):
        sizes = array("i", shape)
        strides = array("i", [int(np.prod(shape[axis + 1 :])) for axis in range(5)])
        cudnn.setTensorNdDescriptor(descriptor, 0, 5, sizes.buffer_info()[0], strides.buffer_info()[0])
    w, convolution = cudnn.createFilterDescriptor(), cudnn.createConvolutionDescriptor()
    sizes, ones = array("i", problem.w_shape), array("i", (1, 1, 1))
    cudnn.setFilterNdDescriptor_v4(w, 0, cudnn.CUDNN_TENSOR_NCHW, 5, sizes.buffer_info()[0])
    address = ones.buffer_info()[0]
    cudnn.setConvolutionNdDescriptor_v3(convolution, 3, address, address, address, cudnn.CUDNN_CROSS_CORRELATION, 0)
    operands = Operands.random(cupy, problem)
    operands.poison()
    a, b, c = operands.addresses()
    cudnn.convolutionForward(handle, ONE.ctypes.data, x, a, w, b, convolution, 0, 0, 0, ZERO.ctypes.data, y, c)
    assert operands.error(cupy, operands.expected()) <= tolerance(problem)
