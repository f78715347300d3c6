"""Modes of PyTorch's around fit, a step and its backward: followed to the bit, or refused by name."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ucudnn.memory
from ucudnn.errors import InvalidValueError

DATA = torch.randn(4, 8), torch.randn(4, 8)


class Island(nn.Module):
    """A layer that is kept in float32, behind one that autocast casts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        """Return the output in float32."""
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float())


def network():
    torch.manual_seed(0)
    return Island()


def fitted(model=None):
    return ucudnn.memory.fit(model or network(), DATA, loss=functional.mse_loss, policy="checkpoint")


def gradients(model):
    return [each.grad.clone() for each in model.parameters()]


def cast():
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def changed(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


class Doubling(TorchFunctionMode):
    """Doubles what linear layers return."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function."""
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is functional.linear else result


class Rounding(TorchDispatchMode):
    """Rounds what linear layers return."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operator."""
        result = func(*args, **(kwargs or {}))
        return result.bfloat16().float() if func is torch.ops.aten.addmm.default else result


CHANGES = {
    r"is_autocast_enabled\('cpu'\) was False in fit and is True": cast,
    r"get_autocast_dtype\('cpu'\) was torch.bfloat16 in fit and is torch.float16": lambda: changed(
        lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16
    ),
    "is_autocast_cache_enabled": lambda: changed(torch.set_autocast_cache_enabled, False, True),
    "whether there is a region of torch.autocast": lambda: torch.autocast("cpu", enabled=False),
    "are_deterministic_algorithms_enabled": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "get_default_dtype": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "set_default_device": lambda: torch.device("meta"),
    "cudnn.enabled": lambda: torch.backends.cudnn.flags(enabled=False),
    "mkldnn.enabled": lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
    "flash_sdp_enabled": lambda: sdpa_kernel(SDPBackend.MATH),
    "parametrize.cached": nn.utils.parametrize.cached,
}
REFUSED = {
    "TorchFunctionMode Doubling": Doubling,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 0, lambda kept: kept),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_mode_that_differs_between_fit_and_step_is_refused_by_its_name(name):
    step = fitted()
    with pytest.raises(InvalidValueError, match=f"under the same modes.*{name}"), CHANGES[name]():
        step(*DATA)
    step(*DATA).backward()


@pytest.mark.parametrize("name", REFUSED)
def test_a_mode_that_no_plan_can_follow_is_refused_by_fit_and_step(name):
    step = fitted()
    with pytest.raises(InvalidValueError, match=name), REFUSED[name]():
        fitted()
    with pytest.raises(InvalidValueError, match=name), REFUSED[name]():
        step(*DATA)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_are_refused_by_fit_and_step(transform):
    step, model = fitted(), network()
    with pytest.raises(InvalidValueError, match=r"torch\.func cannot transform"):
        transform(lambda x: step(x, DATA[1]))(DATA[0])
    with pytest.raises(InvalidValueError, match=r"torch\.func cannot transform"):
        transform(lambda x: (ucudnn.memory.fit(model, (x, DATA[1]), functional.mse_loss), x.sum())[1])(DATA[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("around", [torch.autograd.detect_anomaly, torch.autograd.graph.save_on_cpu, Rounding])
def test_modes_that_see_operators_or_values_are_followed(around):
    plain, model = network(), network()
    with around():
        expected = functional.mse_loss(plain(DATA[0]), DATA[1])
        expected.backward()
        step = fitted(model)
        loss = step(*DATA)
        loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(*each) for each in zip(gradients(plain), gradients(model), strict=True))


def test_backward_is_traced_outside_of_autocast_and_refused_within_it():
    plain, model = network(), network()
    with cast():
        expected = functional.mse_loss(plain(DATA[0]), DATA[1])
    expected.backward()
    with cast():
        step = fitted(model)
        loss = step(*DATA)
        with pytest.raises(InvalidValueError, match=r"leave autocast before backward"):
            loss.backward()
    loss.backward()
    assert all(torch.equal(*each) for each in zip(gradients(plain), gradients(model), strict=True))


def test_two_calls_within_one_region_share_casts_in_the_plain_loop_and_are_refused():
    with cast():
        step = fitted()
        step(*DATA)
        with pytest.raises(InvalidValueError, match="twice within one region"):
            step(*DATA)
        with pytest.raises(InvalidValueError, match="twice within one region"):
            step(DATA[0][:2], DATA[1][:2])
    for _ in range(2):
        with cast():
            loss = step(*DATA)
        loss.backward()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        step = fitted()
        (step(*DATA) + step(*DATA)).isfinite()


def test_inference_mode_leaves_the_call_to_the_model():
    step = fitted()
    with torch.inference_mode(), torch.enable_grad():
        assert step(*DATA).is_inference()


def test_fit_leaves_autocast_as_it_was():
    def state():
        torch.autocast_increment_nesting()
        depth = torch.autocast_decrement_nesting()
        devices = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
        return depth, devices, torch.is_autocast_cache_enabled(), torch.is_anomaly_enabled()

    with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.autocast("cuda", enabled=False):
        before = state()
        fitted()
        assert state() == before
