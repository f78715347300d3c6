"""The GPU on which a cell of `bench.torch.networks` ran, and its state, as its driver tells them. Not a script."""

import ctypes

import torch

from ucudnn.memory.torch.device.nvml import driver_of

_READINGS = {
    "sm_mhz": ("nvmlDeviceGetClockInfo", 1),
    "memory_mhz": ("nvmlDeviceGetClockInfo", 2),
    "most_sm_mhz": ("nvmlDeviceGetMaxClockInfo", 1),
    "most_memory_mhz": ("nvmlDeviceGetMaxClockInfo", 2),
    "celsius": ("nvmlDeviceGetTemperature", 0),
}
"""Functions of NVML that write a number, and the argument that says which."""


def gpu_state(device: torch.device) -> dict[str, object]:
    """Return the UUID of a GPU, and its clocks and temperature at this time; without what the driver does not tell.

    A GPU that was hotter, or ran at other clocks, takes another time for the same step.
    """
    if device.type == "cpu":
        return {}
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return {"uuid": uuid, **readings(uuid)}


def readings(uuid: str) -> dict[str, int]:
    """Return clocks in MHz and the temperature in degrees Celsius; nothing where NVML is not there or refuses."""
    found: dict[str, int] = {}
    with driver_of(uuid) as driver:
        if driver is None:
            return found
        library, handle = driver
        value = ctypes.c_uint()
        for name, (function, which) in _READINGS.items():
            read = getattr(library, function, None)  # an old driver may lack it
            if read is not None and read(handle, which, ctypes.byref(value)) == 0:
                found[name] = value.value
    return found
