"""What a step does beside outputs and tensors that it writes is followed to the bit, or refused with its place."""

import copy
import cProfile
import datetime  # noqa: F401  # in lines of effects
import os  # noqa: F401  # in lines of effects
import random
import sys
import time  # noqa: F401  # in lines of effects
import uuid  # noqa: F401  # in lines of effects
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: F401, N812  # in lines of effects

import ucudnn.memory
from tests.support.plain_training import state_of
from tests.support.strategies import examples
from ucudnn.errors import StepGraphError
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.torch.measuring.operation_costs import measure_operations, step_costs
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program

WIDTH, POOL = 4, ThreadPoolExecutor(1)
NUMBER, ENTRIES, STATE, DRAWN, GENERATOR = 0, [], {"steps": 0}, numpy.random.default_rng(0), torch.Generator()
LAST = None
scripted = torch.jit.CompilationUnit("def scripted(y):\n    return y * y.sigmoid()\n").scripted


class Held:
    """Has an attribute of a class."""

    steps = 0


class Effect(nn.Module):
    """A layer with an effect."""

    classwide = 0

    def __init__(self, effect):
        super().__init__()
        self.effect, self.line, self.tanh = effect, nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.calls, self.log, self.recent, self.table = 0, [], deque(maxlen=3), {}
        self.numbers, self.drawn, self.size = count(), numpy.random.default_rng(1), None
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return self.effect(self, self.line(x))


def made(lines):
    """Return a function of a layer and its output `y` with such lines, in this file."""
    found = {}
    body = "\n    ".join(lines.splitlines())
    exec(compile(f"def effect(layer, y, seen=[]):\n    {body}\n    return y", __file__, "exec"), globals(), found)
    return found["effect"]


def closure():
    steps = 0

    def counted(_, y):
        nonlocal steps
        steps += 1
        return y * steps

    return counted


THREAD = "computes in a thread of its own"
SEEDS, DRAWS, CLOCK = "sets or reads a generator's state", "draws a number in Python", "reads a clock"
BACKWARD, STRUCTURE = "calls backward", "changes parameters, modules or hooks"
GRADIENT, BIAS = r"reads or sets \.grad of .*line", r"changes what .*line\.bias is"
WEIGHT, VALUE, READS = r"changes what .*line\.weight is", "reads the value of a tensor", "reads and changes"
WRITTEN = {  # what the error says, by the lines of an effect
    "torch.manual_seed(11)\ny = F.dropout(y, 0.5)": SEEDS,
    "torch.cuda.manual_seed_all(11)": SEEDS,
    "torch.seed()": SEEDS,
    "y = y * (torch.initial_seed() % 3)": SEEDS,
    "with torch.random.fork_rng():\n    y = y * torch.rand(WIDTH)": SEEDS,
    "state = torch.get_rng_state()\ny = F.dropout(y, 0.5)\ntorch.set_rng_state(state)\ny = F.dropout(y, 0.5)": SEEDS,
    "y = y * torch.rand(WIDTH, generator=layer.generator.manual_seed(3))": SEEDS,
    "try:\n    torch.default_generator.manual_seed(1)\nexcept Exception:\n    y = y * 2": SEEDS,
    "y = y * torch.rand(WIDTH, generator=torch.Generator())": "draws from a generator that forward makes",
    "y = y * random.uniform(1, 2)": DRAWS,
    "random.seed(5)": DRAWS,
    "y = y * sum(map(lambda _: random.random(), range(2)))": DRAWS,
    "y = y * random.Random().random()": DRAWS,
    "y = y * float(numpy.random.default_rng().random())": DRAWS,
    "y = y * float(numpy.random.rand())": DRAWS,
    "y = y * float(layer.drawn.random())": f"{READS} .*drawn",
    "y = y * float(DRAWN.random())": f"{READS} global DRAWN",
    "y = y * (1 + os.urandom(1)[0])": DRAWS,
    "y = y * (1 + uuid.uuid4().int % 7)": DRAWS,
    "y = y * (1 + time.time() % 7)": CLOCK,
    "y = y * (1 + datetime.datetime.now().microsecond)": CLOCK,
    "layer.line(torch.ones(WIDTH)).sum().backward()": BACKWARD,
    "torch.autograd.backward(layer.line(torch.ones(WIDTH)).sum())": BACKWARD,
    "layer.line.weight.grad = torch.ones(WIDTH, WIDTH)": rf"{GRADIENT}\.weight",
    "del layer.line.weight.grad": rf"{GRADIENT}\.weight",
    "y = y * (2 if layer.line.weight.grad is None else 3)": rf"{GRADIENT}\.weight",
    "layer.line.zero_grad()": GRADIENT,
    "layer.line.bias.requires_grad_(False)": BIAS,
    "layer.line.bias.requires_grad = False": BIAS,
    "layer.line.bias.data = torch.ones(WIDTH)": BIAS,
    "with torch.no_grad():\n    layer.line.bias.set_(torch.ones(WIDTH))": BIAS,
    "layer.line.weight.register_hook(lambda grad: grad * 2)": WEIGHT,
    "layer.line.weight.register_post_accumulate_grad_hook(lambda _: None)": WEIGHT,
    "layer.line.weight.share_memory_()": WEIGHT,
    "layer.line.register_forward_hook(lambda *given: given[2] * 2)": STRUCTURE,
    "layer.register_buffer('other', torch.ones(WIDTH))": STRUCTURE,
    "del layer.scale": STRUCTURE,
    "layer.gain = nn.Parameter(torch.ones(WIDTH))\ny = y * layer.gain": STRUCTURE,
    "layer.second = nn.Linear(WIDTH, WIDTH)\ny = layer.second(y)": STRUCTURE,
    "torch.set_default_dtype(torch.float64)": r"changes torch\.get_default_dtype\(\)",
    "torch.set_default_dtype(torch.float64)\ntry:\n    y = y * torch.full((WIDTH,), 1 / 3).float()\n"
    "finally:\n    torch.set_default_dtype(torch.float32)": r"(computes under|changes) .*get_default_dtype\(\)",
    "torch.set_default_device('meta')": "changes the device of torch.set_default_device",
    "torch._C._set_grad_enabled(False)": "changes the grad mode",
    "torch.set_autocast_enabled('cpu', True)": r"changes torch\.is_autocast_enabled\('cpu'\)",
    "torch.use_deterministic_algorithms(True)\ntry:\n    y = y * 2\nfinally:\n"
    "    torch.use_deterministic_algorithms(False)": "computes under another value of .*are_deterministic_algorithms",
    "layer.calls += 1\nif layer.calls > 3:\n    y = y * 2": f"{READS} .*calls",
    "layer.log.append(1)\ny = y * len(layer.log)": f"{READS} .*log",
    "layer.log.append(torch.ones(WIDTH))\ny = y * len(layer.log)": f"{READS} .*log",
    "layer.recent.append(1)\ny = y * len(layer.recent)": f"{READS} .*recent",
    "layer.table['steps'] = layer.table.get('steps', 0) + 1\ny = y * layer.table['steps']": f"{READS} .*table",
    "y = y * (1 + next(layer.numbers))": f"{READS} .*numbers",
    "Effect.classwide += 1\ny = y * Effect.classwide": f"{READS} Effect.classwide",
    "Held.steps += 1\ny = y * Held.steps": f"{READS} Held.steps",
    "global NUMBER\nNUMBER += 1\ny = y * NUMBER": f"{READS} global NUMBER",
    "ENTRIES.append(1)\ny = y * len(ENTRIES)": f"{READS} global ENTRIES",
    "STATE['steps'] += 1\ny = y * STATE['steps']": f"{READS} .*STATE",
    "seen.append(1)\ny = y * len(seen)": rf"{READS} (a default of effect|effect\.__defaults__)",
    "y.detach().numpy()": VALUE,
    "numpy.asarray(y.detach())": VALUE,
    "y.tolist()": VALUE,
    "y.sum().item()": VALUE,
    "int(y.sum())": VALUE,
    "bool(y.sum() > 0)": VALUE,
    "f'{y.sum():.3f}'": VALUE,
    "f'{y}'": VALUE,
    "print(y)": VALUE,
    "y.data_ptr()": VALUE,
    "torch.save(y, os.devnull)": VALUE,
    "copy.copy(y)": VALUE,
    "POOL.submit(lambda: y.detach().mul_(2)).result()": THREAD,
    "POOL.submit(layer.scale.mul_, 2).result()\ny = y * layer.scale": THREAD,
    "y = POOL.submit(torch.tanh, y).result()": THREAD,
    "POOL.submit(lambda: float(y.sum())).exception()": THREAD,
    "y = scripted(y)": "calls a function of TorchScript",
}
ONCE = "layer.calls or {}.register_forward_hook(lambda *given: given[2] * 2)\nlayer.calls = 1\n"
REFUSED = {lines: (made(lines), pattern) for lines, pattern in WRITTEN.items()}
REFUSED["a closure"] = closure(), f"{READS} steps of .*closure"
FOLLOWED = [
    "",
    "y = y * scripted(torch.arange(WIDTH))",
    "y = F.dropout(y, 0.5)",
    "y = y * torch.rand(WIDTH, generator=layer.generator)",
    "y = y.detach().clone().bernoulli_(0.5, generator=GENERATOR) * y",
    "y = y * random.Random(3).uniform(1, 2)",
    "y.register_hook(lambda grad: grad * 2)\ny = y.tanh()",
    "with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 2, lambda kept: kept / 2):\n    y = y.tanh()",
    "probe = y.detach().requires_grad_()\n"
    "y = y + torch.autograd.grad(layer.line(probe).tanh().sum(), probe, create_graph=True)[0]",
    "global LAST\nlayer.size = LAST = tuple(y.shape)",
    "if layer.size != y.shape:\n    layer.size = y.shape\ny = y * layer.size[1]",
    "with torch.no_grad():\n    z = torch.rand(WIDTH)\nwith torch.autocast('cpu', enabled=False):\n    y = y * z",
    "z = y * layer.scale.clone()\nlayer.scale = layer.scale * 0.5\ny = z",
    "layer.line.eval()",
    ONCE.format("layer.tanh") + "y = layer.tanh(y)",
]


def states():
    """Return the states of all generators that the program has."""
    own = torch.get_rng_state().tolist(), GENERATOR.get_state().tolist(), str(DRAWN.bit_generator.state)
    return *own, random.getstate(), str(numpy.random.get_state())


def settle():
    """Let generators begin anew."""
    for each in (torch.default_generator, GENERATOR):
        each.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def network(effect, before=(), behind=()):
    """Return a network with a layer that has an effect at 'inner.N'."""
    kinds = {"linear": lambda: nn.Linear(WIDTH, WIDTH), "tanh": nn.Tanh, "norm": lambda: nn.LayerNorm(WIDTH)}
    kinds |= {"dropout": lambda: nn.Dropout(0.3), "deep": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())}
    torch.manual_seed(0)
    first, last = ([kinds[kind]() for kind in part] for part in (before, behind))
    model = nn.Sequential()
    model.add_module("inner", nn.Sequential(*first, Effect(effect), *last))
    return model


def trained(model, call, x, steps=3):
    """Train, and return all that a loop can see."""
    settle()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = call(x)
        output.square().sum().backward()
        found += [output.detach().clone(), *(each.grad.clone() for each in model.parameters())]
        optimizer.step()
    own = [
        (each.size, each.calls, each.generator.get_state().tolist()) for each in model.modules() if type(each) is Effect
    ]
    return [*found, *state_of(model, None)], (own, [each.training for each in model.modules()], LAST, states())


def check(effect, pattern, place, policy, before=(), behind=()):
    """Check that an effect is refused by name and place, or followed to the bit, and that `fit` draws nothing."""
    plain, x = network(effect, before, behind), torch.randn(3, WIDTH)
    model, was = copy.deepcopy(plain), states()
    own = [each.generator.get_state() for each in model.modules() if type(each) is Effect]
    if pattern is not None:
        with pytest.raises(StepGraphError, match=rf"^{place} at .*test_step_effects\.py:\d+ {pattern}") as caught:
            ucudnn.memory.fit(model, x, policy=policy)
        assert str(caught.value).count("\n") < 3
    else:
        step = ucudnn.memory.fit(model, x, policy=policy, debug=True)
    assert states() == was
    assert all(map(torch.equal, own, [each.generator.get_state() for each in model.modules() if type(each) is Effect]))
    if pattern is None:
        found, seen = trained(model, step, x)
        wanted, expected = trained(plain, plain, x)
        assert seen == expected
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("lines", REFUSED)
def test_what_no_plan_does_is_refused_with_module_and_line(lines):
    behind = [] if "torch.set_default_dtype(torch.float64)" in lines else ["tanh"]  # which would compute in that type
    check(*REFUSED[lines], r"inner\.0(\.line)?", "stock", behind=behind)


@pytest.mark.parametrize("lines", FOLLOWED)
def test_what_a_plan_does_is_followed_to_the_bit(lines):
    check(made(lines), None, "", "checkpoint")


def test_a_hook_that_acts_from_the_second_step_on_is_refused_and_gone():
    model = network(made(ONCE.format("layer.line")))
    with pytest.raises(StepGraphError, match="computes otherwise then"):
        ucudnn.memory.fit(model, torch.randn(3, WIDTH))
    assert not model.inner[0].line._forward_hooks


LAYERS = st.lists(st.sampled_from(["linear", "tanh", "norm", "dropout", "deep"]), max_size=3)
DTYPE = made("torch.set_default_dtype(torch.float64)")
EFFECTS = [*(each for lines, each in REFUSED.items() if lines != "torch.set_default_dtype(torch.float64)")]
EFFECTS += [(made(lines), None) for lines in FOLLOWED]


@examples(1 / 3)
@given(effect=st.sampled_from(EFFECTS), policy=st.sampled_from([*POLICIES]), before=LAYERS, behind=LAYERS)
def test_an_effect_anywhere_in_a_network_is_followed_or_refused(effect, policy, before, behind):
    check(*effect, rf"inner\.{len(before)}(\.line)?", policy, before, behind)


def test_measuring_draws_from_no_generator_of_the_model():
    model, x = network(made(FOLLOWED[2])), torch.randn(3, WIDTH)
    program = trace_program(step_subject(model, (x,), None, None), "step", 3)
    own = model.inner[0].generator
    before, was = own.get_state(), states()
    measure_operations(program, step_costs(program.graph, program.device), repeats=1)
    assert torch.equal(own.get_state(), before)
    assert states() == was


def test_a_profiler_of_the_program_goes_on_and_settings_are_as_before():
    with cProfile.Profile() as profiler:
        ucudnn.memory.fit(network(made(FOLLOWED[1])), torch.randn(3, WIDTH), policy="stock")
        assert sys.getprofile() is profiler
    with pytest.raises(StepGraphError):
        ucudnn.memory.fit(network(DTYPE), torch.randn(3, WIDTH), policy="stock")
    assert (torch.get_default_dtype(), sys.getprofile()) == (torch.float32, None)
