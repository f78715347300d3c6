"""cuDNN's legacy API: the algorithms of cudnnConvolutionForward, ...BackwardData and ...BackwardFilter.

A bias is added by cudnnAddTensor, after an algorithm of either API.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cudnn.algorithms.operation_graph import round_up
from ucudnn.backends.cudnn.algorithms.wrapped_call import Filters, PartAddresses, WrappedCall, Wrapping
from ucudnn.backends.cudnn.api.enums import (
    CROSS_CORRELATION,
    DATA_TYPES,
    DEFAULT_MATH,
    FMA_MATH,
    TENSOR_OP_MATH,
    NumericalNote,
)
from ucudnn.backends.cudnn.api.library import HostScalar, Library
from ucudnn.backends.cudnn.api.tensor_shapes import shapes_of
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.bounded import BoundedDict
from ucudnn.errors import BackendError, CudnnError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm


def _numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


ALGORITHMS: dict[Operation, dict[str, int]] = {
    Operation.FORWARD: _numbered(
        *("IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM", "GEMM", "DIRECT"),
        *("FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"),
    ),
    Operation.BACKWARD_DATA: _numbered("ALGO_0", "ALGO_1", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"),
    Operation.BACKWARD_FILTER: _numbered(
        *("ALGO_0", "ALGO_1", "FFT", "ALGO_3", "WINOGRAD", "WINOGRAD_NONFUSED", "FFT_TILING")
    ),
}
"""cudnnConvolutionFwdAlgo_t, ...BwdDataAlgo_t and ...BwdFilterAlgo_t by name."""

NONDETERMINISTIC = {
    (Operation.BACKWARD_DATA, "ALGO_0"),
    (Operation.BACKWARD_FILTER, "ALGO_0"),
    (Operation.BACKWARD_FILTER, "ALGO_3"),
}
"""Algorithms that add in an order that changes from run to run."""

HALF = "+half"
"""The end of the name of a legacy algorithm that sums products of 16 bits in 16 bits, as a program may ask of cuDNN."""

ADDED = "+added"
"""The end of the name of an algorithm after which another kernel adds the bias."""

ADDING = Wrapping(ADDED, attrgetter("biased"), ConvolutionProblem.without_bias, lambda _: 0)
"""Adds a bias."""

_MOST_SCALARS = 64


def legacy_number(problem: ConvolutionProblem, algorithm: str) -> int:
    """Return cuDNN's number of a legacy algorithm; only float16 is summed in 16 bits."""
    numbers = ALGORITHMS[problem.operation]
    number = numbers.get(algorithm.removesuffix(HALF))
    if number is None or (algorithm.endswith(HALF) and problem.dtype is not DataType.FLOAT16):
        raise UnsupportedProblemError(
            f"{algorithm} is not a legacy algorithm of {problem.operation.value} in {problem.dtype.value}:"
            f" {', '.join(numbers)}"
        )
    return number


@final
class _OwnedDescriptors:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._made: list[tuple[str, int]] = []

    def tensor(self, dtype: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
        tensor = self.create("Tensor")
        try:
            arrays = [array("i", sizes), array("i", strides)]
        except OverflowError as error:
            raise UnsupportedProblemError(f"strides {strides} are too large for the legacy API") from error
        addresses = (values.buffer_info()[0] for values in arrays)
        self._library.call("cudnnSetTensorNdDescriptor", tensor, dtype, len(sizes), *addresses)
        return tensor

    def create(self, kind: str) -> int:
        address: int = self._library.call(f"cudnnCreate{kind}Descriptor")
        self._made.append((kind, address))
        return address

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            for kind, address in self._made:
                self._library.function(f"cudnnDestroy{kind}Descriptor")(address)


@final
class LegacyDescriptors:
    """The descriptors of one problem: x, w and y, and the convolution with its groups and math type."""

    def __init__(self, library: Library, problem: ConvolutionProblem, *, half: bool = False) -> None:
        self._own = own = _OwnedDescriptors(library)
        shapes = shapes_of(problem)
        if shapes.post_padding != shapes.padding:
            raise UnsupportedProblemError(f"the legacy API pads both sides alike: {problem}")
        dtype = DATA_TYPES[problem.dtype]
        self.x = own.tensor(dtype, *shapes.x)
        self.y = own.tensor(dtype, *shapes.y)
        self.w = own.create("Filter")
        last = int(problem.layout.channels_last)
        sizes = array("i", shapes.w[0])
        library.call("cudnnSetFilterNdDescriptor", self.w, dtype, last, len(sizes), sizes.buffer_info()[0])
        self.convolution = own.create("Convolution")
        wide = DataType.FLOAT64 if problem.dtype is DataType.FLOAT64 else DataType.FLOAT32
        compute = DATA_TYPES[DataType.FLOAT16 if half else wide]
        parameters = [array("i", values) for values in (shapes.padding, shapes.stride, shapes.dilation)]
        library.call(
            "cudnnSetConvolutionNdDescriptor",
            self.convolution,
            len(shapes.padding),
            *(values.buffer_info()[0] for values in parameters),
            CROSS_CORRELATION,
            compute,
        )
        library.call("cudnnSetConvolutionGroupCount", self.convolution, problem.groups)
        math_type = TENSOR_OP_MATH if problem.dtype.has_16_bits else DEFAULT_MATH
        math_type = FMA_MATH if problem.math is MathMode.FMA else math_type
        library.call("cudnnSetConvolutionMathType", self.convolution, math_type)


def legacy_algorithms(library: Library, handle: int, problem: ConvolutionProblem) -> list[Algorithm]:
    """Return the legacy algorithms that compute a problem, with their workspaces.

    cudnnGetConvolution*WorkspaceSize tells the workspaces, and which algorithms apply. For float16, algorithms are also
    listed with sums of 16 bits. Their note has each of their outputs checked at every size.
    """
    found = _listed(library, handle, problem, half=False)
    return found + _listed(library, handle, problem, half=True) if problem.dtype is DataType.FLOAT16 else found


def _listed(library: Library, handle: int, problem: ConvolutionProblem, *, half: bool) -> list[Algorithm]:
    try:
        descriptors = LegacyDescriptors(library, problem, half=half)
    except BackendError:
        return []  # the legacy API cannot express the problem
    found = []
    for name in ALGORITHMS[problem.operation]:
        if problem.deterministic and (problem.operation, name) in NONDETERMINISTIC:
            continue
        try:
            size = _workspace_bytes(library, handle, problem, descriptors, name)
        except CudnnError:
            continue  # cuDNN reports an error if the algorithm does not apply
        notes = ("NONDETERMINISTIC",) if (problem.operation, name) in NONDETERMINISTIC else ()
        if half:
            name, notes = name + HALF, (*notes, NumericalNote.REDUCED_PRECISION_REDUCTION.name)
        found.append(Algorithm(name=name, workspace_bytes=round_up(size), api="legacy", notes=notes))
    return found


def _in_order(operation: Operation, x: int, w: int, y: int) -> tuple[int, int, int]:
    """Return the two inputs and the output in the order in which cuDNN's functions take them."""
    if operation is Operation.FORWARD:
        return x, w, y
    return (w, y, x) if operation is Operation.BACKWARD_DATA else (x, y, w)


def _workspace_bytes(
    library: Library, handle: int, problem: ConvolutionProblem, descriptors: LegacyDescriptors, name: str
) -> int:
    first, second, output = _in_order(problem.operation, descriptors.x, descriptors.w, descriptors.y)
    size: int = library.call(
        f"cudnnGetConvolution{problem.operation.value}WorkspaceSize",
        handle,
        first,
        second,
        descriptors.convolution,
        output,
        legacy_number(problem, name),
    )
    return size


@final
class LegacyCall(PreparedCall):
    """A legacy algorithm for one problem."""

    def __init__(self, library: Library, handle: int, problem: ConvolutionProblem, algorithm: str) -> None:
        self._number = legacy_number(problem, algorithm)
        self._library = library
        self._handle = handle
        self._problem = problem
        self._algorithm = algorithm
        self._descriptors = LegacyDescriptors(library, problem, half=algorithm.endswith(HALF))
        self._workspace_bytes = _workspace_bytes(library, handle, problem, self._descriptors, algorithm)
        self.workspace_bytes = round_up(self._workspace_bytes)
        self._run: Callable[..., int] = library.function(f"cudnnConvolution{problem.operation.value}")
        self._addresses = PartAddresses(problem)
        self._double = problem.dtype is DataType.FLOAT64
        self._scalars: BoundedDict[float, HostScalar] = BoundedDict(_MOST_SCALARS)

    def launch(
        self, x: int, w: int, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> None:
        x, y = self._addresses.at(x, y, offset)
        operation, own = self._problem.operation, self._descriptors
        first, second, output = _in_order(operation, own.x, own.w, own.y)
        a, b, c = _in_order(operation, x, w, y)
        alpha, beta = self._scalar(scaling.alpha), self._scalar(scaling.beta)  # alive until cuDNN has read them
        status = self._run(
            self._handle,
            alpha.address,
            first,
            a,
            second,
            b,
            own.convolution,
            self._number,
            workspace.address,
            min(workspace.size_bytes, self._workspace_bytes),
            beta.address,
            output,
            c,
        )
        if status:
            raise self._library.error(status, f"{self._algorithm} for {self._problem}")

    def _scalar(self, value: float) -> HostScalar:
        scalar = self._scalars.get(value)
        if scalar is None:
            scalar = self._scalars[value] = HostScalar(value, double=self._double)
        return scalar


@final
class AddedBiasCall(WrappedCall):
    """A call of any algorithm, after which another kernel adds a bias (cudnnAddTensor), which is not scaled."""

    def __init__(
        self, library: Library, handle: int, problem: ConvolutionProblem, call: PreparedCall, call_bytes: int
    ) -> None:
        super().__init__(problem, call, call_bytes)
        self._library = library
        self._handle = handle
        self._own = own = _OwnedDescriptors(library)
        shapes, dtype = shapes_of(problem), DATA_TYPES[problem.dtype]
        self._bias = own.tensor(dtype, *shapes.bias)
        self._y = own.tensor(dtype, *shapes.y)
        self._add: Callable[..., int] = library.function("cudnnAddTensor")
        self._one = HostScalar(1.0, double=problem.dtype is DataType.FLOAT64)

    def bind(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> Callable[[], None]:
        assert isinstance(w, BiasedFilters)
        convolve = self._call.bind(x, w.w, y, workspace, offset, scaling)
        return partial(self._run, convolve, w.bias, self._addresses.at(x, y, offset)[1])

    def _run(self, convolve: Callable[[], None], bias: int, y: int) -> None:
        convolve()
        one = self._one.address
        status = self._add(self._handle, one, self._bias, bias, one, self._y, y)
        if status:
            raise self._library.error(status, f"cudnnAddTensor for {self._problem}")
