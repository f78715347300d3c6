"""Trains a small CNN with CuPy arrays through `ucudnn.cudnn`: on plain cuDNN and in micro-batches, side by side.

    python -m bench.gpu.train_cnn                                     # needs a GPU
    python -m bench.gpu.train_cnn --workspace 16MiB --batch 128 --steps 100
    python -m bench.gpu.train_cnn --candidates legacy --math fma      # cuDNN's legacy algorithms, no TF32
    python -m bench.gpu.train_cnn --find                              # plain cuDNN measures its algorithms as well

Three convolution layers with bias, ReLU and max pooling, a fully connected layer, softmax cross-entropy and SGD, on
images that are one of ten random templates with noise. Everything but the matrix products is a function of
`ucudnn.cudnn`, and the network knows only the address of its handle: one is a cudnnHandle_t as cuDNN makes it, on which
each convolution takes the first legacy algorithm of cudnnGetConvolution*Algorithm_v7 (with --find: of cudnnFind...)
that fits the workspace limit; the other is a μ-cuDNN handle with the same limit. Both start from the same weights, see
the same batches and step in turn, each first every other time; times are of the GPU, between events. Losses, times and
workspaces are printed and written to bench/results/gpu/train_cnn.json.

Losses differ by rounding only: at the first step by the order of additions (and by what TF32 rounds differently in
different algorithms, unless --math fma), and then by what training makes of that difference.
"""

import argparse
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.tools.results import RESULTS, save
from ucudnn import Handle, UcudnnError, cudnn
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module
from ucudnn.cudnn.loading import library
from ucudnn.units import parse_bytes

SIZE, COLOURS, CLASSES = 64, 3, 10
BLOCKS = ((64, 5), (192, 5), (384, 3))  # filters and their height of each convolution; all followed by pooling
SETS = 8  # batches that are made once and seen again and again
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
        handle: address of the handle, plain or μ-cuDNN's.
        limit: bytes of workspace for each convolution.
        math_type: of the convolution descriptors.
        find: whether to measure algorithms with find...AlgorithmEx, or to ask get...Algorithm_v7.
    """

    handle: int
    limit: int
    math_type: int
    find: bool


class Kernel:
    """One operation of one layer, as frameworks keep it: its convolution descriptor, algorithm and workspace size.

    Args:
        setup: how to choose.
        operation: 'Forward', 'BackwardData' or 'BackwardFilter'.
        descriptors: what is read and what is written, in cuDNN's order, the convolution's left out.
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
        """Compute what is written from what is read."""
        a, b, c = self._descriptors
        inputs = (a, first.data.ptr, b, second.data.ptr, self.convolution, self.algorithm)
        scratch = (workspace.ptr if workspace else 0, self.workspace_bytes)
        self._call(self._handle, at(1), *inputs, *scratch, at(0), c, written.data.ptr)


class Block:
    """Convolution, bias, ReLU and 2 x 2 max pooling, with all that forward and backward keep.

    Args:
        cupy: CuPy.
        setup: how to choose algorithms.
        x: input, shape (N, C, H, W); written by whoever comes before.
        weights: filters (K, C, R, R) on the host.
        dx: gradient of the input, or None where nobody wants it.
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
        """Train on `images`, of which targets are the classes as rows of 0 and 1."""
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
        """Return the mean cross-entropy of the last step, before it changed the weights."""
        found = self.probabilities.get().astype(np.float64)[np.arange(len(labels)), labels]
        return float(-np.log(np.maximum(found, 1e-300)).mean())


def initial_weights(rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Return random filters (He et al.), and a small matrix."""
    weights, channels = [], COLOURS
    for filters, kernel in BLOCKS:
        deviation = (2 / (channels * kernel * kernel)) ** 0.5
        weights.append(rng.normal(0, deviation, (filters, channels, kernel, kernel)).astype(np.float32))
        channels = filters
    features = channels * (SIZE // 2 ** len(BLOCKS)) ** 2
    return [*weights, rng.normal(0, 0.1 * features**-0.5, (features, CLASSES)).astype(np.float32)]


def batches(rng: np.random.Generator, batch: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return images of unit variance, each a template of its class with some noise, and their classes."""
    templates = rng.normal(0, 1, (CLASSES, COLOURS, SIZE, SIZE)).astype(np.float32)
    made = []
    for _ in range(SETS):
        labels = rng.integers(0, CLASSES, batch)
        noise = rng.standard_normal((batch, COLOURS, SIZE, SIZE), dtype=np.float32)
        made.append((np.float32(0.9) * templates[labels] + np.float32(0.4) * noise, labels))
    return made


def timed(cupy: Any, run: Callable[[], None]) -> float:
    """Return the GPU's milliseconds of what a call queues."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end))


def train(cupy: Any, networks: dict[str, Network], arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Step the networks in turn; return their losses and times of each step."""
    data = batches(np.random.default_rng(1), arguments.batch)
    on_gpu = [
        (cupy.asarray(images), cupy.asarray(np.eye(CLASSES, dtype=np.float32)[labels])) for images, labels in data
    ]
    records = []
    print("step  plain loss   ucudnn loss   relative difference   plain ms  ucudnn ms")
    for number in range(arguments.steps):
        images, targets = on_gpu[number % SETS]
        record: dict[str, float] = {"step": number}
        names = list(networks) if number % 2 else list(reversed(networks))
        for name in names:
            network = networks[name]
            network.images.data.copy_from_device(images.data, images.nbytes)
            record[f"{name}_ms"] = timed(cupy, partial(network.step, targets))
            record[f"{name}_loss"] = network.loss(data[number % SETS][1])
        plain, micro = record["plain_loss"], record["ucudnn_loss"]
        record["difference"] = abs(plain - micro) / abs(plain)
        records.append(record)
        if number < 5 or number % 10 == 9:
            print(
                f"{number:4}  {plain:10.7f}    {micro:10.7f}   {record['difference']:19.1e}"
                f" {record['plain_ms']:10.3f} {record['ucudnn_ms']:10.3f}",
                flush=True,
            )
    return records


def _version() -> str:
    try:
        return version("ucudnn")
    except PackageNotFoundError:
        return "source tree"


def main() -> None:
    """Train both networks, print and write what they did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps of each network (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size (%(default)s)")
    parser.add_argument("--workspace", default="64MiB", help="limit of each convolution, of both (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-5, help="learning rate (%(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps that do not count in the medians (%(default)s)")
    parser.add_argument("--math", choices=("tf32", "fma"), default="tf32", help="whether TF32 is allowed (%(default)s)")
    parser.add_argument("--candidates", default="graph", help="ucudnn's: best, graph, legacy or every (%(default)s)")
    parser.add_argument("--policy", help="ucudnn's batch-size policy: undivided, powerOfTwo (the default) or all")
    parser.add_argument("--find", action="store_true", help="let plain cuDNN measure its algorithms before it chooses")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu/train_cnn.json")
    arguments = parser.parse_args()
    if arguments.steps <= arguments.warmup:
        parser.error("--steps must be more than --warmup")
    limit = parse_bytes(arguments.workspace)
    cupy = cupy_module()
    owner = Handle(backend=f"cudnn:{arguments.candidates}", workspace_limit=limit, policy=arguments.policy)
    # What cuDNN itself makes is unknown to ucudnn.cudnn: its convolutions stay whole.
    handles = {"plain": library().call("cudnnCreate"), "ucudnn": cudnn.adopt(owner)}
    math_type = cudnn.CUDNN_FMA_MATH if arguments.math == "fma" else cudnn.CUDNN_DEFAULT_MATH
    weights = initial_weights(np.random.default_rng(0))
    networks = {
        name: Network(
            cupy,
            Setup(handle=handle, limit=limit, math_type=math_type, find=arguments.find),
            arguments.batch,
            weights,
            arguments.rate,
        )
        for name, handle in handles.items()
    }
    start = perf_counter()
    owner.optimize()
    planning = perf_counter() - start
    records = train(cupy, networks, arguments)
    counted = records[arguments.warmup :]
    times = {name: median(record[f"{name}_ms"] for record in counted) for name in networks}
    differences = [record["difference"] for record in records]
    held = {"plain": networks["plain"].workspace_bytes, "ucudnn": owner.workspace_bytes}
    speedup = times["plain"] / times["ucudnn"]
    answer = {
        "conditions": {**owner.backend.conditions(), "ucudnn": _version(), "numpy": np.__version__},
        "arguments": {name: value for name, value in vars(arguments).items() if name != "out"},
        "median_ms": times,
        "speedup": speedup,
        "workspace_bytes": held,
        "plain_kernels": [
            {"operation": each.operation, "algorithm": each.algorithm, "workspace_bytes": each.workspace_bytes}
            for each in networks["plain"].kernels
        ],
        "ucudnn_report": owner.report().to_dict(),
        "planning_seconds": planning,
        "first_difference": differences[0],
        "largest_difference": max(differences),
        "steps": records,
    }
    save(arguments.out, answer)
    print(
        f"{owner.backend.conditions()['device']}, cuDNN {owner.backend.conditions()['cudnn']}, batch {arguments.batch}"
    )
    print(f"loss: {records[0]['plain_loss']:.4f} -> plain {records[-1]['plain_loss']:.4f},", end=" ")
    print(
        f"ucudnn {records[-1]['ucudnn_loss']:.4f}; relative difference {differences[0]:.1e} at the first step,", end=" "
    )
    print(f"{max(differences):.1e} at most")
    print(f"step, median of {len(counted)}: plain {times['plain']:.3f} ms, ucudnn {times['ucudnn']:.3f} ms,", end=" ")
    print(f"{speedup:.2f}x; planned in {planning:.1f} s")
    print(
        f"workspace of at most {limit / 2**20:g} MiB: plain {held['plain'] / 2**20:.1f} MiB,"
        f" ucudnn {held['ucudnn'] / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    try:
        main()
    except UcudnnError as error:
        sys.exit(f"error: {error}")
