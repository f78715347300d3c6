"""find..., get... and workspace sizes of the three convolution operations.

A handle of `create` registers the kernel, plans it at its first run, and answers with virtual algorithms, for which the
caller need not allocate workspace (paper, section 3.4). Algorithm 0 does not promise determinism. Algorithm 1, which is
listed if the caller requests more than one, repeats its results bit for bit. A convolution takes the number of one of
cuDNN's deterministic algorithms, other than 0, as a request for determinism (see `wants_determinism`).

cuDNN itself answers for handles that `create` did not make, and for convolutions that no problem can express.
"""
# ruff: noqa: N815, N816  # names are those of cuDNN and CuPy

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import iter_unpack
from typing import NamedTuple, cast, final

from ucudnn.backends.cudnn.api.described import DescribedProblem
from ucudnn.cudnn.constants import (
    CUDNN_CONVOLUTION_FWD_NO_WORKSPACE,
    CUDNN_CONVOLUTION_FWD_PREFER_FASTEST,
    CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT,
    CUDNN_DETERMINISTIC,
    CUDNN_NON_DETERMINISTIC,
    CUDNN_STATUS_BAD_PARAM,
    CUDNN_STATUS_NOT_SUPPORTED,
    CUDNN_STATUS_SUCCESS,
)
from ucudnn.cudnn.handles import MicroHandle, micro_handle
from ucudnn.cudnn.loading import call
from ucudnn.cudnn.signatures import c_name, named
from ucudnn.errors import CudnnError
from ucudnn.problem import Operation

__all__ = [
    "CuDNNAlgoPerf",
    "findConvolutionBackwardDataAlgorithm",
    "findConvolutionBackwardDataAlgorithmEx",
    "findConvolutionBackwardDataAlgorithmEx_v7",
    "findConvolutionBackwardFilterAlgorithm",
    "findConvolutionBackwardFilterAlgorithmEx",
    "findConvolutionBackwardFilterAlgorithmEx_v7",
    "findConvolutionForwardAlgorithm",
    "findConvolutionForwardAlgorithmEx",
    "findConvolutionForwardAlgorithmEx_v7",
    "getConvolutionBackwardDataAlgorithm_v6",
    "getConvolutionBackwardDataAlgorithm_v7",
    "getConvolutionBackwardDataWorkspaceSize",
    "getConvolutionBackwardFilterAlgorithm_v6",
    "getConvolutionBackwardFilterAlgorithm_v7",
    "getConvolutionBackwardFilterWorkspaceSize",
    "getConvolutionForwardAlgorithm_v6",
    "getConvolutionForwardAlgorithm_v7",
    "getConvolutionForwardWorkspaceSize",
]


VIRTUAL, VIRTUAL_DETERMINISTIC = range(2)
"""The virtual algorithms: the fastest configuration within the limit, and one that repeats its results bit for bit."""

_NOT_DETERMINISTIC = {
    Operation.FORWARD: {VIRTUAL},
    Operation.BACKWARD_DATA: {VIRTUAL},
    Operation.BACKWARD_FILTER: {VIRTUAL, 3},
}

# cudnnConvolution...AlgoPerf_t: algo, status, time, memory, determinism, mathType and three reserved ints
_PERF, _PERF_BYTES = "=iif4xQii16x", 48
_NOT_MEASURED = -1.0  # the answer of cuDNN's own get..._v7


@final
@dataclass(frozen=True, slots=True)
class CuDNNAlgoPerf:
    """An algorithm for a convolution (cudnnConvolutionFwdAlgoPerf_t, and those of the other operations).

    Attributes:
        algo: number of the algorithm.
        status: CUDNN_STATUS_SUCCESS, or the reason why it cannot be used.
        time: milliseconds, or -1 if it was not measured.
        memory: bytes of workspace that the caller must give.
        determinism: CUDNN_DETERMINISTIC or CUDNN_NON_DETERMINISTIC.
        mathType: the math type that it is meant for.
    """

    algo: int
    status: int
    time: float
    memory: int
    determinism: int
    mathType: int


class Descriptors(NamedTuple):
    """The four descriptors of a convolution call."""

    x: int
    w: int
    convolution: int
    y: int


def in_order(operation: Operation, first: int, second: int, convolution: int, written: int) -> Descriptors:
    """Return descriptors by name, from cuDNN's order of arguments, in which inputs come before the output."""
    if operation is Operation.FORWARD:
        return Descriptors(first, second, convolution, written)
    if operation is Operation.BACKWARD_DATA:
        return Descriptors(x=written, w=first, convolution=convolution, y=second)
    return Descriptors(x=first, w=written, convolution=convolution, y=second)


def wants_determinism(operation: Operation, algorithm: int) -> bool:
    """Return whether the algorithm's number that a caller gives to a convolution requests deterministic results."""
    return algorithm not in _NOT_DETERMINISTIC[operation]


def ask(handle: int, operation: Operation, descriptors: Descriptors) -> tuple[MicroHandle, DescribedProblem] | None:
    """Return the μ-cuDNN handle and the problem, or None if cuDNN must answer."""
    micro = micro_handle(handle)
    if micro is None:
        return None
    found = micro.described(operation, *descriptors)
    return None if found is None else (micro, found)


def choose(
    handle: int, operation: Operation, descriptors: tuple[int, int, int, int], limit: int | None, deterministic: bool
) -> CuDNNAlgoPerf:
    """Return the algorithm to use within a workspace limit, which is then the kernel's limit.

    The descriptors are in cuDNN's order of arguments. Results of a deterministic algorithm repeat bit for bit.

    Raises:
        CudnnError: CUDNN_STATUS_NOT_SUPPORTED if a plain handle has no algorithm within the limit.
    """
    virtual = _virtual(handle, operation, descriptors, 2, limit, deterministic=deterministic)
    if virtual:
        return virtual[deterministic]
    for perf in _plain(f"cudnnGetConvolution{operation.value}Algorithm_v7", (handle, *descriptors), 16):
        fits = limit is None or perf.memory <= limit
        if perf.status == CUDNN_STATUS_SUCCESS and fits and (perf.determinism or not deterministic):
            return perf
    raise CudnnError(
        CUDNN_STATUS_NOT_SUPPORTED,
        f"CUDNN_STATUS_NOT_SUPPORTED: no {'deterministic ' if deterministic else ''}{operation.value} algorithm"
        f" with a workspace of {limit} bytes or less",
    )


def _virtual(
    handle: int,
    operation: Operation,
    descriptors: tuple[int, int, int, int],
    count: int,
    limit: int | None = None,
    *,
    deterministic: bool = False,
) -> list[CuDNNAlgoPerf]:
    """Register a kernel, and return its virtual algorithms; none if cuDNN must answer."""
    answer = ask(handle, operation, in_order(operation, *descriptors))
    if answer is None:
        return []
    micro, found = answer
    micro.register(found, limit, deterministic=deterministic)
    kinds = ((VIRTUAL, CUDNN_NON_DETERMINISTIC), (VIRTUAL_DETERMINISTIC, CUDNN_DETERMINISTIC))
    return [
        CuDNNAlgoPerf(number, CUDNN_STATUS_SUCCESS, _NOT_MEASURED, 0, determinism, found.math_type)
        for number, determinism in kinds[:count]
    ]


def _plain(function: str, arguments: Sequence[int], count: int, *workspace: int) -> list[CuDNNAlgoPerf]:
    results = array("b", bytes(count * _PERF_BYTES))
    returned = call(function, *arguments, count, results.buffer_info()[0], *workspace)
    return [CuDNNAlgoPerf(*each) for each in iter_unpack(_PERF, results[: returned * _PERF_BYTES])]


def _bad_param(name: str, what: str) -> CudnnError:
    return CudnnError(CUDNN_STATUS_BAD_PARAM, f"CUDNN_STATUS_BAD_PARAM from {name}: {what}")


def _lister(
    operation: Operation, descriptors: str, form: str = "findConvolution{}Algorithm"
) -> Callable[..., list[CuDNNAlgoPerf]]:
    """Return a function find...Algorithm or get...Algorithm_v7, which state no limit."""
    name = form.format(operation.value)
    function = f"cudnn{name[0].upper()}{name[1:]}"

    def body(handle: int, a: int, b: int, c: int, d: int, count: int) -> list[CuDNNAlgoPerf]:
        if count < 1:
            raise _bad_param(name, f"requestedAlgoCount is {count}")
        return _virtual(handle, operation, (a, b, c, d), count) or _plain(function, (handle, a, b, c, d), count)

    return named(f"{name}(handle {descriptors} requestedAlgoCount)", body, _LIST.format(operation.value, function))


def _finder(operation: Operation, tensors: str, suffix: str = "") -> Callable[..., list[CuDNNAlgoPerf]]:
    """Return a function find...AlgorithmEx, in which workSpaceSizeInBytes states the limit."""
    name, function = (f"{verb}Convolution{operation.value}AlgorithmEx" for verb in ("find", "cudnnFind"))
    name += suffix

    def body(handle: int, *arguments: int) -> list[CuDNNAlgoPerf]:
        *inputs, count, workspace, size = arguments
        first, _, second, _, convolution, written, _ = inputs
        if count < 1:
            raise _bad_param(name, f"requestedAlgoCount is {count}")
        virtual = _virtual(handle, operation, (first, second, convolution, written), count, size)
        return virtual or _plain(function, (handle, *inputs), count, workspace, size)

    declaration = f"{name}(handle {tensors} requestedAlgoCount workSpace workSpaceSizeInBytes)"
    return named(declaration, body, _LIST.format(operation.value, function))


def _picker(operation: Operation, descriptors: str) -> Callable[..., int]:
    """Return a function get...Algorithm_v6, which cuDNN 8 removed; get...Algorithm_v7 answers for it."""
    name = f"getConvolution{operation.value}Algorithm_v6"

    def body(handle: int, a: int, b: int, c: int, d: int, preference: int, limit: int) -> int:
        limits = {
            CUDNN_CONVOLUTION_FWD_NO_WORKSPACE: 0,
            CUDNN_CONVOLUTION_FWD_PREFER_FASTEST: None,
            CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT: limit,
        }
        if preference not in limits:
            raise _bad_param(name, f"preference is {preference}")
        return choose(handle, operation, (a, b, c, d), limits[preference], deterministic=False).algo

    return named(f"{name}(handle {descriptors} preference memoryLimitInbytes)", body, _PICK.format(operation.value))


def _sizer(operation: Operation, descriptors: str) -> Callable[..., int]:
    name = f"getConvolution{operation.value}WorkspaceSize"
    function = c_name(name)

    def body(handle: int, a: int, b: int, c: int, d: int, algorithm: int) -> int:
        if ask(handle, operation, in_order(operation, a, b, c, d)) is not None:
            return 0
        return cast("int", call(function, handle, a, b, c, d, algorithm))

    return named(f"{name}(handle {descriptors} algo)", body, _SIZE.format(operation.value, function))


_LIST = """Return algorithms for {} as a list of CuDNNAlgoPerf, fastest first ({}).

A handle of `create` registers the kernel and returns virtual algorithms, which need no workspace from the caller.

Raises:
    CudnnError: if the count is below 1, or cuDNN reports an error.
"""
_PICK = """Return the number of an algorithm for {} that meets a preference.

NO_WORKSPACE states a limit of 0, SPECIFY_WORKSPACE_LIMIT one of memoryLimitInbytes, PREFER_FASTEST none.

Raises:
    CudnnError: if the preference is not known, or no algorithm meets it.
"""
_SIZE = """Return the bytes of workspace that the caller must give to {}, 0 for a handle of `create` ({}).

Raises:
    CudnnError: if cuDNN does not have the algorithm for these descriptors.
"""

_GET = "getConvolution{}Algorithm_v7"
_FORWARD, _DATA, _FILTER = Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER

findConvolutionForwardAlgorithm = _lister(_FORWARD, "xDesc wDesc convDesc yDesc")
findConvolutionForwardAlgorithmEx = _finder(_FORWARD, "xDesc x wDesc w convDesc yDesc y")
findConvolutionForwardAlgorithmEx_v7 = _finder(_FORWARD, "xDesc x wDesc w convDesc yDesc y", "_v7")
getConvolutionForwardAlgorithm_v6 = _picker(_FORWARD, "srcDesc filterDesc convDesc destDesc")
getConvolutionForwardAlgorithm_v7 = _lister(_FORWARD, "srcDesc filterDesc convDesc destDesc", _GET)
getConvolutionForwardWorkspaceSize = _sizer(_FORWARD, "srcDesc filterDesc convDesc destDesc")

findConvolutionBackwardFilterAlgorithm = _lister(_FILTER, "xDesc dyDesc convDesc dwDesc")
findConvolutionBackwardFilterAlgorithmEx = _finder(_FILTER, "xDesc x dyDesc dy convDesc dwDesc dw")
findConvolutionBackwardFilterAlgorithmEx_v7 = _finder(_FILTER, "xDesc x dyDesc dy convDesc dwDesc dw", "_v7")
getConvolutionBackwardFilterAlgorithm_v6 = _picker(_FILTER, "srcDesc diffDesc convDesc filterDesc")
getConvolutionBackwardFilterAlgorithm_v7 = _lister(_FILTER, "srcDesc diffDesc convDesc gradDesc", _GET)
getConvolutionBackwardFilterWorkspaceSize = _sizer(_FILTER, "srcDesc diffDesc convDesc filterDesc")

findConvolutionBackwardDataAlgorithm = _lister(_DATA, "wDesc dyDesc convDesc dxDesc")
findConvolutionBackwardDataAlgorithmEx = _finder(_DATA, "wDesc w dyDesc dy convDesc dxDesc dx")
findConvolutionBackwardDataAlgorithmEx_v7 = _finder(_DATA, "wDesc w dyDesc dy convDesc dxDesc dx", "_v7")
getConvolutionBackwardDataAlgorithm_v6 = _picker(_DATA, "filterDesc diffDesc convDesc gradDesc")
getConvolutionBackwardDataAlgorithm_v7 = _lister(_DATA, "filterDesc diffDesc convDesc gradDesc", _GET)
getConvolutionBackwardDataWorkspaceSize = _sizer(_DATA, "filterDesc diffDesc convDesc gradDesc")
