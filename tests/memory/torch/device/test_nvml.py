"""Tests of the memory that the driver names for a process."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from ucudnn.memory.torch.device import nvml
from ucudnn.memory.torch.device.nvml import own_bytes, process_bytes

UNKNOWN = 2**64 - 1


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({7: 100, 8: 200}, 100),
        ({8: 200}, 200),  # named by its number outside of the container
        ({8: 200, 9: 300}, None),
        ({8: 200, 9: 59}, 200),  # the other one has less than this process's allocator alone
        ({7: 59, 8: 200}, 200),  # 7 is the number of another process outside of the container
        ({7: 59}, None),
        ({7: 60, 8: 200}, 60),
        ({7: UNKNOWN}, None),
        ({8: 200, 9: UNKNOWN}, None),
        ({}, None),
    ],
)
def test_the_bytes_of_a_process_are_those_of_its_number_or_of_the_only_one_that_may_be_it(found, expected):
    assert own_bytes(found, 7, least=60) == expected


class Driver:
    """A driver with two processes on its GPU, GPU-0123, which may refuse to open, a handle or the list."""

    def __init__(self, refuses):
        self.refuses, self.open = refuses, 0

    def nvmlInit_v2(self):  # noqa: N802
        self.open += self.refuses != "open"
        return int(self.refuses == "open")

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name, handle):  # noqa: N802
        assert name == b"GPU-0123"
        return int(self.refuses == "handle")

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, processes):  # noqa: N802
        for index, (pid, used) in enumerate([(7, 100), (8, 2**33)]):
            processes[index].pid, processes[index].used = pid, used
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 2
        return int(self.refuses == "list")


@pytest.mark.parametrize(
    ("refuses", "expected"), [("", 2**33), ("open", None), ("handle", None), ("list", None), ("everything", None)]
)
def test_the_driver_is_asked_and_may_refuse_or_be_missing(refuses, expected, monkeypatch):
    library = Driver(refuses)

    def load(_):
        if refuses == "everything":
            raise OSError("no such library")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(nvml.os, "getpid", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0123"))
    assert process_bytes(torch.device("cuda", 0), least=60) == expected
    assert library.open == 0
