"""Programs that torch.compile made keep being compiled, whatever watches their operators."""

import subprocess
import sys
from threading import Event, Thread

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from ucudnn.errors import InvalidValueError, StepGraphError  # noqa: E402
from ucudnn.memory import budget, fit  # noqa: E402
from ucudnn.torch.device.compilation import EagerOperators  # noqa: E402

WIDTH = 8


class Compiler:
    """Counts how often what it compiles runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, _):
        def run(*given):
            self.runs += 1
            return graph.forward(*given)

        return run


class Seen(EagerOperators):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def compiler():
    """Return a new compiler; nothing that the process has compiled or given up before counts."""
    torch.compiler.reset()
    return Compiler()


class Calling(nn.Module):
    """A model that calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def compiles(module, compiler):
    """Whether a module that is compiled now runs compiled code, whole."""
    before = compiler.runs
    torch.compile(module, backend=compiler, fullgraph=True)(torch.randn(3, WIDTH))
    return compiler.runs == before + 1


def test_compiled_modules_run_eagerly_where_operators_are_seen_and_compiled_after_it(compiler):
    module, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(3, WIDTH)
    made = torch.compile(module, backend=compiler)
    with Seen() as seen:
        with seen:
            found = made(x)
        made(x)
    assert seen.names.count("aten::tanh") == 3, "the inner call is seen twice"
    assert not compiler.runs
    assert torch.equal(made(x), found)
    assert compiler.runs == 1
    assert compiles(module, compiler)


def test_what_is_called_below_a_frame_that_was_given_up_can_be_compiled_later(compiler):
    def function(x):
        return x.sin()

    def step(x):
        for _ in range(1):
            torch._dynamo.graph_break()  # in a loop, so the compiler tries each frame below
            with Seen():
                function(x)

    x = torch.ones(2)
    torch.compile(step, backend=compiler)(x)
    torch.compile(function, backend=compiler, fullgraph=True)(x)
    assert compiler.runs == 1


def test_threads_see_operators_at_overlapping_times(compiler):
    inside, left = Event(), Event()

    def sees():
        with Seen():
            inside.set()
            assert left.wait(60)

    made = torch.compile(nn.Tanh(), backend=compiler)
    thread = Thread(target=sees)
    with Seen():
        thread.start()
        assert inside.wait(60)
    made(torch.ones(2))
    assert not compiler.runs, "another thread still sees operators"
    left.set()
    thread.join(60)
    made(torch.ones(2))
    assert compiler.runs == 1


def test_compiled_modules_run_eagerly_within_a_budget_and_compiled_after_it(compiler):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with budget("1GiB"):
        assert not compiles(module, compiler)
    assert compiles(module, compiler)


def test_the_first_compilation_of_a_process_may_be_within_a_budget():
    script = """
import torch, sys
from ucudnn.memory import budget
assert "torch._dynamo" not in sys.modules
ran = []
def backend(graph, _):
    return lambda *given: ran.append(1) or graph(*given)
with budget("1GiB"):
    torch.compile(torch.nn.Tanh(), backend=backend, fullgraph=True)(torch.ones(2))
    torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)(torch.ones(2))
    assert not ran
torch.compile(torch.nn.Sequential(torch.nn.ReLU()), backend=backend, fullgraph=True)(torch.ones(2))
assert ran == [1]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("part", ["model", "loss", "optimizer"])
def test_fit_refuses_what_calls_compiled_code_which_is_compiled_afterwards(part, compiler):
    function = torch.compile(lambda x: x.sin().cos(), backend=compiler)
    model = Calling(function if part == "model" else torch.sin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if part == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend=compiler)

    def loss(y, target):
        return ((function(y) if part == "loss" else y) - target).square().mean()

    given = torch.randn(5, WIDTH), torch.randn(5, 4)
    with pytest.raises(
        (InvalidValueError, StepGraphError), match=r"compiled?\b.*, and a plan .* fit it without torch\.compile"
    ):
        fit(model, given, loss=loss, optimizer=optimizer)
    assert not compiler.runs
    function(torch.randn(2, 2))
    assert compiler.runs == 1
    assert compiles(model.first, compiler)
