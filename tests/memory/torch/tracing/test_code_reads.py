"""What forward's functions read is a value in a plan's code: a step is refused by name when it has changed."""

from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import given, strategies
from torch import nn

import ucudnn.memory
from tests.support.strategies import examples
from ucudnn.errors import InvalidValueError

POLICIES = ["stock", "checkpoint", "checkpoint-selective", "swap", "spill"]
SOURCE = """
import functools, types
import torch
from torch import nn
from torch.nn import functional as F

SCALE, OTHER, PAIR, WEIGHT = 1.5, 1.5, (1.5, "x"), torch.full((3,), 1.5)
CONFIG, SETTINGS = {{"beta": 1.5, "unread": 0}}, types.SimpleNamespace(gain=1.5, unread=0)
unread = 0

def helper(x):
    return [x * inner(each) for each in (1.0,)][0]

def inner(value, share=1.5):
    return value * share

@functools.lru_cache
def cached():
    return OTHER

class Owner:
    share = 1.5

    def __init__(self):
        self.part = 1.5

    def times(self, x):
        return x * self.part

    def __call__(self, y, target):
        return ((y - target) ** 2).mean() * self.part

BOUND = Owner().times

def made():
    beta = 1.5

    class Base(nn.Module):
        factor = 1.5

        def above(self, x):
            return x * 1.5

        def forward(self, x):
            return self.first(x)

    class Between(Base):
        pass

    class Block(Between):
        unread = 0

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.part = functools.partial(torch.mul, other=1.5)
            self.activation, self.times = lambda x, by=1.5: x * by, Owner().times

        def above(self, x):
            return super().above(x)

        def method(self, x):
            return x * 1.5

        @property
        def slope(self):
            return 1.5

        @staticmethod
        def still(x):
            return x * 1.5

        @classmethod
        def of_class(cls, x):
            return x * cls.factor

        def default(self, x, by=1.5, *, more=1.5):
            return x * by * more

        def forward(self, x):
            x = super().forward(x)
            {lines}
            return self.second(F.leaky_relu(x))

    return Block, (lambda: beta).__closure__[0]
"""


def other(self, x):
    return x * 2.5


def times(x):
    return x * 2.5


_call, _call_impl = nn.Module.__call__, nn.Module._call_impl


def called(self, *args):
    return _call(self, *args)


def implemented(self, *args):
    return _call_impl(self, *args)


def looked_up(self, name):
    return times if name == "first" else nn.Module.__getattribute__(self, name)


class Times:
    """A plain object with a method."""

    def __init__(self, by):
        self.by = by

    def times(self, x):
        return x * self.by


OF_MODULE = "vars(model)['{}']".format
CHANGES = {  # a line of forward, what replaces the value that it reads, and how the error begins
    "global": ("x = x * SCALE", "SCALE", 2.5, "{module}.SCALE is 2.5"),
    "global of a cached function": ("x = x * cached()", "OTHER", 2.5, "{module}.OTHER is 2.5"),
    "global tuple": ("x = x * PAIR[0]", "PAIR", (2.5, "x"), r"{module}.PAIR\[0\] is 2.5"),
    "global tensor": ("x = x * WEIGHT", "WEIGHT", torch.ones(3), "{module}.WEIGHT is another tensor"),
    "global method": ("x = BOUND(x)", "BOUND", times, "{module}.BOUND is <function"),
    "entry": ('x = x * CONFIG["beta"]', "CONFIG['beta']", 2.5, r"{module}.CONFIG\['beta'\] is 2.5"),
    "object": ("x = x * SETTINGS.gain", "SETTINGS.gain", 2.5, "{module}.SETTINGS.gain is 2.5"),
    "function": ("x = helper(x)", "helper", times, "{module}.helper is <function"),
    "function within it": ("x = helper(x)", "inner", lambda value: 2.5, "{module}.inner is <function"),
    "its code": ("x = helper(x)", "helper.__code__", times.__code__, "the code of helper is <code"),
    "its default": ("x = helper(x)", "inner.__defaults__", (2.5,), r"inner.__defaults__\[0\] is 2.5"),
    "class's own": ("x = x * Owner.share", "Owner.share", 2.5, "Owner.share is 2.5"),
    "closure": ("x = x * beta", "cell.cell_contents", 2.5, "beta, which .* reads, is 2.5"),
    "method of a class": ("x = self.method(x)", "Block.method", other, "Block.method is"),
    "method of a module": ("x = self.method(x)", OF_MODULE("method"), times, "method is <"),
    "its code, too": ("x = self.method(x)", "Block.method.__code__", other.__code__, "the code of .*Block.method is"),
    "method by super": ("x = self.above(x)", "Base.above", other, "Base.above is"),
    "method between": ("x = self.above(x)", "Between.above", other, "Between.above is .* was not set"),
    "property": ("x = x * self.slope", "Block.slope", property(lambda self: 2.5), "Block.slope is"),
    "static": ("x = self.still(x)", "Block.still", staticmethod(times), "Block.still is"),
    "of the class": ("x = self.of_class(x)", "Block.of_class", classmethod(other), "Block.of_class is"),
    "read of the class": ("x = self.of_class(x)", "Base.factor", 2.5, "Base.factor is 2.5"),
    "read of the type": ("x = x * type(self).factor", "Block.factor", 2.5, "Block.factor is 2.5"),
    "default": ("x = self.default(x)", "Block.default.__defaults__", (2.5,), r".*default.__defaults__\[0\] is"),
    "default by name": (
        "x = self.default(x)",
        "Block.default.__kwdefaults__['more']",
        2.5,
        r".*default.__kwdefaults__\['more'\] is 2.5",
    ),
    "of a lambda": (
        "x = self.activation(x)",
        "model.activation.__defaults__",
        (2.5,),
        r".*<lambda>.__defaults__\[0\] is",
    ),
    "partial": ("x = self.part(x)", "model.part.keywords['other']", 2.5, r"part.keywords\['other'\] is 2.5"),
    "another partial": (
        "x = self.part(x)",
        OF_MODULE("part"),
        partial(torch.mul, other=2.5),
        r"part.keywords\['other'\] is 2.5",
    ),
    "another function in a partial": (
        "x = self.part(x)",
        OF_MODULE("part"),
        partial(torch.add, other=1.5),
        "part.func",
    ),
    "method of another object": ("x = self.times(x)", OF_MODULE("times"), Times(2.5).times, "times is"),
}
ALWAYS = {  # what every forward reads
    "class": ("model.__class__", lambda case: type("New", (case.scope["Block"],), {"forward": other}), "__class__ is"),
    "class within": ("model.first.__class__", lambda _: type("New", (nn.Linear,), {}), "first.__class__ is"),
    "forward": ("Block.forward", lambda _: other, "Block.forward is"),
    "forward by super": ("Base.forward", lambda _: other, "Base.forward is"),
    "call": ("Block.__call__", lambda _: other, "Block.__call__ is .* was not set"),
    "call of a base": ("Base.__call__", lambda _: other, "Base.__call__ is"),
    "call of a module": ("vars(model.first)['_call_impl']", lambda _: times, "first._call_impl is"),
    "call of every module": ("nn.Module.__call__", lambda _: called, "Module.__call__ is"),
    "call within it": ("nn.Module._call_impl", lambda _: implemented, "Module._call_impl is"),
    "getattr": ("Block.__getattr__", lambda _: lambda self, name: times, "Block.__getattr__ is"),
    "getattribute": ("Block.__getattribute__", lambda _: looked_up, "Block.__getattribute__ is"),
}
HARMLESS = {  # what no forward reads, and what is equal
    "unread": 1,
    "CONFIG['unread']": 1,
    "SETTINGS.unread": 1,
    "Block.unread": 1,
    "new": 1,
    "SCALE": float("1.5"),
    "helper.__code__": None,
}


class Case:
    """A fitted model whose forward has some lines, in a module of its own.

    Attributes:
        names: the module's variables.
        scope: these, the model, its classes, and the cell of a variable of the function that makes them.
    """

    def __init__(self, lines, policy):
        self.module = ModuleType("written_model")
        self.names = vars(self.module)
        exec(SOURCE.format(lines="\n            ".join(lines) or "pass"), self.names)
        kind, cell = self.names["made"]()
        torch.manual_seed(0)
        self.model, self.x = kind(), torch.randn(4, 3)
        classes = {each.__name__: each for each in kind.__mro__[:3]}
        self.scope = {**self.names, **classes, "model": self.model, "cell": cell}
        self.step = ucudnn.memory.fit(self.model, self.x, policy=policy)

    def put(self, patch, target, value):
        """Change a variable, an entry or an attribute."""
        if target.endswith("]"):
            owner, _, key = target[:-1].rpartition("[")
            patch.setitem(eval(owner, self.scope), eval(key), value)
        elif "." in target:
            owner, _, name = target.rpartition(".")
            if name == "__code__" and value is None:
                value = getattr(eval(owner, self.scope), name).replace()
            patch.setattr(eval(owner, self.scope), name, value, raising=False)
        else:
            patch.setitem(self.names, target, value)

    def check(self):
        """Compare the output and gradients of a step with those of the model as it is, to the bit."""
        found = []
        for call in (self.model, self.step):
            self.model.zero_grad()
            y = call(self.x)
            y.square().sum().backward()
            found.append([y.detach(), *(each.grad.clone() for each in self.model.parameters())])
        assert all(map(torch.equal, *found))

    def refuse(self, message):
        """Check that the step is refused by name."""
        with pytest.raises(InvalidValueError, match=rf"^{message.format(module='written_model')}.*fit it again"):
            self.step(self.x)


@pytest.fixture(scope="module")
def case():
    """Fit a model once whose forward has all lines."""
    return Case([line for line, *_ in CHANGES.values()], "checkpoint")


@pytest.mark.parametrize("name", CHANGES)
def test_what_functions_read_and_that_changed_is_refused_by_name(case, name, monkeypatch):
    _, target, value, message = CHANGES[name]
    case.names["cached"].cache_clear()
    before = case.model(case.x)
    case.put(monkeypatch, target, value)
    case.names["cached"].cache_clear()
    assert not torch.equal(case.model(case.x), before), "the plain model computes the same"
    case.refuse(message)


@pytest.mark.parametrize("name", ALWAYS)
def test_a_class_or_what_calls_it_that_changed_is_refused_by_name(case, name, monkeypatch):
    target, make, message = ALWAYS[name]
    case.put(monkeypatch, target, make(case))
    case.refuse(message)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_function_reads_may_change(case, name, monkeypatch):
    case.names["cached"].cache_clear()
    case.put(monkeypatch, name, HARMLESS[name])
    case.check()


def check_loss(loss, change, message):
    x, target = torch.randn(4, 3), torch.randn(4, 3)
    step = ucudnn.memory.fit(nn.Linear(3, 3), (x, target), loss=loss, policy="stock")
    step(x, target).backward()
    change()
    with pytest.raises(InvalidValueError, match=message):
        step(x, target)


def test_what_a_loss_reads_is_followed_in_a_plain_object_and_in_a_closure():
    owner, beta = Case([], "stock").names["Owner"](), 1.0

    def change():
        nonlocal beta
        owner.part = beta = 2.5

    check_loss(owner, change, r"^Owner\.part is 2\.5 now, and was 1\.5 when")
    beta = 1.0
    check_loss(lambda y, target: (y * target).sum() * beta, change, r"^beta, which .* reads, is 2\.5 now, and was 1\.0")


def test_a_variable_of_a_function_that_is_deleted_is_named():
    def deleted():
        nonlocal beta
        del beta

    beta = 1.0
    check_loss(
        lambda y, target: (y * target).sum() * beta, deleted, "^beta, which .* reads, is not set now, and was 1.0"
    )


def test_what_forward_itself_only_writes_may_change():
    shape = None

    class Noting(nn.Linear):
        last = None

        def forward(self, x):
            nonlocal shape
            shape = type(self).last = x.shape
            return super().forward(x)

    model, x = Noting(3, 3), torch.randn(4, 3)
    step = ucudnn.memory.fit(model, x, policy="stock")
    for _ in range(2):
        model(x[:2])
        assert torch.equal(step(x), model(x))
    assert shape == Noting.last == (4, 3)


@examples(1 / 4)
@given(data=strategies.data())
def test_a_changed_program_computes_what_the_plain_model_does_or_is_refused(data):
    """Of random lines of forward one reads what changes, or none does."""
    used = data.draw(strategies.lists(strategies.sampled_from([*CHANGES]), max_size=5, unique=True))
    case = Case([CHANGES[name][0] for name in used], data.draw(strategies.sampled_from(POLICIES)))
    case.check()
    with pytest.MonkeyPatch.context() as patch:
        case.put(patch, *data.draw(strategies.sampled_from([*HARMLESS.items()])))
        case.check()
        changes = [CHANGES[name][1:] for name in used]
        changes += [(target, make(case), message) for target, make, message in ALWAYS.values()]
        *change, message = changes[data.draw(strategies.integers(0, len(changes) - 1))]
        case.put(patch, *change)
        case.refuse(message)
