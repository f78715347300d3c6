"""Events at random in programs that are tuned: each step is right, and after them every kernel runs as before."""

from contextlib import contextmanager, nullcontext
from random import Random

import pytest
import torch

from tests.support.tuned_program import LATER, LIMIT, TunedProgram
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.phase import TuningPhase

MODES = {
    "auto": {},
    "auto, gated": {"gate": True},
    "limit": {"limit_bytes": LIMIT},
    "limit, gated": {"limit_bytes": LIMIT, "gate": True},
    "memory": {"limit_bytes": LIMIT, "memory_bytes": 1 << 30},
}

OTHER_STREAM = 0x40
OTHER_LOOKS = {"other_precision", "deterministic_algorithms", "channels_last", "another_size"}
"""Events whose calls look otherwise: if they alone are watched, they alone are tuned."""


class InterruptedPassError(Exception):
    """Raised within a backward pass."""


@contextmanager
def changed(owner, **values):
    """Let an object have other attributes."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    yield
    vars(owner).update(before)


class Events:
    """Events that pass: each is a context in which a program takes a step, or comes before the step.

    Args:
        one: the program.
        host: the host's GPU.
    """

    def __init__(self, one, host):
        self.one = one
        self.host = host

    def another_stream(self):
        return changed(self.host, stream=OTHER_STREAM)

    def capture(self):
        return changed(self.host, stream=OTHER_STREAM, captures=True)

    def no_memory(self):
        return changed(self.host, most_bytes=0)

    def little_memory(self):
        return changed(self.host, most_bytes=LIMIT // 3)

    def other_precision(self):
        flags = torch.backends.cudnn
        return flags.flags(enabled=True, benchmark=not flags.benchmark, allow_tf32=not flags.allow_tf32)

    def deterministic_algorithms(self):
        return torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=torch.backends.cudnn.allow_tf32)

    def channels_last(self):
        return changed(self.one, x=self.one.x.contiguous(memory_format=torch.channels_last))

    def another_size(self):
        return changed(self.one, x=torch.randn(4, 4, 9, 8))

    def unaligned(self):
        x = self.one.x
        return changed(self.one, x=torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x))

    def evaluation(self):
        with torch.no_grad():
            for _ in range(3):
                self.one.model(self.one.x)
        self.one.program.passed_ms += 60e3

    def accumulation(self):
        for _ in range(2):
            self.one.model(self.one.x).square().sum().backward()

    def interrupted_backward(self):
        def interrupt(_):
            raise InterruptedPassError

        first, relu, second = self.one.model
        near = relu(first(self.one.x))
        near.register_hook(interrupt)
        with pytest.raises(InterruptedPassError):
            second(near).sum().backward()

    def disabled(self):
        process_overrides.use(None)
        self.one.model(self.one.x).sum().backward()
        process_overrides.use(self.one.made)

    def inner_context(self):
        process_overrides.use(TunedProgram(self.host, 50.0).made)
        self.one.model(self.one.x).sum().backward()
        process_overrides.use(self.one.made)

    def another_model(self):
        model = torch.nn.Conv2d(4, 3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(self.one.x).sum().backward()
            optimizer.step()


NAMES = sorted(name for name in vars(Events) if name[0] != "_")


@pytest.fixture(params=MODES)
def one(request, program, gate_library):
    options = dict(MODES[request.param])
    library = gate_library if options.pop("gate", False) else None
    found = program(library=library, **options)
    with found.enable():
        yield found


def step_with(one, host, name, calls):
    """Take a step in an event, and check what it computed, on which stream, and in how much workspace."""
    with getattr(Events(one, host), name)() or nullcontext():
        host.forget()
        calls()
        gated = one.is_gated
        one.check()
        if not gated:  # the gate asks PyTorch for the stream, which has none on the host
            assert {each.stream or 0 for each in calls()} <= {host.stream}, name
        if one.planned is not None:
            assert max(host.allocated, default=0) <= LIMIT + LATER, name


def all_run(one):
    """Return whether a step has none of PyTorch's own kernels."""
    before = one.program.baseline_calls
    one.check()
    return one.program.baseline_calls == before


def test_events_in_a_program_that_is_tuned_pass(one, host, calls):
    random = Random(1)
    one.settle()
    one.until(lambda: all_run(one), 5)
    for _ in range(3):
        names = random.sample(NAMES, 4)
        for name in names:
            step_with(one, host, name, calls)
        one.until(lambda: all_run(one), 20)
        assert all(all_run(one) for _ in range(5)), names


def test_events_while_a_program_is_tuned_pass(one, host, calls):
    random, passed = Random(2), []
    for at in range(60):
        if one.phase is TuningPhase.SETTLED:
            break
        one.check()
        if at % 3 == 0:
            watches = one.phase is TuningPhase.WATCHING
            passed.append(random.choice([each for each in NAMES if not (watches and each in OTHER_LOOKS)]))
            step_with(one, host, passed[-1], calls)
    one.settle()
    if one.planned is None:  # else a plan that was found while memory was short may stay
        assert len(one.tuner.kernels) == 5, passed
    one.until(lambda: all_run(one), 20)
    assert all(all_run(one) for _ in range(5)), passed
