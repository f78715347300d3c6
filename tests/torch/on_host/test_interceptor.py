"""Convolutions of CUDA tensors, computed on the host: numbers, workspace, memory that is short, and slabs."""

from dataclasses import replace

import pytest
import torch

from tests.support.host_gpu import assert_near, convolve_and_differentiate, enable_on_host, image_and_filters
from tests.support.torch_cases import CASES, assert_close, modules, outcome
from ucudnn.configuration import Configuration, MicroConfiguration


@pytest.mark.parametrize("index", CASES)
def test_outputs_and_gradients_equal_pytorchs(host, index):
    module, shape = modules()[index]
    module, x = module.double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = outcome(module, x)
    for options in ({"workspace_limit": "1KiB", "policy": "all"}, {"total_workspace": "64KiB"}):
        with enable_on_host(host, **options) as on:
            for _ in range(2):
                assert_close(outcome(module, x), expected)
        assert on.report().left == {}
        assert on.report().calls == 6


def test_tensors_may_be_on_a_gpu_that_is_not_the_current_one(host, monkeypatch):
    host.current = 1
    here = host.empty_here
    monkeypatch.setattr(
        host, "empty_here", lambda *form: pytest.fail("on the other GPU") if host.current else here(*form)
    )
    module, x = torch.nn.Conv2d(3, 4, 3).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    expected = outcome(module, x)
    with enable_on_host(host) as on:
        for _ in range(3):
            assert_close(outcome(module, x), expected)
    assert (on.report().left, on.report().calls) == ({}, 9)


def test_kernels_are_divided_to_fit_the_limit(host, calls):
    x, w = image_and_filters()
    expected = convolve_and_differentiate(x, w)
    with enable_on_host(host, workspace_limit=3000) as on:
        convolve_and_differentiate(x, w)
        calls()
        found, held = host.held_by(lambda: convolve_and_differentiate(x, w))
        assert_near(found, expected)
    taken = calls()
    assert [(each.operation, each.batch) for each in taken] == [(0, 4)] * 2 + [(2, 8)] + [(1, 4)] * 2
    assert all(each.workspace for each in taken)
    assert len(host.allocated) == 3, "a workspace for each call, and nothing else"
    assert host.allocated[1] <= 3000 + x.nbytes, "of the filter gradient, before there is the other one"
    assert max(host.allocated[0], host.allocated[2], held) <= 3000
    assert on.report().left == {}


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_a_filter_gradients_workspace_may_use_the_memory_of_the_input_gradient(host, last):
    x, w = image_and_filters()
    if last:
        x, w = (each.contiguous(memory_format=torch.channels_last) for each in (x, w))
    expected = convolve_and_differentiate(x, w)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    with enable_on_host(host, workspace_limit=600) as on:
        convolve_and_differentiate(x, w)
        for _ in range(2):
            found, held = host.held_by(lambda: convolve_and_differentiate(x, w))
            assert_near(found, expected)
            assert held <= 600
        taken = host.allocated[1]
        assert 600 < taken <= 600 + x.nbytes
        (layer,) = [each for each in on.report().layers if each.operation == "BackwardFilter"]
        assert layer.workspace_bytes == 0
        assert layer.spare_bytes == taken
        assert "spare" in str(on.report())
        # If the input's gradient is not wanted, there is no such memory, and the limit holds.
        for _ in range(2):
            host.forget()
            alone = torch.ops.aten.convolution_backward.default(found[0].cos(), x, w, None, *rest, [False, True, False])
            torch.testing.assert_close(alone[1], expected[2], rtol=1e-4, atol=1e-5)
        assert host.allocated
        assert max(host.allocated) <= 600
    assert on.report().left == {}


def test_the_memory_of_the_input_gradient_is_that_of_each_call(host):
    torch.manual_seed(0)
    wide, narrow, w = torch.randn(8, 16, 14, 14), torch.randn(8, 2, 14, 14), torch.randn(2, 16, 3, 3)
    rest = (None, [1, 1], [1, 1], [1, 1])
    mask = [True, True, False]

    def plain():
        return torch.ops.aten.convolution_backward.default(narrow, wide, w, *rest, False, [0, 0], 1, mask)[:2]

    def transposed():
        return torch.ops.aten.convolution_backward.default(wide, narrow, w, *rest, True, [0, 0], 1, mask)[:2]

    with enable_on_host(host, workspace_limit=2000):
        for each in (plain, transposed):  # the same filter gradient, before gradients of different inputs
            each()
            _, held = host.held_by(each)
            assert held <= 2000


def test_a_filter_gradient_takes_less_if_that_memory_is_not_free(host):
    x, w = image_and_filters()
    expected = convolve_and_differentiate(x, w)
    with enable_on_host(host, workspace_limit=600) as on:
        convolve_and_differentiate(x, w)
        host.forget()
        convolve_and_differentiate(x, w)
        refused, usual = host.allocated[1], host.most_bytes
        assert refused > 1200
        host.most_bytes = refused - 1  # whether a bound call asks first or not, which depends on the outputs' addresses
        assert_near(convolve_and_differentiate(x, w), expected)
        assert refused in host.refused
        host.most_bytes = usual
        for _ in range(2):
            host.forget()
            assert_near(convolve_and_differentiate(x, w), expected)
            assert max(host.allocated) <= refused // 2, "a size that was not free once is not tried again"
    assert on.report().left == {}


def test_the_tail_of_an_output_is_workspace(host, calls):
    x, w = image_and_filters()
    expected = convolve_and_differentiate(x, w)
    with enable_on_host(host, workspace_limit=3000) as on:
        convolve_and_differentiate(x, w)
        (handle,) = on._interceptor.handles().values()
        entries = [entry for entry in handle._entries.values() if entry.kernel.fresh]
        for entry in entries:
            (name,) = {part.algorithm for part in entry.decision.configuration.parts}
            problem, sizes = entry.kernel.problem, (2, 2, 1, 1, 1, 1)
            needs = [handle.backend.algorithm(problem.part(size), name).workspace_bytes for size in sizes]
            parts = [
                MicroConfiguration(size=size, algorithm=name, time_ms=1.0, workspace_bytes=need)
                for size, need in zip(sizes, needs, strict=True)
            ]
            entry.decide(replace(entry.decision, configuration=Configuration(parts=tuple(parts))))
        for _ in range(2):
            host.forget()
            calls()
            found = convolve_and_differentiate(x, w)
            assert_near(found, expected)
            taken = calls()
            for operation, out in ((0, found[0]), (1, found[1])):
                first, *_, last = [each for each in taken if each.operation == operation]
                behind = out[2:]
                assert first.batch == 2
                assert behind.data_ptr() <= first.workspace < behind.data_ptr() + behind.nbytes
                assert not out.data_ptr() <= last.workspace < out.data_ptr() + out.nbytes
            assert max(host.allocated[0], host.allocated[-1]) < max(needs)
    assert len(entries) == 2
    forward, data = (each for each in on.report().layers if each.operation != "BackwardFilter")
    assert forward.spare_bytes > forward.workspace_bytes > 0
    assert data.spare_bytes > data.workspace_bytes > 0
    assert ", spare" in str(on.report())


@pytest.mark.parametrize("refuses", [0, 1], ids=["takes gaps", "refuses gaps"])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_a_batch_of_one_is_computed_in_slabs(host, stub, refuses, last):
    torch.manual_seed(1)
    module = torch.nn.Conv3d(3, 4, 3, padding=1).double()
    x = torch.randn(1, 3, 16, 6, 5, dtype=torch.float64)
    if last:
        module, x = module.to(memory_format=torch.channels_last_3d), x.to(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    expected = outcome(module, x)
    stub.stub_rows(16)
    stub.stub_refuse_gaps(refuses)
    sample = x.numel() * x.element_size()
    limit = sample * 3 // 4 if refuses else sample // 3  # copies need memory beside the workspace
    with enable_on_host(host, workspace_limit=limit, policy="all") as on:
        for _ in range(2):
            host.forget()
            assert_close(outcome(module, x), expected)
        assert max(host.allocated[0], host.allocated[2]) <= limit
        assert host.allocated[1] <= limit + sample
    configurations = [kernel.configuration for kernel in on.report().layers]
    assert on.report().left == {}
    assert any("rows eng1" in each for each in configurations)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_may_be_less_aligned(host, offset):
    x, w = image_and_filters()
    x = torch.cat([torch.zeros(offset), x.flatten()])[offset:].view_as(x)
    expected = convolve_and_differentiate(x, w)
    with enable_on_host(host) as on:
        assert_near(convolve_and_differentiate(x, w), expected)
    assert on.report().left == {}


def test_pytorch_computes_if_there_is_no_memory_to_plan(host):
    x, w = image_and_filters()
    expected = convolve_and_differentiate(x, w)
    host.most_bytes = 100
    with enable_on_host(host) as on:
        assert_close(convolve_and_differentiate(x, w), expected)
        assert on.report().calls == 0
        host.most_bytes = 1 << 40
        for _ in range(2):
            convolve_and_differentiate(x, w)
    assert on.report().calls == 3


def test_pytorch_computes_after_an_error_of_its_own_while_planning(host, monkeypatch, caplog):
    def fails(*arguments, **options):
        raise RuntimeError("CUDA error: unknown\nof many lines")

    x, w = image_and_filters()
    expected = convolve_and_differentiate(x, w)
    monkeypatch.setattr(host, "as_tensor", fails)
    with enable_on_host(host) as on:
        assert_close(convolve_and_differentiate(x, w), expected)
    assert on.report().left == {"RuntimeError: CUDA error: unknown": 2}
    assert "CUDA error: unknown" in caplog.text
