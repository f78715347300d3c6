"""The driver's context of a thread: functions of the driver load nothing in a thread that has none."""

import logging

import pytest

from ucudnn.backends.cudnn.gpu import base
from ucudnn.backends.cudnn.gpu import driver as driver_module
from ucudnn.backends.cudnn.gpu.base import Gpu
from ucudnn.backends.cudnn.gpu.driver import RELAXED, make_context_current, relaxed

OTHER, PRIMARY = 0x70, 0xC0
"""Addresses of contexts: another one, and the primary one of GPU 3."""


class Driver:
    """A driver of a thread whose current context has an address; 0 for none.

    Args:
        current: that address.
        refuses: name of a function that fails; '' for none.
    """

    def __init__(self, current=0, refuses=""):
        self.current, self.retained, self.refuses = current, 0, refuses

    def _status(self, name):
        return 201 if self.refuses == name else 0

    def cuCtxGetCurrent(self, context):  # noqa: N802
        context._obj.value = self.current or None
        return self._status("cuCtxGetCurrent")

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = 100 + ordinal
        return self._status("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        assert device.value == 103
        self.retained += 1
        context._obj.value = PRIMARY
        return self._status("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.current = context.value
        return self._status("cuCtxSetCurrent")


@pytest.fixture
def driver(monkeypatch):
    """Return a function that puts a driver in the place of the library."""

    def put(found):
        monkeypatch.setattr(driver_module, "_driver", lambda: found)
        return found

    return put


def test_a_capture_goes_on_while_a_thread_is_relaxed(driver):
    modes, present = [], [1]

    class Modes:
        def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
            mode._obj.value, present[0] = present[0], mode._obj.value
            modes.append(present[0])
            return 0

    driver(Modes())
    with pytest.raises(MemoryError), relaxed():
        raise MemoryError
    assert modes == [RELAXED, 1], "also after an error"
    assert present == [1]


def test_without_a_driver_there_are_no_captures(monkeypatch):
    def missing():
        raise OSError("no driver")

    monkeypatch.setattr(driver_module, "_driver", missing)
    ran = []
    with relaxed():
        ran.append(True)
    assert ran


@pytest.mark.parametrize(("before", "after"), [((0, 0), (PRIMARY, 1)), ((OTHER, 0), (OTHER, 0))])
def test_a_thread_without_a_context_gets_the_primary_one_of_its_gpu_once(driver, before, after):
    found = driver(Driver(before[0]))
    for _ in range(2):
        make_context_current(3)
        assert (found.current, found.retained) == after


@pytest.mark.parametrize("name", ["cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_what_the_driver_refuses_is_named(driver, name):
    driver(Driver(refuses=name))
    with pytest.raises(OSError, match=f"CUDA error 201 from {name}"):
        make_context_current(3)


def test_another_library_of_this_name_is_no_driver(driver):
    driver(object())
    with pytest.raises(OSError, match="cuCtxGetCurrent"):
        make_context_current(3)


class Device(Gpu):
    """A GPU of which only the kernels of ucudnn are asked for."""

    ordinal = 3


Device.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("kernels", ["Copier", "SumKernels", "DelayKernel"])
def test_kernels_are_loaded_in_a_thread_that_has_no_context(driver, monkeypatch, kernels):
    found, device = driver(Driver()), Device()

    def load():
        assert found.current == PRIMARY, "CUDA error 201 from cuModuleLoadData"
        return kernels

    monkeypatch.setattr(base, kernels, load)
    asked = {"Copier": "copier", "SumKernels": "sum_kernels", "DelayKernel": "_delay_kernel"}[kernels]
    assert getattr(device, asked) == kernels


def test_kernels_that_the_driver_does_not_load_are_done_without_and_told(driver, caplog):
    driver(Driver(refuses="cuDeviceGet"))
    device = Device()
    with caplog.at_level(logging.INFO):
        assert device.sum_kernels is device.copier is None
        assert not device.can_delay
    assert "GPU 3 does without kernels of ucudnn" in caplog.text
    assert "CUDA error 201 from cuDeviceGet" in caplog.text
