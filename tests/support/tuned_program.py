"""A program on the host's GPU whose kernels take stated times: PyTorch's own those that a test states."""

from contextlib import nullcontext
from time import monotonic, sleep

import torch

from tests.support.host_gpu import assert_near
from tests.support.made_up_gpu import MadeUpGpu
from tests.support.noted import noted
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.handle import Handle
from ucudnn.settings import Settings
from ucudnn.torch import Enabled
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.device.gpu import TorchGpu
from ucudnn.torch.device.memory_limit import MemoryLimit, StatedHeadroom
from ucudnn.torch.device.timed_device import FreeBlocks, HomeStream
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.trial_ledger import TrialLedger
from ucudnn.torch.summary import summarize
from ucudnn.torch.trials.candidate_source import CandidateSource
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor
from ucudnn.torch.tuning.plan_owner import PlanOwner
from ucudnn.torch.tuning.tuner import Tuner

LIMIT = 3000
"""Bytes of workspace, within which the stand-in's fast engine computes a part of the mini-batch only."""

MOST_WAITED_S = 300
"""Seconds for threads to build engines, which take them milliseconds where they have a processor."""

LATER = 8 * 6 * 7 * 6 * 4
"""Bytes of the gradient of the second layer's input, which the filter gradient before it may use."""


class HostProgram(MadeUpGpu):
    """The host's GPU as a tuner sees it, whose clock moves by the time of each kernel.

    Attributes:
        baseline_ms: time of one of PyTorch's own kernels.
        idle_ms: time between steps.
        peak: bytes at the peak of PyTorch's steps; at first it is half as high.
        has_memory: whether memory is free.
        baseline_calls: number of kernels that PyTorch computed for the program.
        looked: how often free blocks were looked up.
        reserved: bytes that are reserved.
        building_ms: time of the host for each plan, whatever else this machine does meanwhile.
        bandwidth: stated bandwidth of the memory, in bytes per millisecond; 0 if it is not known.
        live: returns how many bytes live; at first it is what ucudnn has allocated for outputs and workspaces.
        can_delay: whether steps may be delayed; each of them then takes longer by that.
    """

    def __init__(self, host, baseline_ms, idle_ms):
        super().__init__()
        self.host, self.baseline_ms, self.idle_ms = host, baseline_ms, idle_ms
        self.passed_ms = self.bandwidth = self._host_ms = 0.0
        self.building_ms = 1.0
        self.peak, self.reserved, self.has_memory = 100 << 20, 200 << 20, True
        self.baseline_calls = self.looked = self._asked = 0
        self.live = lambda: host.live_bytes
        self._home = HomeStream(0)

    def host_seconds(self):
        """Return the host's clock; each reading moves it, so a plan between two readings takes `building_ms`."""
        self._host_ms += self.building_ms
        return self._host_ms / 1e3

    def now_ms(self):
        return self.passed_ms + self.host.stub.stub_clock() / 1e3

    def delay(self, time_ms):
        may = self.untouched()
        self.passed_ms += time_ms * may
        return may

    def mark(self):
        return None if self.host.captures else self.now_ms()

    def elapsed_ms(self, begin, end):
        if self.host.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        if begin is None or end is None:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
        return end - begin

    def live_bytes(self):
        return self.live()

    def peak_bytes(self):
        self._asked += 1
        return self.peak // 2 if self._asked == 1 else self.peak

    def free_blocks(self):
        self.looked += 1
        return FreeBlocks([1 << 20] * 64, [1 << 30] * 64) if self.has_memory else FreeBlocks([], [])

    def reserved_bytes(self):
        return self.reserved

    def bytes_per_ms(self):
        return self.bandwidth

    def distance(self, found, expected):
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        return lambda: error

    def host_copy(self, tensor):
        return tensor.clone()

    def poison(self, size_bytes):
        pass

    def untouched(self):
        return not self.host.captures and self._home.is_current(self.host.stream)

    def was_away(self):
        return self._home.step_ended()


class StatedAten:
    """PyTorch's own kernels, each of which moves the clock of a program."""

    def __init__(self, program):
        self._program = program
        self._aten = process_overrides.aten_kernels("cpu")

    def forward(self, *arguments):
        self._count(1)
        return self._aten.forward(*arguments)

    def backward(self, *arguments):
        self._count(sum(arguments[-1][:2]))
        return self._aten.backward(*arguments)

    def _count(self, kernels):
        self._program.baseline_calls += kernels
        self._program.passed_ms += kernels * self._program.baseline_ms


class TunedProgram:
    """Training steps of a small network, tuned on the host's GPU.

    Args:
        host: the host's GPU.
        baseline_ms: time of one of PyTorch's own kernels.
        share: the largest part of the time that trials may lose.
        idle_ms: time between steps.
        database: keeps times; 'off' for none.
        library: builds the gate; None goes without.
        limit_bytes: a stated limit of each workspace, for heuristic plans; None lets PyTorch compute first.
        memory_bytes: a stated limit of live bytes and workspace together, beside the other one.
        live: returns how many bytes live; None counts what ucudnn has allocated.
        settings: other settings of the handle that makes heuristic plans.

    Attributes:
        expected: what the latest step should have returned.
    """

    def __init__(
        self,
        host,
        baseline_ms,
        share=0.05,
        idle_ms=1000.0,
        database="off",
        library=None,
        limit_bytes=None,
        memory_bytes=None,
        live=None,
        **settings,
    ):
        torch.manual_seed(0)
        self.program = HostProgram(host, baseline_ms, idle_ms)
        self.program.live = live or self.program.live
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(4, 6, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(6, 6, 3, padding=1, bias=False)
        )
        self.x = torch.randn(8, 4, 7, 6)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.source = CandidateSource(
            self._opened_for_trials, nullcontext, lambda backend: open_store(database, backend, in_program=True)
        )
        self._host = host
        self.memory = None if memory_bytes is None else MemoryLimit(memory_bytes, self.program.live_bytes)
        aten, self.planned, owner, waited = StatedAten(self.program), None, None, lambda: 0.0
        if limit_bytes is not None:
            loaded = Settings(workspace_limit_bytes=limit_bytes, database=database, **settings)
            self.planned = Interceptor(
                lambda ordinal: Handle.from_settings(loaded, backend=self._opened(), measures=False), "cpu", aten
            )
            owner = PlanOwner(lambda: self.planned.handle(0), StatedHeadroom(limit_bytes, self.memory))
            waited = owner.planned_seconds
        self.ledger = TrialLedger(share, lambda: self.program.now_ms() / 1e3, waited)
        self.made = AutoInterceptor(
            lambda ordinal: Tuner(self.program, self.source, self.ledger, owner, self.program.host_seconds),
            "cpu",
            aten,
            process_overrides.refresh,
            library,
            self.planned,
        )

    def _opened(self):
        return CudnnBackend(library_path=self._host.stub._name, device=TorchGpu(0, self.memory))

    def _opened_for_trials(self):
        """Return the backend of the handle of heuristic plans, which tries in the program's thread, and then others."""
        shared = self.planned is not None and self.source.backend is None
        return self.planned.handle(0).backend if shared else self._opened()

    def enable(self):
        process_overrides.use(self.made)
        return Enabled(self.made, None)

    @property
    def tuner(self):
        (found,) = self.made.tuners().values()
        return found

    @property
    def is_gated(self):
        return process_overrides.is_gated("cpu")

    @property
    def is_final(self):
        """Whether nothing is tried any more, and the gate computes or passes on."""
        return self.made.router.is_settled and self.is_gated

    @property
    def configurations(self):
        """Configurations by which the handle of first plans computes, by kernel."""
        decisions = {key: each.decision for key, each in self.handle.plans.entries.items()}
        return {key: each.configuration for key, each in decisions.items() if each is not None}

    @property
    def replaced_calls(self):
        return sum(kernel.calls for each in self.made.tuners().values() for kernel in each.kernels.values())

    @property
    def phase(self):
        """Phase of the tuner; None before the first convolution."""
        return self.tuner.phase if self.made.tuners() else None

    @property
    def handle(self):
        return self.planned.handle(0)

    def check(self):
        assert_near(self.step(), self.expected)

    def computed(self, take=None):
        """Take and check a step; return how many of its kernels the report counts, which are not PyTorch's own."""
        before = summarize([self.made]).calls
        (take or self.check)()
        return summarize([self.made]).calls - before

    def until(self, holds, most=400, take=None):
        """Take and check steps until a condition holds; raise an error if it does not hold after `most` steps."""
        for _ in range(most):
            (take or self.check)()
            if holds():
                return
        raise AssertionError(f"it does not hold after {most} steps, in {self.phase}")

    def settle(self, take=None):
        self.until(lambda: self.phase is TuningPhase.SETTLED, take=take)

    def tuned(self):
        """Turn tuning on until all is settled; return the report of it."""
        with self.enable() as on:
            self.settle()
            return on.report().tuned[0]

    def infer(self, idle_ms=None):
        """Compute without gradients, and check the output; then time passes, by default as much as after a step."""
        first, _, second = self.model
        with torch.no_grad():
            near = torch.relu(product(self.x, first.weight) + first.bias[:, None, None])
            expected = [product(near, second.weight)]
        with torch.inference_mode():
            assert_near([self.model(self.x)], expected)
        self.program.passed_ms += self.program.idle_ms if idle_ms is None else idle_ms
        self.wait_for_threads()

    def step(self):
        """Take a step, and return the output and the gradients; `expected` gets those in float64, by matrices.

        Threads have built by then what this step lets them build.
        """
        self.expected = self._by_matrices()
        self.optimizer.zero_grad()
        gated, calls = self.is_gated, self.replaced_calls
        for kernel, count in zip(self.made.operators(), (2, 3), strict=True):
            if kernel is None and not gated:  # PyTorch's own operator is registered, which knows no clock
                self.program.passed_ms += count * self.program.baseline_ms
        out = self.model(self.x)
        out.square().sum().backward()
        if gated and self.planned is None:
            self.program.passed_ms += (5 - self.replaced_calls + calls) * self.program.baseline_ms
        gradients = [each.grad.clone() for each in self.model.parameters()]
        self.program.passed_ms += self.program.idle_ms
        self.optimizer.step()
        self.wait_for_threads()
        return [out.detach(), *gradients]

    def wait_for_threads(self):
        """Wait until threads have built what they may build now.

        Kernels take stated times, so trying ends after a number of steps. What is found until then must not depend on
        how long this machine keeps threads waiting.
        """
        begin = monotonic()
        while self.source.is_busy and not self.source.failed:
            assert monotonic() - begin < MOST_WAITED_S, "threads build nothing"
            sleep(0.001)

    def _by_matrices(self):
        one, _, two = self.model
        w1, b1, w2 = (each.detach().double().requires_grad_() for each in (one.weight, one.bias, two.weight))
        out = product(torch.relu(product(self.x.double(), w1) + b1[:, None, None]), w2)
        out.square().sum().backward()
        return [each.float() for each in (out.detach(), w1.grad, b1.grad, w2.grad)]


def end_programs(made):
    """End programs after a test: PyTorch computes by itself again, and no thread builds for them any more."""
    process_overrides.use(None)
    for each in made:
        each.source.join(30)


def python_calls(monkeypatch, interceptor=Interceptor):
    """Return a list that gets an item for each call that comes to Python, once operators are registered again.

    While others are tried, calls come to an AutoInterceptor, which may not ask the Interceptor of heuristic plans.
    """
    return noted(monkeypatch, interceptor, "forward", "backward", of=lambda *_: True)


def taken(items):
    found = list(items)
    items.clear()
    return found


def product(x, w):
    """Return a convolution with padding 1 as a product of matrices."""
    columns = torch.nn.functional.unfold(x, 3, padding=1)
    return (w.flatten(1) @ columns).view(len(x), len(w), *x.shape[2:])
