"""What a fit may touch is put back, whatever a function does to it and however it ends."""

import gc
import logging
import random
import warnings
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.interruption import Points, state
from ucudnn.memory.torch.subject.left_as_found import Snapshot, left_as_found


class Other(nn.Linear):
    """Another class of the same layers."""


class Notes:
    """An object of numbers, texts and tensors."""

    compared = True

    def __init__(self):
        self.text, self.tensors = "", [torch.zeros(1)]


def make_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[2].weight.grad = torch.ones(1, 3)
    model.notes, model.names, model.generator = Notes(), {"b": [1], "a": {2}}, torch.Generator()
    return model


def _enter(context):
    context.__enter__()


CHANGES = {
    "a parameter": lambda m: m[0].register_parameter("weight", nn.Parameter(torch.zeros(3, 2))),
    "the order of parameters": lambda m: m[0]._parameters.__setitem__("weight", m[0]._parameters.pop("weight")),
    "memory": lambda m: setattr(m[0].weight, "data", torch.zeros(5)),
    "memory in place": lambda m: torch.no_grad()(m[0].weight.set_)(torch.zeros(5)),
    "a buffer": lambda m: setattr(m[1], "running_mean", None),
    "a gradient": lambda m: m.zero_grad(),
    "a new gradient": lambda m: setattr(m[0].weight, "grad", torch.ones(3, 2)),
    "a needed gradient": lambda m: m.requires_grad_(False),
    "a mode": lambda m: m.eval(),
    "a class": lambda m: setattr(m[0], "__class__", Other),
    "a module": lambda m: m.append(nn.ReLU()),
    "a hook": lambda m: m[0].register_forward_hook(print),
    "a hook of a tensor": lambda m: m[0].weight.register_hook(print),
    "a hook behind a tensor": lambda m: m[0].weight.register_post_accumulate_grad_hook(print),
    "an attribute": lambda m: setattr(m[0], "count", 1),
    "an attribute of a tensor": lambda m: setattr(m[0].weight, "count", 1),
    "a container": lambda m: (m.names["b"].append(2), m.names["a"].clear(), m.names.update(c=0)),
    "an object": lambda m: (setattr(m.notes, "text", "read"), m.notes.tensors.append(0)),
    "the model's generator": lambda m: torch.rand(1, generator=m.generator),
    "generators": lambda m: (torch.rand(1), random.random(), np.random.rand()),
    "a seed": lambda m: torch.manual_seed(1234),
    "gradient mode": lambda m: torch.set_grad_enabled(False),
    "anomalies": lambda m: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda m: _enter(torch.autocast("cpu", torch.bfloat16)),
    "fake tensors": lambda m: _enter(FakeTensorMode()),
    "a device": lambda m: torch.set_default_device("meta"),
    "a device's context": lambda m: _enter(torch.device("meta")),
    "a type": lambda m: torch.set_default_dtype(torch.float64),
    "saved tensors": lambda m: _enter(torch.autograd.graph.saved_tensors_hooks(print, print)),
    "determinism": lambda m: torch.use_deterministic_algorithms(True),
    "cuDNN": lambda m: setattr(torch.backends.cudnn, "benchmark", True),
    "warnings": lambda m: (warnings.simplefilter("error"), setattr(warnings, "showwarning", print)),
    "a logger": lambda m: logging.getLogger("torch._subclasses.fake_tensor").addFilter(print),
    "the collector": lambda m: (gc.disable(), gc.set_threshold(5)),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_put_back_by_the_work_or_by_an_error(change, fails):
    model = make_model()
    before = state(model)

    def work(snapshot):
        CHANGES[change](model)
        if fails:
            raise KeyboardInterrupt
        assert change == "fake tensors" or state(model) != before  # no state can be read under these
        snapshot.restore()

    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        left_as_found(work, model)
    assert state(model) == before


def test_an_optimizer_is_put_back():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    before = state(model, optimizer)

    def work(snapshot):
        optimizer.param_groups[0]["lr"] = 5
        optimizer.state[model[0].weight]["step"] = torch.ones(())
        optimizer.register_step_pre_hook(print)
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        left_as_found(work, [optimizer])
    assert state(model, optimizer) == before


def test_ctrl_c_while_things_are_put_back_comes_after_it():
    folders = ("/subject/left_as_found.py",)

    def work(model, changes, snapshot):
        for change in changes:
            CHANGES[change](model)
        snapshot.restore()

    changes = ["a parameter", "a container", "fake tensors", "generators"]
    with Points(folders) as points:
        left_as_found(partial(work, make_model(), changes))
    all_of_them = [(*place, number + 1) for place, count in points.counts.items() for number in range(count)]
    for point in random.Random(1).sample(all_of_them, 25):
        model = make_model()
        before = state(model)
        with pytest.raises(KeyboardInterrupt), Points(folders, point, KeyboardInterrupt()):
            left_as_found(partial(work, model, changes), model)
        assert state(model) == before, point


def test_what_nobody_changed_is_not_written():
    class Table(dict):
        def clear(self):
            raise AssertionError("written")

    model = make_model()
    model.table = Table(a=1)
    Snapshot(model).restore()
