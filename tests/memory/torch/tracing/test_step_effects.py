"""What a step does beside outputs and tensors that it writes is followed to the bit, or refused with its place."""

import copy
import datetime
import os
import random
import time
import uuid
from collections import deque
from itertools import count

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import ucudnn.memory  # noqa: E402
from tests.support.plain_training import state_of  # noqa: E402
from tests.support.strategies import examples  # noqa: E402
from ucudnn.errors import StepGraphError  # noqa: E402
from ucudnn.memory.policies.catalog import POLICIES  # noqa: E402
from ucudnn.memory.torch.measuring.operation_costs import measure_operations, step_costs  # noqa: E402
from ucudnn.memory.torch.subject.step_arguments import step_subject  # noqa: E402
from ucudnn.memory.torch.tracing.traced_program import trace_program  # noqa: E402

WIDTH = 4
REFUSED, FOLLOWED = {}, {}
NUMBER, ENTRIES, STATE, DRAWN, GENERATOR = 0, [], {"steps": 0}, numpy.random.default_rng(0), torch.Generator()
LAST = None


class Held:
    """Has an attribute of a class."""

    steps = 0


def refused(pattern):
    """Note an effect that is refused in such words."""
    return lambda function: REFUSED.setdefault(function.__name__, (function, pattern))[0]


def followed(function):
    """Note an effect that a plan follows."""
    FOLLOWED[function.__name__] = function
    return function


class Effect(nn.Module):
    """A layer with an effect."""

    classwide = 0

    def __init__(self, effect):
        super().__init__()
        self.effect, self.line = effect, nn.Linear(WIDTH, WIDTH)
        self.calls, self.log, self.recent, self.table = 0, [], deque(maxlen=3), {}
        self.numbers, self.drawn, self.size = count(), numpy.random.default_rng(1), None
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return self.effect(self, self.line(x))


def _counter():
    steps = 0

    def closure(_, y):
        nonlocal steps
        steps += 1
        return y * steps

    return closure


refused("reads and changes steps of .*closure")(_counter())


@refused("sets or reads a generator's state")
def seed(_, y):
    torch.manual_seed(11)
    return F.dropout(y, 0.5)


@refused("sets or reads a generator's state")
def seed_of_cuda(_, y):
    torch.cuda.manual_seed_all(11)
    return y


@refused("sets or reads a generator's state")
def seeded_anew(_, y):
    torch.seed()
    return y


@refused("sets or reads a generator's state")
def seed_read(_, y):
    return y * (torch.initial_seed() % 3)


@refused("sets or reads a generator's state")
def fork(_, y):
    with torch.random.fork_rng():
        return y * torch.rand(WIDTH)


@refused("sets or reads a generator's state")
def state_restored(_, y):
    state = torch.get_rng_state()
    first = F.dropout(y, 0.5)
    torch.set_rng_state(state)
    return first + F.dropout(y, 0.5)


@refused("sets or reads a generator's state")
def own_generator_seeded(layer, y):
    return y * torch.rand(WIDTH, generator=layer.generator.manual_seed(3))


@refused("sets or reads a generator's state")
def swallowed(_, y):
    try:
        torch.default_generator.manual_seed(1)
    except Exception:  # noqa: BLE001
        y = y * 2
    return y


@refused("draws from a generator that forward makes")
def generator_made(_, y):
    return y * torch.rand(WIDTH, generator=torch.Generator())


@refused("draws a number in Python")
def python_number(_, y):
    return y * random.uniform(1, 2)


@refused("draws a number in Python")
def python_seed(_, y):
    random.seed(5)
    return y


@refused("draws a number in Python")
def python_choices(_, y):
    return y * sum(map(lambda _: random.random(), range(2)))


@refused("draws a number in Python")
def python_generator_without_seed(_, y):
    return y * random.Random().random()


@refused("draws a number in Python")
def numpy_without_seed(_, y):
    return y * float(numpy.random.default_rng().random())


@refused("draws a number in Python")
def numpy_number(_, y):
    return y * float(numpy.random.rand())


@refused("reads and changes .*drawn")
def numpy_of_module(layer, y):
    return y * float(layer.drawn.random())


@refused("reads and changes global DRAWN")
def numpy_of_program(_, y):
    return y * float(DRAWN.random())


@refused("draws a number in Python")
def entropy(_, y):
    return y * (1 + os.urandom(1)[0])


@refused("draws a number in Python")
def unique(_, y):
    return y * (1 + uuid.uuid4().int % 7)


@refused("reads a clock")
def clock(_, y):
    return y * (1 + time.time() % 7)


@refused("reads a clock")
def date(_, y):
    return y * (1 + datetime.datetime.now().microsecond)


@refused("calls backward")
def backward(layer, y):
    layer.line(torch.ones(WIDTH)).sum().backward()
    return y


@refused("calls backward")
def backward_of_torch(layer, y):
    torch.autograd.backward(layer.line(torch.ones(WIDTH)).sum())
    return y


@refused(r"reads or sets \.grad of .*line\.weight")
def gradient_set(layer, y):
    layer.line.weight.grad = torch.ones(WIDTH, WIDTH)
    return y


@refused(r"reads or sets \.grad of .*line\.weight")
def gradient_read(layer, y):
    return y * (2 if layer.line.weight.grad is None else 3)


@refused(r"reads or sets \.grad of .*line")
def gradients_freed(layer, y):
    layer.line.zero_grad()
    return y


@refused(r"changes what .*line\.bias is")
def frozen(layer, y):
    layer.line.bias.requires_grad_(False)
    return y


@refused(r"changes what .*line\.bias is")
def frozen_by_attribute(layer, y):
    layer.line.bias.requires_grad = False
    return y


@refused(r"changes what .*line\.bias is")
def data(layer, y):
    layer.line.bias.data = torch.ones(WIDTH)
    return y


@refused(r"changes what .*line\.bias is")
def memory(layer, y):
    with torch.no_grad():
        layer.line.bias.set_(torch.ones(WIDTH))
    return y


@refused(r"changes what .*line\.weight is")
def hook_of_parameter(layer, y):
    layer.line.weight.register_hook(lambda grad: grad * 2)
    return y


@refused(r"changes what .*line\.weight is")
def hook_behind_gradient(layer, y):
    layer.line.weight.register_post_accumulate_grad_hook(lambda _: None)
    return y


@refused("changes parameters, modules or hooks")
def hook_of_module(layer, y):
    layer.line.register_forward_hook(lambda *given: given[2] * 2)
    return y


@refused("changes parameters, modules or hooks")
def new_buffer(layer, y):
    layer.register_buffer("other", torch.ones(WIDTH))
    return y


@refused("changes parameters, modules or hooks")
def no_buffer(layer, y):
    del layer.scale
    return y


@refused("changes parameters, modules or hooks")
def new_parameter(layer, y):
    layer.gain = nn.Parameter(torch.ones(WIDTH))
    return y * layer.gain


@refused("changes parameters, modules or hooks")
def new_module(layer, y):
    layer.second = nn.Linear(WIDTH, WIDTH)
    return layer.second(y)


@refused("changes the default dtype")
def dtype_left(_, y):
    torch.set_default_dtype(torch.float64)
    return y


@refused("(computes under another value of|changes) the default dtype")
def dtype_inside(_, y):
    torch.set_default_dtype(torch.float64)
    try:
        return y * torch.full((WIDTH,), 1 / 3).float()
    finally:
        torch.set_default_dtype(torch.float32)


@refused("changes the default device")
def device_left(_, y):
    torch.set_default_device("meta")
    return y


@refused("changes the grad mode")
def gradients_left_off(_, y):
    torch._C._set_grad_enabled(False)
    return y


@refused("changes autocast")
def autocast_left(_, y):
    torch.set_autocast_enabled("cpu", True)
    return y


@refused("computes under another value of deterministic algorithms")
def deterministic(_, y):
    torch.use_deterministic_algorithms(True)
    try:
        return y * 2
    finally:
        torch.use_deterministic_algorithms(False)


@refused("reads and changes .*calls")
def attribute(layer, y):
    layer.calls += 1
    return y * 2 if layer.calls > 3 else y


@refused("reads and changes .*log")
def listed(layer, y):
    layer.log.append(1)
    return y * len(layer.log)


@refused("reads and changes .*log")
def listed_tensors(layer, y):
    layer.log.append(torch.ones(WIDTH))
    return y * len(layer.log)


@refused("reads and changes .*recent")
def queued(layer, y):
    layer.recent.append(1)
    return y * len(layer.recent)


@refused("reads and changes .*table")
def tabled(layer, y):
    layer.table["steps"] = layer.table.get("steps", 0) + 1
    return y * layer.table["steps"]


@refused("reads and changes .*numbers")
def counted(layer, y):
    return y * (1 + next(layer.numbers))


@refused("reads and changes Effect.classwide")
def of_class(_, y):
    Effect.classwide += 1
    return y * Effect.classwide


@refused("reads and changes Held.steps")
def of_other_class(_, y):
    Held.steps += 1
    return y * Held.steps


@refused("reads and changes global NUMBER")
def global_number(_, y):
    global NUMBER
    NUMBER += 1
    return y * NUMBER


@refused("reads and changes global ENTRIES")
def global_list(_, y):
    ENTRIES.append(1)
    return y * len(ENTRIES)


@refused("reads and changes .*STATE")
def global_table(_, y):
    STATE["steps"] += 1
    return y * STATE["steps"]


@refused("reads and changes (a default of default|default\\.__defaults__)")
def default(_, y, seen=[]):  # noqa: B006
    seen.append(1)
    return y * len(seen)


for number, read in enumerate(
    (
        lambda y: y.detach().numpy(),
        lambda y: numpy.asarray(y.detach()),
        lambda y: y.tolist(),
        lambda y: y.sum().item(),
        lambda y: int(y.sum()),
        lambda y: bool(y.sum() > 0),
        lambda y: f"{y.sum():.3f}",
        lambda y: f"{y}",
        lambda y: print(y),  # noqa: T201
        lambda y: y.data_ptr(),
        lambda y: torch.save(y, os.devnull),
    )
):
    REFUSED[f"value {number}"] = (lambda _, y, read=read: (read(y), y)[1]), "reads the value of a tensor"


@followed
def nothing(_, y):
    return y


@followed
def dropout(_, y):
    return F.dropout(y, 0.5)


@followed
def own_generator(layer, y):
    return y * torch.rand(WIDTH, generator=layer.generator)


@followed
def generator_of_program(_, y):
    return y.detach().clone().bernoulli_(0.5, generator=GENERATOR) * y


@followed
def python_generator_made(_, y):
    return y * random.Random(3).uniform(1, 2)


@followed
def hook_of_tensor(_, y):
    y.register_hook(lambda grad: grad * 2)
    return y.tanh()


@followed
def hooks_of_saved_tensors(_, y):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved / 2):
        return y.tanh()


@followed
def gradient_inside(layer, y):
    probe = y.detach().requires_grad_()
    (found,) = torch.autograd.grad(layer.line(probe).tanh().sum(), probe, create_graph=True)
    return y + found


@followed
def written_only(layer, y):
    global LAST
    layer.size = LAST = tuple(y.shape)
    return y


@followed
def made_once(layer, y):
    if layer.size != y.shape:
        layer.size = y.shape
    return y * layer.size[1]


@followed
def modes_inside(_, y):
    with torch.no_grad():
        noise = torch.rand(WIDTH)
    with torch.autocast("cpu", enabled=False):
        return y * noise


@followed
def buffer_set_anew(layer, y):
    z = y * layer.scale.clone()
    layer.scale = layer.scale * 0.5
    return z


@followed
def mode_of_module(layer, y):
    layer.line.eval()
    return y


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


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_does_is_refused_with_module_and_line(name):
    check(*REFUSED[name], r"inner\.0(\.line)?", "stock")


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_plan_does_is_followed_to_the_bit(name):
    check(FOLLOWED[name], None, "", "checkpoint")


LAYERS = st.lists(st.sampled_from(["linear", "tanh", "norm", "dropout", "deep"]), max_size=3)
EFFECTS = [
    *(each for name, each in REFUSED.items() if name != "dtype_left"),
    *((each, None) for each in FOLLOWED.values()),
]


@examples(1 / 3)
@given(effect=st.sampled_from(EFFECTS), policy=st.sampled_from([*POLICIES]), before=LAYERS, behind=LAYERS)
def test_an_effect_anywhere_in_a_network_is_followed_or_refused(effect, policy, before, behind):
    check(*effect, rf"inner\.{len(before)}(\.line)?", policy, before, behind)


def test_measuring_draws_from_no_generator_of_the_model():
    model, x = network(own_generator), torch.randn(3, WIDTH)
    program = trace_program(step_subject(model, (x,), None, None), "step", 3)
    own = model.inner[0].generator
    before, was = own.get_state(), states()
    measure_operations(program, step_costs(program.graph, program.device), repeats=1)
    assert torch.equal(own.get_state(), before)
    assert states() == was


def test_a_profiler_of_the_program_goes_on_and_settings_are_as_before():
    import cProfile
    import sys

    with cProfile.Profile() as profiler:
        ucudnn.memory.fit(network(dropout), torch.randn(3, WIDTH), policy="stock")
        assert sys.getprofile() is profiler
    with pytest.raises(StepGraphError):
        ucudnn.memory.fit(network(dtype_left), torch.randn(3, WIDTH), policy="stock")
    assert (torch.get_default_dtype(), sys.getprofile()) == (torch.float32, None)
