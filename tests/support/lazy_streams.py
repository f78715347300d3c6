"""Streams of a GPU on the host: each runs its work at once or as late as its events allow.

A program that orders its streams rightly computes the same whichever of them hurry. One that forgets an event does not.
"""

from types import SimpleNamespace

import torch


class LazyEvent:
    """A point in a stream."""

    def __init__(self, gpu, enable_timing=False):
        self._gpu, self._timed = gpu, enable_timing
        self.stream = self.position = None
        self.time = 0.0

    def record(self, stream):
        self.stream = stream
        stream.push(self._read_clock)
        self.position = len(stream.queue)

    def query(self):
        return self.stream.done >= self.position

    def elapsed_time(self, end):
        assert self._timed
        assert end._timed
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.time - self.time

    def _read_clock(self):
        self._gpu.clock += 1.0
        self.time = self._gpu.clock


class LazyStream:
    """A queue of work, of which some was done."""

    def __init__(self, hurries):
        self.hurries, self.queue, self.done = hurries, [], 0
        self.cuda_stream = id(self)

    def push(self, work):
        self.queue.append(work)
        if self.hurries:
            self.synchronize()

    def wait_event(self, event):
        stream, position = event.stream, event.position  # as they are now: the event may be recorded again
        self.push(lambda: stream.run_to(position))

    def run_to(self, position):
        while self.done < position:
            self.done += 1
            self.queue[self.done - 1]()

    def synchronize(self):
        self.run_to(len(self.queue))


class LazyGpu:
    """What stands in the place of `torch.cuda`, and of the CUDA runtime that pins memory.

    Args:
        hurries: whether the stream that computes, and those to the host and back, run their work at once.

    Attributes:
        pinned: bytes of each piece of memory that is pinned, by its address.
        refuses: the status that pinning returns.
        launches: kernels that were launched; the first after an error reports it.
        clock: counts up with each event.
    """

    def __init__(self, hurries=(True, True, True)):
        self.pinned, self.refuses, self.launches, self.clock = {}, 0, 0, 0.0
        self.compute = LazyStream(hurries[0])
        self.copying = [LazyStream(each) for each in hurries[1:]]
        left = iter(self.copying)
        self.cuda = SimpleNamespace(
            Event=lambda **options: LazyEvent(self, **options),
            Stream=lambda device: next(left),
            current_stream=lambda device: self.compute,
            cudart=lambda: SimpleNamespace(cudaHostRegister=self._pin, cudaHostUnregister=self._unpin),
        )

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *size, pin_memory=False, **options):
        return torch.empty(*size, **options)

    def zeros(self, count, *, device):
        self.launches += 1
        raise RuntimeError("CUDA error: out of memory")

    def install(self, monkeypatch):
        """Let transfers see this in the place of a GPU."""
        monkeypatch.setattr("ucudnn.memory.torch.running.transfers.torch", self)
        monkeypatch.setattr("ucudnn.memory.torch.device.host_block.torch", self)
        monkeypatch.setattr("ucudnn.memory.torch.device.stream_copies.torch", self)
        monkeypatch.setattr("ucudnn.memory.torch.device.stream_copies.current_stream", lambda _: id(self.compute))
        monkeypatch.setattr("ucudnn.memory.torch.device.stream_copies.copy_on", self._copy)

    def _copy(self, stream, target, source):
        stream.push(lambda: target.copy_(source))

    def _pin(self, address, size, flags):
        if not self.refuses:
            self.pinned[address] = size
        return self.refuses

    def _unpin(self, address):
        del self.pinned[address]
        return 0
