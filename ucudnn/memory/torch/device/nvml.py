"""What the driver says about the memory of a process on a GPU, through NVML, which every driver brings along."""

import ctypes
import os
from collections.abc import Mapping

import torch

_LIBRARY = "libnvidia-ml.so.1"
_UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_MOST = 256  # processes on one GPU


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of version 2, which functions with the suffix _v3 fill."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def process_bytes(device: torch.device, least: int) -> int | None:
    """Return the bytes that this process has on a GPU, its context included, which are at least some.

    None where the driver does not say.
    """
    return own_bytes(_bytes_by_process(torch.cuda.get_device_properties(device).uuid), os.getpid(), least)


def own_bytes(found: Mapping[int, int], process: int, least: int) -> int | None:
    """Return the bytes of a process among those of all by their numbers; None where nothing says which of them it is.

    In a container the driver may name processes by their numbers outside of it, where another process may have this
    one's number. So a process that has less than this one has at least is another one, whatever its number. If a single
    one is left, it is this process.
    """
    known = {each: used for each, used in found.items() if used >= least}
    used = known.get(process, next(iter(known.values())) if len(known) == 1 else _UNKNOWN)
    return None if used == _UNKNOWN else used


def _bytes_by_process(uuid: object) -> dict[int, int]:
    """Return the bytes of each process on a GPU; nothing where NVML is not there, is too old, or refuses."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return {}
    if library.nvmlInit_v2():
        return {}
    try:
        handle, count, processes = ctypes.c_void_p(), ctypes.c_uint(_MOST), (_ProcessInfo * _MOST)()
        running = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if running is None or library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return {}
        if running(handle, ctypes.byref(count), processes):
            return {}
        return {each.pid: each.used for each in processes[: count.value]}
    finally:
        library.nvmlShutdown()
