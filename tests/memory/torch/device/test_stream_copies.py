"""Tests of copies on streams: which stream counts as the current one, and what a driver that refuses a copy ends in."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ucudnn.errors import BackendError
from ucudnn.memory.torch.device import stream_copies
from ucudnn.memory.torch.device.stream_copies import ComputeStream, copy_on, slide

GPU = torch.device("cuda", 1)


def test_the_stream_is_looked_up_again_where_another_one_is_current(monkeypatch):
    addresses, made = [5, 5, 7, 7, 5], []
    monkeypatch.setattr(stream_copies, "current_stream", lambda ordinal: ordinal * addresses[len(found)])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.append(device) or len(made))
    stream, found = ComputeStream(GPU), []
    for _ in addresses:
        found.append(stream.current())
    assert found == [1, 1, 2, 2, 3]
    assert made == [GPU] * 3


@pytest.fixture
def driver(monkeypatch):
    """Return devices as they become current, and copies as they are queued, each with the device; 700 refuses them."""
    found = SimpleNamespace(devices=[0], copies=[], status=0)
    monkeypatch.setattr(
        torch.cuda, "_exchange_device", lambda ordinal: found.devices.append(ordinal) or found.devices[-2]
    )
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", found.devices.append)
    monkeypatch.setattr(stream_copies, "current_stream", lambda ordinal: 70 + ordinal)

    def copy(*arguments):
        found.copies.append((*arguments, found.devices[-1]))
        return found.status

    monkeypatch.setattr(stream_copies, "copy_function", lambda: copy)
    yield found
    assert found.devices == [0, 1, 0]


@pytest.mark.parametrize("status", [0, 700])
def test_a_copy_is_made_on_the_device_of_its_stream_and_a_refusal_is_an_error(driver, status):
    target, source, driver.status = torch.empty(10), torch.empty(10), status
    message = "CUDA cannot copy 40 bytes: error 700 of cuMemcpyAsync"
    with pytest.raises(BackendError, match=message) if status else nullcontext():
        copy_on(SimpleNamespace(device_index=1, cuda_stream=99), target, source)
    assert driver.copies == [(target.data_ptr(), source.data_ptr(), 40, 99, 1)]


class _OnGpu:
    """A tensor of ten bytes at an address of a GPU."""

    device, nbytes = GPU, 10

    def data_ptr(self):
        return 96


@pytest.mark.parametrize(
    ("source", "copies"),
    [
        (100, [(96, 100, 4), (100, 104, 4), (104, 108, 2)]),
        (90, [(102, 96, 4), (96, 90, 6)]),
        (200, [(96, 200, 10)]),
        (96, []),
    ],
)
def test_a_slide_is_queued_in_an_order_in_which_no_byte_is_lost(driver, source, copies):
    slide(_OnGpu(), source)
    assert driver.copies == [(*copy, 71, 1) for copy in copies]
