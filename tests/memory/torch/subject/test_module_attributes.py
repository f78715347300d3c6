"""Attributes of modules are values in a plan's code: a step is refused when one that forward read has changed."""

import copy
import enum
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import ucudnn.memory
from tests.support.plain_training import Pair
from ucudnn.errors import InvalidValueError

POLICY = "vdnn-ext-all-p"


class Mode(enum.Enum):
    """How a block adds its input."""

    PLAIN = 1
    DOUBLED = 2


@dataclass
class Settings:
    """What a block is made with."""

    slope: float = 0.1
    sizes: list = field(default_factory=lambda: [1.0, 2.0])


class Schedule:
    """A plain object that is no dataclass."""

    def __init__(self):
        self.factor, self.inner = 1.0, SimpleNamespace(offset=0.0)


class Block(nn.Module):
    """A module of a user's own, which reads attributes of every kind."""

    bias_scale = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop_prob, self.scale, self.mode, self.clip = 0.0, 2, "wide", None
        self.residual, self.kind, self.shape = True, Mode.PLAIN, (-1, 6)
        self.weights, self.options, self.allowed = [1.0, [0.5]], {"gain": 1.0, "deep": {"low": -1.0}}, {"wide"}
        self.settings, self.schedule, self.activation = Settings(), Schedule(), functional.relu
        self.mask = torch.ones(6)
        self.last_width = None
        self.unread, self.epoch = 1.0, 0

    @property
    def gain(self):
        """What a property reads counts, too."""
        return self.options["gain"]

    def forward(self, x):
        self.last_width = x.shape[1]
        y = self.activation(self.linear(x)) * self.scale * self.mask
        y = functional.dropout(y, self.drop_prob) * self.weights[0] * self.weights[1][0] * self.gain
        y = y.reshape(self.shape) + self.bias_scale * self.settings.slope * sum(self.settings.sizes)
        y = y * self.schedule.factor + self.schedule.inner.offset
        if self.mode in self.allowed and not getattr(self, "closed", False):
            y = y + 1
        if self.clip is not None:
            y = y.clamp(self.options["deep"]["low"], self.clip)
        return x * self.kind.value + y if self.residual else y * self.last_width


class Network(nn.Module):
    """Blocks within blocks."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fitted_network(loss=functional.cross_entropy, **options):
    """Return a network, and a fitted copy of it."""
    torch.manual_seed(0)
    return Pair((Network(), (torch.randn(4, 6), torch.randint(5, (4,))), loss), **options)


def put(name, value):
    return lambda block: setattr(block, name, value)


CHANGES = {
    "float": (put("drop_prob", 0.5), "drop_prob is 0.5 now, and was 0.0"),
    "int": (put("scale", 3), "scale is 3 now, and was 2"),
    "type": (put("scale", 2.0), "scale is 2.0 now, and was 2"),
    "sign": (put("drop_prob", -0.0), "drop_prob is -0.0 now, and was 0.0"),
    "str": (put("mode", "narrow"), "mode is 'narrow' now, and was 'wide'"),
    "bool": (put("residual", False), "residual is False now, and was True"),
    "none": (put("clip", 0.1), "clip is 0.1 now, and was None"),
    "enum": (put("kind", Mode.DOUBLED), "kind is <Mode.DOUBLED: 2> now, and was <Mode.PLAIN: 1>"),
    "tuple": (put("shape", (4, 6)), r"shape\[0\] is 4 now, and was -1"),
    "function": (put("activation", torch.tanh), "activation is <built-in method tanh .*> now, and was <function relu "),
    "tensor": (put("mask", torch.zeros(6)), "mask is another tensor than .*: make it a buffer, or "),
    "list": (lambda block: block.weights.__setitem__(0, 3.0), r"weights\[0\] is 3.0 now, and was 1.0"),
    "inner list": (lambda block: block.weights[1].__setitem__(0, 3.0), r"weights\[1\]\[0\] is 3.0 now, and was 0.5"),
    "longer list": (lambda block: block.weights.append(3.0), r"weights\[2\] is 3.0 now, and was not set"),
    "shorter list": (lambda block: block.settings.sizes.pop(), r"settings.sizes\[1\] is not set now, and was 2.0"),
    "dict": (lambda block: block.options.update(gain=3.0), r"options\['gain'\] is 3.0 now, and was 1.0"),
    "inner dict": (lambda block: block.options["deep"].clear(), r"options\['deep'\]\['low'\] is not set now, and was"),
    "set": (lambda block: block.allowed.add("x"), r"allowed is \{.*'x'.*\} now, and was \{'wide'\}"),
    "dataclass": (lambda block: setattr(block.settings, "slope", 0.5), "settings.slope is 0.5 now, and was 0.1"),
    "object": (lambda block: setattr(block.schedule, "factor", 0.5), "schedule.factor is 0.5 now, and was 1.0"),
    "namespace": (lambda block: setattr(block.schedule.inner, "offset", 1.0), "schedule.inner.offset is 1.0 now, and"),
    "default": (put("closed", True), "closed is True now, and was not set"),
    "deleted": (lambda block: delattr(block, "clip"), "clip is not set now, and was None"),
    "own value": (put("bias_scale", 2.0), "bias_scale is 2.0 now, and was not set"),
    "forward": (put("forward", lambda x: x), "forward is <function .*> now, and was not set"),
}


@pytest.fixture(scope="module")
def shared():
    """Fit a step once for many tests, each of which puts back what it changes."""
    return fitted_network()


@pytest.fixture
def fitted(shared):
    """Give the shared step, and put the attributes of its second block back."""
    attributes = vars(shared.model.blocks[1])
    tensors, values = {}, {}
    for name, value in attributes.items():
        if not name.startswith("_"):
            (tensors if torch.is_tensor(value) else values)[name] = value
    values = copy.deepcopy(values)
    yield shared
    for name in [name for name in attributes if not name.startswith("_")]:
        del attributes[name]
    attributes.update(values | tensors)


@pytest.mark.parametrize("kind", CHANGES)
def test_an_attribute_that_forward_read_and_that_changed_is_refused_by_name(fitted, kind):
    change, message = CHANGES[kind]
    fitted.step(*fitted.data)
    change(fitted.model.blocks[1])
    with pytest.raises(InvalidValueError, match=rf"^blocks\.1\.{message}.*fit it again") as caught:
        fitted.step(*fitted.data)
    assert "\n" not in str(caught.value)


def test_what_was_changed_trains_to_the_same_bits_after_another_fit():
    fitted = fitted_network()
    fitted.check()
    for model in (fitted.model, fitted.plain):
        for kind in CHANGES.keys() - {"tuple", "deleted", "forward", "inner dict", "shorter list"}:
            CHANGES[kind][0](model.blocks[1])
    fitted.fit()
    fitted.check()


def test_an_attribute_of_the_loss_that_changed_is_refused():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    fitted = fitted_network(loss)
    fitted.check()
    loss.label_smoothing = 0.2
    with pytest.raises(InvalidValueError, match=r"^loss\.label_smoothing is 0.2 now, and was 0.1 when .*"):
        fitted.step(*fitted.data)


def test_a_parameter_in_the_place_of_none_is_refused():
    model = nn.Sequential(nn.Linear(6, 5, bias=False))
    step = ucudnn.memory.fit(model, torch.randn(4, 6), policy=POLICY)
    model[0].bias = nn.Parameter(torch.ones(5))
    with pytest.raises(InvalidValueError, match=r"^0\.bias is a tensor now, and was None when .*: fit it again$"):
        step(torch.randn(4, 6))


def test_what_forward_writes_or_never_reads_may_change():
    fitted = fitted_network()
    for model in (fitted.model, fitted.plain):
        block = model.blocks[0]
        block.unread, block.epoch, block.last_width = 5.0, 1, None
        model.notes = {"epoch": 3}
    fitted.check()
    assert fitted.model.blocks[0].last_width is None, "forward itself ran in a step"
    fitted.model.eval()
    with torch.no_grad():
        fitted.model(fitted.data[0][:2])
    fitted.model.train()
    fitted.step(*fitted.data)


def test_equal_values_that_are_set_anew_are_the_same_values():
    fitted = fitted_network()
    for number in range(3):
        block = fitted.model.blocks[0]
        block.drop_prob, block.mode = float(f"{number}") * 0, "".join(["wi", "de"])
        block.weights, block.options = copy.deepcopy(block.weights), copy.deepcopy(block.options)
        block.settings, block.schedule, block.allowed = Settings(), Schedule(), {"wide"}
        block.shape = tuple([-1, 6])
        fitted.check()
    fitted.model.blocks[0].weights[1][0] = 7.0  # of the list that was set last
    with pytest.raises(InvalidValueError, match=r"weights\[1\]\[0\] is 7.0 now, and was 0.5"):
        fitted.step(*fitted.data)


def test_a_value_that_is_no_number_has_not_changed():
    fitted = fitted_network()
    for model in (fitted.model, fitted.plain):
        model.blocks[0].schedule.factor = float("nan")
    fitted.fit()
    fitted.model.blocks[0].schedule.factor = float("nan")
    assert fitted.step(*fitted.data).isnan()


def test_an_attribute_that_was_changed_back_is_right_again_and_smaller_arguments_have_those_of_their_own_plan():
    fitted = fitted_network()
    fitted.model.blocks[0].scale = 3
    for _ in range(2):
        with pytest.raises(InvalidValueError, match=r"^blocks\.0\.scale is 3 now"):
            fitted.step(*fitted.data)
    x, y = fitted.data
    fitted.step(x[:2], y[:2]).backward()
    fitted.model.zero_grad()
    fitted.model.blocks[0].scale = 2
    with pytest.raises(InvalidValueError, match=r"^blocks\.0\.scale is 2 now, and was 3"):
        fitted.step(x[:2], y[:2])
    fitted.check()


class Sized(tuple):
    """A tuple that shows neither its length nor its entries, as e3nn's of representations shows others."""

    def __len__(self):
        raise NotImplementedError

    __iter__ = __len__


def test_a_container_is_compared_by_what_its_built_in_type_holds():
    model = nn.Linear(2, 2)
    model.kinds, model.forward = Sized([1, 2]), lambda x: x * tuple.__getitem__(model.kinds, 1) @ model.weight
    step = ucudnn.memory.fit(model, torch.ones(1, 2))
    assert step(torch.ones(1, 2)).sum() == 2 * model.weight.sum()
    model.kinds = Sized([1, 3])
    with pytest.raises(InvalidValueError, match=r"kinds\[1\] is 3 now, and was 2"):
        step(torch.ones(1, 2))


def test_a_long_list_is_compared_by_its_length_and_an_object_that_holds_itself_ends():
    fitted = fitted_network()
    block = fitted.model.blocks[0]
    block.weights = [1.0, [0.5], *range(100_000)]
    block.schedule.inner.outer, block.options["self"] = block.schedule, block.options
    fitted.fit()
    fitted.step(*fitted.data)
    block.weights.append(1)
    message = r"^blocks\.0\.weights is a list of 100003 entries now, and was a list of "
    with pytest.raises(InvalidValueError, match=message):
        fitted.step(*fitted.data)


def test_modules_are_as_before_after_a_fit():
    found = nn.Module.__setattr__, "__getattribute__" in vars(nn.Module)
    fitted_network()
    model = nn.Sequential(nn.Linear(6, 5), nn.Flatten(7))
    with pytest.raises(Exception, match="Dimension"):
        ucudnn.memory.fit(model, torch.randn(4, 6))
    assert (nn.Module.__setattr__, "__getattribute__" in vars(nn.Module)) == found == (found[0], False)


def test_steps_that_are_fitted_at_once_know_their_own_attributes():
    """Each thread fits a model of its own; what one of them ends takes nothing from the others."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    found, faults = {}, []

    def work(number):
        try:
            found[number] = fitted_network(policy="stock")
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not faults
    assert "__getattribute__" not in vars(nn.Module)
    for fitted in found.values():
        fitted.step(*fitted.data)
        fitted.model.blocks[0].scale = 5
        with pytest.raises(InvalidValueError, match=r"^blocks\.0\.scale is 5 now, and was 2"):
            fitted.step(*fitted.data)
