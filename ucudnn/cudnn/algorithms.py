"""find..., get... and workspace sizes of the three convolution operations.

A handle of `create` registers the kernel, plans it at its first run, and answers with virtual algorithms, for which the
caller need not allocate workspace (paper, section 3.4). Algorithm 0 does not promise determinism. Algorithm 1, which is
listed if the caller requests more than one, repeats its results bit for bit. A convolution takes the number of one of
cuDNN's deterministic algorithms, other than 0, as a request for determinism (see `wants_determinism`).

cuDNN itself answers for handles that `create` did not make, and for convolutions that no problem can express.
"""
# ruff: noqa: N815, N816  # names are those of cuDNN and CuPy

from array import array
from collections.abc import Callable, Iterable
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
from ucudnn.cudnn.signatures import named
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


VIRTUAL = 0
"""The virtual algorithm: the fastest configuration within the limit."""

VIRTUAL_DETERMINISTIC = 1
"""The virtual algorithm that repeats its results bit for bit."""

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

    Args:
        handle: address of the handle.
        operation: the operation.
        descriptors: the four descriptors in cuDNN's order of arguments.
        limit: workspace limit in bytes; None to state none.
        deterministic: whether results must repeat bit for bit.

    Raises:
        CudnnError: CUDNN_STATUS_NOT_SUPPORTED if a plain handle has no algorithm within the limit.
    """
    answer = ask(handle, operation, in_order(operation, *descriptors))
    if answer is not None:
        micro, found = answer
        micro.register(found, limit, deterministic=deterministic)
        return _virtual(found, 2)[deterministic]
    for perf in _get_plain(operation, handle, *descriptors, 16):
        fits = limit is None or perf.memory <= limit
        if perf.status == CUDNN_STATUS_SUCCESS and fits and (perf.determinism or not deterministic):
            return perf
    raise CudnnError(
        CUDNN_STATUS_NOT_SUPPORTED,
        f"CUDNN_STATUS_NOT_SUPPORTED: no {'deterministic ' if deterministic else ''}{operation.value} algorithm"
        f" with a workspace of {limit} bytes or less",
    )


def _virtual(found: DescribedProblem, count: int) -> list[CuDNNAlgoPerf]:
    kinds = ((VIRTUAL, CUDNN_NON_DETERMINISTIC), (VIRTUAL_DETERMINISTIC, CUDNN_DETERMINISTIC))
    return [
        CuDNNAlgoPerf(number, CUDNN_STATUS_SUCCESS, _NOT_MEASURED, 0, determinism, found.math_type)
        for number, determinism in kinds[:count]
    ]


def _answer(
    name: str,
    operation: Operation,
    handle: int,
    descriptors: tuple[int, int, int, int],
    count: int,
    limit: int | None,
    plain: Callable[[], list[CuDNNAlgoPerf]],
) -> list[CuDNNAlgoPerf]:
    if count < 1:
        raise CudnnError(CUDNN_STATUS_BAD_PARAM, f"CUDNN_STATUS_BAD_PARAM from {name}: requestedAlgoCount is {count}")
    answer = ask(handle, operation, in_order(operation, *descriptors))
    if answer is None:
        return plain()
    micro, found = answer
    micro.register(found, limit)
    return _virtual(found, count)


def _perfs(function: str, arguments: Iterable[int], count: int, *workspace: int) -> list[CuDNNAlgoPerf]:
    results = array("b", bytes(count * _PERF_BYTES))
    returned = call(function, *arguments, count, results.buffer_info()[0], *workspace)
    return [CuDNNAlgoPerf(*each) for each in iter_unpack(_PERF, results[: returned * _PERF_BYTES])]


def _get_plain(operation: Operation, *arguments: int) -> list[CuDNNAlgoPerf]:
    *inputs, count = arguments
    return _perfs(f"cudnnGetConvolution{operation.value}Algorithm_v7", inputs, count)


def _lister(name: str, operation: Operation, function: str, descriptors: str) -> Callable[..., list[CuDNNAlgoPerf]]:
    """Return a function find...Algorithm or get...Algorithm_v7, which state no limit."""

    def body(handle: int, a: int, b: int, c: int, d: int, count: int) -> list[CuDNNAlgoPerf]:
        return _answer(
            name, operation, handle, (a, b, c, d), count, None, lambda: _perfs(function, (handle, a, b, c, d), count)
        )

    return named(name, f"handle {descriptors} requestedAlgoCount", body, _LIST.format(operation.value, function))


def _finder(name: str, operation: Operation, parameters: str) -> Callable[..., list[CuDNNAlgoPerf]]:
    """Return a function find...AlgorithmEx, in which workSpaceSizeInBytes states the limit."""
    function = f"cudnnFindConvolution{operation.value}AlgorithmEx"

    def body(handle: int, *arguments: int) -> list[CuDNNAlgoPerf]:
        *inputs, count, workspace, size = arguments
        first, _, second, _, convolution, written, _ = inputs
        return _answer(
            name,
            operation,
            handle,
            (first, second, convolution, written),
            count,
            size,
            lambda: _perfs(function, (handle, *inputs), count, workspace, size),
        )

    return named(
        name,
        f"handle {parameters} requestedAlgoCount workSpace workSpaceSizeInBytes",
        body,
        _LIST.format(operation.value, function),
    )


def _picker(name: str, operation: Operation, descriptors: str) -> Callable[..., int]:
    """Return a function get...Algorithm_v6, which cuDNN 8 removed; get...Algorithm_v7 answers for it."""

    def body(handle: int, a: int, b: int, c: int, d: int, preference: int, limit: int) -> int:
        limits = {
            CUDNN_CONVOLUTION_FWD_NO_WORKSPACE: 0,
            CUDNN_CONVOLUTION_FWD_PREFER_FASTEST: None,
            CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT: limit,
        }
        if preference not in limits:
            raise CudnnError(CUDNN_STATUS_BAD_PARAM, f"CUDNN_STATUS_BAD_PARAM from {name}: preference is {preference}")
        return choose(handle, operation, (a, b, c, d), limits[preference], deterministic=False).algo

    return named(name, f"handle {descriptors} preference memoryLimitInbytes", body, _PICK.format(operation.value))


def _sizer(name: str, operation: Operation, descriptors: str) -> Callable[..., int]:
    """Return a function get...WorkspaceSize."""
    function = f"cudnnGetConvolution{operation.value}WorkspaceSize"

    def body(handle: int, a: int, b: int, c: int, d: int, algorithm: int) -> int:
        if ask(handle, operation, in_order(operation, a, b, c, d)) is not None:
            return 0
        return cast("int", call(function, handle, a, b, c, d, algorithm))

    return named(name, f"handle {descriptors} algo", body, _SIZE.format(operation.value, function))


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

_FORWARD, _DATA, _FILTER = Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER

findConvolutionForwardAlgorithm = _lister(
    "findConvolutionForwardAlgorithm", _FORWARD, "cudnnFindConvolutionForwardAlgorithm", "xDesc wDesc convDesc yDesc"
)
findConvolutionForwardAlgorithmEx = _finder(
    "findConvolutionForwardAlgorithmEx", _FORWARD, "xDesc x wDesc w convDesc yDesc y"
)
findConvolutionForwardAlgorithmEx_v7 = _finder(
    "findConvolutionForwardAlgorithmEx_v7", _FORWARD, "xDesc x wDesc w convDesc yDesc y"
)
getConvolutionForwardAlgorithm_v6 = _picker(
    "getConvolutionForwardAlgorithm_v6", _FORWARD, "srcDesc filterDesc convDesc destDesc"
)
getConvolutionForwardAlgorithm_v7 = _lister(
    "getConvolutionForwardAlgorithm_v7",
    _FORWARD,
    "cudnnGetConvolutionForwardAlgorithm_v7",
    "srcDesc filterDesc convDesc destDesc",
)
getConvolutionForwardWorkspaceSize = _sizer(
    "getConvolutionForwardWorkspaceSize", _FORWARD, "srcDesc filterDesc convDesc destDesc"
)

findConvolutionBackwardFilterAlgorithm = _lister(
    "findConvolutionBackwardFilterAlgorithm",
    _FILTER,
    "cudnnFindConvolutionBackwardFilterAlgorithm",
    "xDesc dyDesc convDesc dwDesc",
)
findConvolutionBackwardFilterAlgorithmEx = _finder(
    "findConvolutionBackwardFilterAlgorithmEx", _FILTER, "xDesc x dyDesc dy convDesc dwDesc dw"
)
findConvolutionBackwardFilterAlgorithmEx_v7 = _finder(
    "findConvolutionBackwardFilterAlgorithmEx_v7", _FILTER, "xDesc x dyDesc dy convDesc dwDesc dw"
)
getConvolutionBackwardFilterAlgorithm_v6 = _picker(
    "getConvolutionBackwardFilterAlgorithm_v6", _FILTER, "srcDesc diffDesc convDesc filterDesc"
)
getConvolutionBackwardFilterAlgorithm_v7 = _lister(
    "getConvolutionBackwardFilterAlgorithm_v7",
    _FILTER,
    "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
    "srcDesc diffDesc convDesc gradDesc",
)
getConvolutionBackwardFilterWorkspaceSize = _sizer(
    "getConvolutionBackwardFilterWorkspaceSize", _FILTER, "srcDesc diffDesc convDesc filterDesc"
)

findConvolutionBackwardDataAlgorithm = _lister(
    "findConvolutionBackwardDataAlgorithm",
    _DATA,
    "cudnnFindConvolutionBackwardDataAlgorithm",
    "wDesc dyDesc convDesc dxDesc",
)
findConvolutionBackwardDataAlgorithmEx = _finder(
    "findConvolutionBackwardDataAlgorithmEx", _DATA, "wDesc w dyDesc dy convDesc dxDesc dx"
)
findConvolutionBackwardDataAlgorithmEx_v7 = _finder(
    "findConvolutionBackwardDataAlgorithmEx_v7", _DATA, "wDesc w dyDesc dy convDesc dxDesc dx"
)
getConvolutionBackwardDataAlgorithm_v6 = _picker(
    "getConvolutionBackwardDataAlgorithm_v6", _DATA, "filterDesc diffDesc convDesc gradDesc"
)
getConvolutionBackwardDataAlgorithm_v7 = _lister(
    "getConvolutionBackwardDataAlgorithm_v7",
    _DATA,
    "cudnnGetConvolutionBackwardDataAlgorithm_v7",
    "filterDesc diffDesc convDesc gradDesc",
)
getConvolutionBackwardDataWorkspaceSize = _sizer(
    "getConvolutionBackwardDataWorkspaceSize", _DATA, "filterDesc diffDesc convDesc gradDesc"
)
