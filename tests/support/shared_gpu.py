"""A GPU that several processes use, for tests of what the driver and PyTorch say of it."""

from types import SimpleNamespace

import torch

from ucudnn.memory.torch.device import nvml

GPU, MIB = torch.device("cuda", 0), 2**20


class SharedGpu:
    """A GPU in the place of the real one: this process is number 7.

    Attributes:
        processes: bytes by process as the driver names them, which may be by other numbers.
        silent: whether the driver names no process.
        reserved: bytes of this process's allocator.
    """

    def __init__(self, patch, *, reserved):
        self.processes, self.silent, self.reserved = {}, False, reserved
        patch.setattr(nvml.os, "getpid", lambda: 7)
        patch.setattr(nvml, "_bytes_by_process", lambda _: {} if self.silent else {**self.processes})
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0123"))
        patch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (100000 * MIB - sum(self.processes.values()), 100000 * MIB))
