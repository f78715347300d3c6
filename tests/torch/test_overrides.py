"""What is registered with PyTorch's operators, while something is turned on and afterwards."""

import torch

import ucudnn.torch
from tests.support.faulty_backend import FaultyBackend
from tests.support.operands import QUICK
from tests.support.torch_cases import enable_on_cpu
from ucudnn.handle import Handle
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides


def convolve(dtype=torch.float32):
    torch.nn.functional.conv2d(torch.ones(2, 3, 5, 5, dtype=dtype), torch.ones(2, 3, 3, 3, dtype=dtype))


def test_contexts_may_be_nested_and_disable_ends_all():
    with enable_on_cpu() as outer:
        convolve()
        with enable_on_cpu() as inner:
            convolve()
            convolve()
            convolve(torch.bfloat16)  # which goes to PyTorch, and not to the outer one
        convolve()
        assert (outer.report().calls, inner.report().calls) == (2, 2)
        assert [sum(each.report().left.values()) for each in (outer, inner)] == [0, 1]
        assert ucudnn.torch.report().calls == 2
        ucudnn.torch.disable()
        convolve()
        assert outer.report().calls == 2
    assert ucudnn.torch.report().calls == 0


def test_pytorchs_kernels_are_registered_again_at_the_end():
    def replaced():
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "CPU")

    assert not replaced()
    with enable_on_cpu():
        assert replaced()
        ucudnn.torch.convert(torch.nn.Conv2d(1, 1, 1), backend="cpu")
    assert replaced()
    process_overrides.clear()
    assert not replaced()


def test_an_interceptor_is_kept_if_a_captured_graph_uses_its_memory():
    backend = FaultyBackend()
    for captures in (False, True):
        aten = process_overrides.aten_kernels("cpu")
        made = Interceptor(lambda _: Handle(backend=backend, effort=QUICK), "cpu", aten)
        process_overrides.use(made)
        convolve()
        backend.captures = captures
        convolve()
        backend.captures = False
        ucudnn.torch.disable()
        assert (made in process_overrides._kept) is captures
    process_overrides._kept.clear()
