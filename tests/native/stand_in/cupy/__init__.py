"""The part of CuPy that the cuDNN backend uses, on host memory, with the clock of the stand-in for cuDNN."""

import ctypes
from types import SimpleNamespace

__version__ = "0"
_STUB = ctypes.CDLL(None)  # its functions are among the program's


class CUDARuntimeError(RuntimeError):
    pass


class _Memory:
    def __init__(self, size):
        self._bytes = (ctypes.c_char * (size + 256))()
        self.ptr = -(-ctypes.addressof(self._bytes) // 256) * 256


class _Pool:
    def malloc(self, size):
        return _Memory(size)

    def free_all_blocks(self):
        pass


class _Stream:
    def __init__(self, ptr=0):
        self.ptr = ptr

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def synchronize(self):
        pass

    def wait_event(self, event):
        pass

    @staticmethod
    def from_external(foreign):
        return _Stream(foreign.__cuda_stream__()[1])


class _Event:
    done = True  # it computes as it is called

    def __init__(self, disable_timing=False):
        self.time = 0

    def record(self, stream=None):
        self.time = _STUB.stub_clock()

    def synchronize(self):
        pass


class _Device:
    def __init__(self, ordinal=0):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def _copy(target, source, size, kind, stream):
    ctypes.memmove(target, source, size)


def _copy_runs(target, target_step, source, source_step, width, height, kind, stream):
    for row in range(height):
        ctypes.memmove(target + row * target_step, source + row * source_step, width)


_NULL = _Stream()
cuda = SimpleNamespace(
    alloc=_Memory,
    Device=_Device,
    Event=_Event,
    MemoryPool=_Pool,
    Stream=_Stream,
    get_current_stream=lambda: _NULL,
    get_elapsed_time=lambda begin, end: (end.time - begin.time) / 1e3,
    runtime=SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        memcpyHostToDevice=1,
        memcpyDeviceToDevice=3,
        memcpyDeviceToHost=2,
        driverGetVersion=lambda: 13000,
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda ordinal: {"name": b"host", "major": 0, "minor": 0},
        memcpyAsync=_copy,
        memcpy2DAsync=_copy_runs,
        memsetAsync=lambda target, value, size, stream: ctypes.memset(target, value, size),
        runtimeGetVersion=lambda: 13000,
        setDevice=lambda ordinal: None,
        streamIsCapturing=lambda stream: False,
    ),
)


def get_default_memory_pool():
    return _Pool()
