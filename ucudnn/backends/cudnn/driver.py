"""ctypes on libcuda, the driver: what CuPy and PyTorch do not offer both.

With `library`, which is for libcudnn, the only module that knows ctypes.
"""

import ctypes
from typing import Any, final

RELAXED = 2  # cudaStreamCaptureModeRelaxed

_NAME = "libcuda.so.1"
_HOLD = b"""\
.version 6.0
.target sm_50
.address_size 64

.visible .entry ucudnn_hold(.param .u64 duration)
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
    """Set how this thread's calls are restricted by captures of CUDA graphs, and return how they were.

    0 is global, 1 thread-local, 2 relaxed (cuThreadExchangeStreamCaptureMode).
    """
    value = ctypes.c_int(mode)
    ctypes.CDLL(_NAME).cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@final
class Hold:
    """A kernel of one thread that keeps a stream busy for some time, in PTX, which the driver compiles.

    It belongs to the context that is current when it is made, the primary one of a GPU.

    Raises:
        OSError: if there is no driver, or it does not take the kernel.
    """

    def __init__(self) -> None:
        cuda = ctypes.CDLL(_NAME)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            _check(cuda.cuModuleLoadData(ctypes.byref(self._module), _HOLD), "cuModuleLoadData")
            status = cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, b"ucudnn_hold")
            _check(status, "cuModuleGetFunction")
            self._launch: Any = cuda.cuLaunchKernel
        except AttributeError as error:  # what has this name is no driver
            raise OSError(str(error)) from None
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        self._shape = self._function, one, one, one, one, one, one, none

    def queue(self, stream: int, time_ms: float) -> None:
        """Queue it on a stream of its context.

        Raises:
            OSError: if the driver refuses.
        """
        duration = ctypes.c_uint64(round(time_ms * 1e6))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))  # copied before the call returns
        _check(self._launch(*self._shape, ctypes.c_void_p(stream), arguments, None), "cuLaunchKernel")


def _check(status: int, name: str) -> None:
    if status:
        raise OSError(f"CUDA error {status} from {name}")
