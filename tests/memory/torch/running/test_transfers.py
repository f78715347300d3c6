"""Tests of transfers: bytes come back as they were sent, whatever the streams hurry to do, and nothing stays pinned."""

import gc
import subprocess
import sys
from itertools import product

import pytest
import torch

from tests.support.lazy_streams import LazyGpu
from ucudnn.errors import BackendError, BudgetError, InvalidValueError
from ucudnn.memory.pools.host_slots import HostSlots
from ucudnn.memory.torch.running.transfers import Transfers

SIZE = 4096
SHARED = HostSlots(sizes={3: SIZE, 7: SIZE, 9: 40}, addresses={3: 0, 7: 0, 9: SIZE}, extent_bytes=SIZE + 512)
"""Storages 3 and 7 have the same bytes of the block, one after the other."""

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
POISON = 255


def numbers(seed):
    return torch.arange(SIZE // 4, dtype=torch.float32) * seed


def play(transfers, compute):
    """Send two storages through the same bytes of the block, in the order of a plan; return what came back.

    `compute` takes work for the compute stream. Memory is poisoned as soon as the next user could have it.
    """
    found, memory = {}, {number: torch.empty(SIZE // 4) for number in (3, 7)}
    for step in range(2):
        for number in (3, 7):
            sent, room = memory[number], torch.empty(SIZE // 4)
            compute(lambda sent=sent, seed=number + step: sent.copy_(numbers(seed)))
            transfers.offload(number, sent)
            transfers.wait_offload(number)
            compute(lambda sent=sent: sent.fill_(-1.0))  # freed, and used by another
            compute(lambda room=room: room.fill_(-2.0))  # its former user
            transfers.prefetch(number, room)
            transfers.wait_prefetch(number)
            compute(lambda key=(step, number), room=room: found.update({key: room.clone()}))
    return found


def assert_came_back(found):
    assert sorted(found) == [(step, number) for step in (0, 1) for number in (3, 7)]
    for (step, number), tensor in found.items():
        assert torch.equal(tensor, numbers(number + step)), (step, number)


def test_on_the_host_bytes_come_back():
    transfers = Transfers(SHARED, CPU)
    assert_came_back(play(transfers, lambda work: work()))
    assert transfers.offloaded_bytes == transfers.prefetched_bytes == 4 * SIZE
    assert transfers.block_bytes == SIZE + 512


@pytest.fixture(params=[*product((False, True), repeat=3)])
def hurried(request, monkeypatch):
    """Return which streams hurry, a GPU of such streams, and transfers on it."""
    gpu = LazyGpu(request.param)
    gpu.install(monkeypatch)
    transfers = Transfers(SHARED, GPU)
    yield request.param, gpu, transfers
    transfers.close()


def test_on_streams_bytes_come_back_whatever_hurries(hurried):
    _, gpu, transfers = hurried
    found = play(transfers, gpu.compute.push)
    gpu.compute.synchronize()
    assert_came_back(found)


def test_a_prefetch_without_a_wait_for_the_offload_comes_behind_it(hurried):
    _, gpu, transfers = hurried
    sent, room = numbers(5), torch.full((SIZE // 4,), -1.0)
    transfers.offload(3, sent)
    transfers.prefetch(3, room)
    transfers.wait_prefetch(3)
    gpu.compute.synchronize()
    assert torch.equal(room, numbers(5))


def test_compute_does_not_wait_where_a_tensor_comes_back_before_it_has_left(hurried):
    hurries, gpu, transfers = hurried
    tensor, beside = numbers(5), []
    transfers.offload(3, tensor)
    transfers.prefetch(3, tensor)
    gpu.compute.push(lambda: beside.append(gpu.copying[0].done))
    gpu.compute.run_to(len(gpu.compute.queue))
    assert beside == [len(gpu.copying[0].queue) if hurries[1] or hurries[2] else 0]
    transfers.wait_prefetch(3)
    gpu.compute.synchronize()
    assert torch.equal(tensor, numbers(5))


def test_a_copy_waits_for_no_copy_of_the_other_direction(monkeypatch):
    gpu = LazyGpu((True, False, True))  # only the stream to the host dawdles
    gpu.install(monkeypatch)
    slots = HostSlots(sizes={3: SIZE, 9: 40}, addresses={3: 0, 9: SIZE}, extent_bytes=SIZE + 512)
    transfers = Transfers(slots, GPU)
    transfers.offload(9, torch.arange(10, dtype=torch.float32))
    transfers.wait_offload(9)
    room = torch.empty(10)
    transfers.offload(3, numbers(2))
    transfers.prefetch(9, room)
    to_host = gpu.copying[0]
    assert to_host.done < len(to_host.queue)
    assert torch.equal(room, torch.arange(10, dtype=torch.float32))
    transfers.close()


def test_another_size_or_slot_is_refused():
    transfers = Transfers(SHARED, CPU)
    with pytest.raises(InvalidValueError, match="slot 9 has 40 bytes, and the tensor 44 bytes"):
        transfers.offload(9, torch.empty(11))
    with pytest.raises(InvalidValueError, match="slot 4 has no slot"):
        transfers.prefetch(4, torch.empty(10))


def test_the_block_is_pinned_and_free_after_close(monkeypatch):
    gpu = LazyGpu()
    gpu.install(monkeypatch)
    transfers = Transfers(SHARED, GPU)
    assert [*gpu.pinned.values()] == [SIZE + 512]  # exactly: no power of two
    transfers.close()
    assert gpu.pinned == {}
    transfers.close()
    with pytest.raises(InvalidValueError, match="closed"):
        transfers.offload(9, torch.empty(10))


def test_the_block_is_free_when_transfers_are_collected_with_a_copy_under_way(monkeypatch):
    gpu = LazyGpu((True, False, False))
    gpu.install(monkeypatch)
    transfers = Transfers(SHARED, GPU)
    transfers.offload(9, torch.empty(10))
    del transfers
    gc.collect()
    assert gpu.pinned == {}
    assert all(stream.done == len(stream.queue) for stream in gpu.copying)


def test_after_an_error_nothing_is_pinned_and_the_next_step_runs(monkeypatch):
    gpu = LazyGpu((True, False, False))
    gpu.install(monkeypatch)
    transfers = Transfers(SHARED, GPU)
    transfers.offload(9, torch.empty(10))
    transfers.abandon()
    assert gpu.pinned == {}
    assert all(stream.done == len(stream.queue) for stream in gpu.copying)
    found = play(transfers, gpu.compute.push)
    gpu.compute.synchronize()
    assert_came_back(found)
    assert [*gpu.pinned.values()] == [SIZE + 512]
    transfers.close()


def test_bytes_that_an_abandoned_step_left_do_not_come_back():
    transfers = Transfers(SHARED, CPU)
    transfers.offload(9, torch.empty(10))
    transfers.abandon()
    with pytest.raises(InvalidValueError, match="slot 9 is empty"):
        transfers.prefetch(9, torch.empty(10))
    transfers.close()


def test_a_block_above_the_limit_is_refused():
    with pytest.raises(BudgetError, match=r"needs 4.5 KiB.*the limit for host memory is 4 KiB") as caught:
        Transfers(SHARED, CPU, host_bytes=4096)
    assert caught.value.required_bytes == SIZE + 512
    assert caught.value.limit_bytes == 4096


def test_a_refusal_of_the_driver_is_an_error(monkeypatch):
    gpu = LazyGpu()
    gpu.install(monkeypatch)
    gpu.refuses = 2
    with pytest.raises(BackendError, match=r"cannot pin 4.5 KiB.*error 2"):
        Transfers(SHARED, GPU)
    assert (gpu.pinned, gpu.launches) == ({}, 1)  # a launch took the error away


def test_the_log_has_the_copies_within_the_host_since_it_began():
    transfers = Transfers(SHARED, CPU)
    transfers.offload(3, numbers(1))
    transfers.start_log()
    transfers.offload(9, torch.empty(10))
    transfers.prefetch(3, torch.empty(SIZE // 4))
    (left, back) = transfers.end_log()
    assert (left.to_host, back.to_host) == (True, False)
    assert left.begin_ms < left.end_ms <= back.begin_ms < back.end_ms
    transfers.offload(9, torch.empty(10))
    assert transfers.end_log() == []


def test_a_slot_takes_tensors_of_other_types_and_shapes_in_turn_and_none_whose_bytes_lie_in_another_order():
    transfers = Transfers(SHARED, CPU)
    types = [numbers(9).to(dtype).repeat(4)[: SIZE // dtype.itemsize] for dtype in (torch.bool, torch.complex64)]
    views = [numbers(5).view(32, 32), numbers(7).view(torch.int16), numbers(8).view(torch.float16)]
    for sent in (numbers(3), *views, *types, numbers(9).view(torch.int64), numbers(9).view(32, 32)):
        back = torch.empty_like(sent)
        transfers.offload(3, sent)
        transfers.wait_offload(3)
        transfers.prefetch(3, back)
        transfers.wait_prefetch(3)
        assert torch.equal(back, sent)
    with pytest.raises(InvalidValueError, match="slot 3 holds contiguous tensors only"):
        transfers.offload(3, numbers(3).view(32, 32).t())


def test_a_process_ends_without_a_word_while_transfers_are_open():
    script = """
import torch
from ucudnn.memory.pools.host_slots import HostSlots
from ucudnn.memory.torch.running.transfers import Transfers
torch.kept = Transfers(HostSlots(sizes={0: 8}, addresses={0: 0}, extent_bytes=8), torch.device("cpu"))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
