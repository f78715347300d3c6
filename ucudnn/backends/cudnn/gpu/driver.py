"""ctypes on libcuda, the driver: functions that not both CuPy and PyTorch offer.

In the backend only this module and `library`, for libcudnn, use ctypes.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, final

RELAXED = 2  # cudaStreamCaptureModeRelaxed

_NAME = "libcuda.so.1"
_DELAY = b"""\
.version 6.0
.target sm_50
.address_size 64

.visible .entry ucudnn_delay(.param .u64 duration)
{
    .reg .pred %held;
    .reg .u64 %begin, %now, %least;

    ld.param.u64 %least, [duration];
    mov.u64 %begin, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %held, %now, %least;
    @%held bra AGAIN;
    ret;
}
"""


def exchange_capture_mode(mode: int) -> int:
    """Set how captures of CUDA graphs restrict this thread's calls, and return the mode before.

    Modes are 0 for global, 1 for thread-local and 2 for relaxed (cuThreadExchangeStreamCaptureMode).
    """
    value = ctypes.c_int(mode)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread compile and allocate within a capture of a CUDA graph, which would else end by that."""
    try:
        mode = exchange_capture_mode(RELAXED)
    except OSError:  # there is no driver, so there are no captures
        yield
        return
    try:
        yield
    finally:
        exchange_capture_mode(mode)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(_NAME)


@cache
def copy_function() -> Callable[[int, int, int, int], int]:
    """Return cuMemcpyAsync: it takes the addresses of target and source, bytes and a stream, and returns a status."""
    function: Any = _driver().cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    found: Callable[[int, int, int, int], int] = function
    return found


@cache
def _stream_id() -> Any:
    try:
        return _driver().cuStreamGetId
    except (OSError, AttributeError):  # there is no driver, or one before CUDA 12
        return None


def stream_id(stream: int) -> int | None:
    """Return the number of a stream, which is unique in the process (cuStreamGetId); None if the driver has none.

    Captures that other threads have begun go on. A capture of this stream would end.
    """
    get = _stream_id()
    if get is None:
        return None
    found = ctypes.c_ulonglong()
    mode = exchange_capture_mode(RELAXED)  # not `relaxed`, which takes twice as long: this is asked at each launch
    try:
        return None if get(ctypes.c_void_p(stream), ctypes.byref(found)) else found.value
    finally:
        exchange_capture_mode(mode)


def make_context_current(ordinal: int) -> None:
    """Make the primary context of a GPU the calling thread's current one, if the thread has none.

    CUDA's runtime does that at a thread's first call that needs it, and not where a thread only chooses a GPU that is
    the current one already. Functions of the driver never do it: in such a thread, the driver loads no kernel.

    Raises:
        OSError: if there is no driver, or it does not make the context current.
    """
    current, device = ctypes.c_void_p(), ctypes.c_int()
    _call("cuCtxGetCurrent", ctypes.byref(current))
    if current.value is None:
        _call("cuDeviceGet", ctypes.byref(device), ordinal)
        # Nobody releases the context, which lives as long as the process: the runtime keeps it, too.
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(current), device)
        _call("cuCtxSetCurrent", current)


@final
class Function:
    """A kernel in PTX, which the driver compiles for the current context, the primary one of a GPU.

    Raises:
        OSError: if there is no driver, or it does not load the kernel.
    """

    def __init__(self, source: bytes, name: str) -> None:
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._module), source)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        self._launch = _loaded("cuLaunchKernel")

    def bound(self, blocks: int, threads: int, argument: bytes) -> Callable[[int], None]:
        """Return a launch that is called with the address of a stream; it raises OSError if the driver refuses it."""
        launch, one = self._launch, ctypes.c_uint(1)
        shape = self._function, ctypes.c_uint(blocks), one, one, ctypes.c_uint(threads), one, one, ctypes.c_uint(0)
        memory = ctypes.create_string_buffer(argument, len(argument))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory))

        def queue(stream: int, _: object = memory) -> None:  # the memory must live as long as this function
            _check(launch(*shape, ctypes.c_void_p(stream), arguments, None), "cuLaunchKernel")

        return queue


@final
class DelayKernel:
    """A kernel of one thread that keeps a stream busy for some time."""

    def __init__(self) -> None:
        self._function = Function(_DELAY, "ucudnn_delay")

    def queue(self, stream: int, time_ms: float) -> None:
        """Queue the kernel on a stream, given by its address, for some milliseconds."""
        self._function.bound(1, 1, round(time_ms * 1e6).to_bytes(8, sys.byteorder))(stream)


def _loaded(name: str) -> Any:
    try:
        return getattr(_driver(), name)
    except AttributeError as error:
        raise OSError(str(error)) from None


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; OSError if there is none, or if it fails."""
    _check(_loaded(name)(*arguments), name)


def _check(status: int, name: str) -> None:
    if status:
        raise OSError(f"CUDA error {status} from {name}")
