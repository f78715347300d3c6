"""A host and a GPU with clocks of their own."""

from functools import partial
from itertools import cycle
from types import SimpleNamespace

from ucudnn.backends.base import BEGIN, OVERWRITE, PreparedCall


class Machine(PreparedCall):
    """A host and a GPU with a clock of their own, in milliseconds: each call takes both some time.

    The GPU begins a call once it has been queued and the call before is done; so does the real one.
    """

    machines = ()

    def __init__(self, host_ms, gpu_ms, can_delay=True):
        self.can_delay = can_delay
        self.host_ms = iter(host_ms)
        self.gpu_ms = gpu_ms
        self.late_ms = cycle([0.0])  # before the host queues the second event
        self.now = 0.0  # of the host
        self.done = 0.0  # of the GPU
        self.log = []

    def delay(self, time_ms):
        assert self.can_delay
        self.done = max(self.done, self.now) + time_ms
        self.log.append(("delay", time_ms))

    def timed(self, run, lead=None):
        started = self.now
        if lead is not None:
            lead()
        begin = max(self.done, self.now)
        self.log.append("begin")
        run()
        self.now += next(self.late_ms)
        timed = SimpleNamespace(host_ms=self.now - started, covered=self.now < begin)
        end = max(self.done, self.now)
        self.log.append("end")

        def wait_ms():
            self.now = max(self.now, end)
            self.log.append("waited")
            return end - begin

        timed.wait_ms = wait_ms
        return timed

    def bind(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        assert "begin" not in self.log or self.log[-1] != "begin", "nothing is made while time is taken"
        return partial(self.launch, x, w, y, workspace, offset, scaling)

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        self.now += next(self.host_ms)
        self.done = max(self.done, self.now) + self.gpu_ms
        self.log.append(offset.start)
