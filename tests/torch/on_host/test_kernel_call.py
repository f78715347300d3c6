"""Kernels that are called again on the same addresses: bound, without a workspace of their own."""

import gc

import pytest
import torch

from tests.support.host_gpu import assert_near, convolve_and_differentiate, enable_on_host, image_and_filters
from tests.support.tuned_program import product
from ucudnn.execution.launcher import BoundKernel
from ucudnn.torch.calls.problem import OutputForm


@pytest.fixture
def recurring(monkeypatch):
    """Let each kernel call write the same tensor each time; return what bound kernels returned."""
    kept, answers = {}, []
    new, bound = OutputForm.new, BoundKernel.__call__
    monkeypatch.setattr(
        OutputForm, "new", lambda self: kept.get(self) if self in kept else kept.setdefault(self, new(self))
    )
    monkeypatch.setattr(BoundKernel, "__call__", lambda self: answers.append(bound(self)) or answers[-1])
    return answers


def forward(x, w):
    return torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def reference(x, w):
    """Return the output in float64, by no convolution."""
    return product(x.double(), w.double()).float()


def check(x, w, out):
    """Compute into the tensor that recurs, and check what it has then."""
    out.fill_(float("nan"))
    assert forward(x, w) is out
    assert_near([out], [reference(x, w)])


@pytest.mark.parametrize("limit", [0, 3000])
def test_a_kernel_on_recurring_addresses_is_bound_and_keeps_no_workspace(host, recurring, limit):
    x, w = image_and_filters()
    with enable_on_host(host, workspace_limit=limit) as on:
        out = forward(x, w)  # planned
        forward(x, w)  # bound, because the addresses recur
        host.forget()
        before = host.live_bytes
        for turn in range(1, 4):
            x.normal_()
            w.normal_()
            check(x, w, out)
            assert recurring == [True] * turn
            assert host.live_bytes == before, "no workspace is kept"
        assert on.report().calls == 5
        assert len(host.allocated) == (3 if limit else 0), (
            "a workspace for each call, unless the output's tail is enough"
        )
    assert on.report().left == {}


def test_a_filter_gradient_that_uses_the_memory_of_the_input_gradient_is_bound(host, recurring):
    x, w = image_and_filters()
    out, *expected = convolve_and_differentiate(x, w)
    grad, rest = out.cos(), (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    with enable_on_host(host, workspace_limit=600) as on:
        for turn in range(4):
            host.forget()
            assert_near(torch.ops.aten.convolution_backward.default(grad, x, w, *rest)[:2], expected)
            assert recurring == [True, True] * max(0, turn - 1)
            assert 600 < host.allocated[0] <= 600 + x.nbytes, "of the filter gradient, which comes first"
        assert on.report().calls == 8
    assert on.report().left == {}


def test_a_bound_kernel_refuses_another_stream_and_a_capture(host, calls, recurring):
    x, w = image_and_filters()
    with enable_on_host(host, workspace_limit=3000) as on:
        out = forward(x, w)
        forward(x, w)
        for stream, captures, answer in (
            (0, False, True),
            (0x40, False, False),
            (0x40, False, True),
            (0x40, True, False),
            (0x40, False, True),
            (0, False, False),
        ):
            host.stream, host.captures = stream, captures
            calls()
            check(x, w, out)
            assert recurring[-1] == answer
            assert {each.stream or 0 for each in calls()} == {stream}
        assert on.report().calls == 8
    assert on.report().left == {}


def test_a_bound_kernel_gives_way_to_another_plan(host, recurring):
    x, w = image_and_filters()
    with enable_on_host(host, workspace_limit=3000) as on:
        out = forward(x, w)
        forward(x, w)
        forward(x, w)
        assert recurring == [True]
        for bound in [each for each in gc.get_objects() if type(each) is BoundKernel]:
            bound._entry.drop_plan()  # as after a division that is new, or an algorithm that failed elsewhere
        for answers in ([True, False], [True, False, True]):
            check(x, w, out)
            assert recurring == answers
    assert on.report().left == {}


def test_a_bound_kernel_gives_way_if_memory_runs_short(host, recurring, caplog):
    x, w = image_and_filters()
    with enable_on_host(host, workspace_limit="1MiB") as on:
        out = forward(x, w)
        forward(x, w)
        host.most_bytes = 3000
        for answer in (False, True):
            check(x, w, out)
            assert recurring[-1] == answer
        assert 0 < on.report().workspace_bytes < 3000
    assert caplog.text.count("no room for a workspace") == 1
    assert on.report().left == {}


def test_a_bound_kernel_that_fails_is_computed_in_another_way(host, recurring, caplog):
    x, w = image_and_filters()
    with enable_on_host(host, workspace_limit=3000) as on:
        out = forward(x, w)
        forward(x, w)
        (before,) = on.report().layers
        assert "eng1" in before.configuration
        with host.failing():  # after the first micro-batch
            check(x, w, out)
        for _ in range(2):  # the first plans what is left
            check(x, w, out)
        assert recurring == [False, True]
        (after,) = on.report().layers
        assert "eng1" not in after.configuration
    assert caplog.text.count("eng1 failed") == 1
    assert on.report().left == {}


def test_each_of_many_layers_with_one_shape_is_bound_and_the_report_counts_the_kinds(host, monkeypatch):
    x, w = image_and_filters()
    layers = [(torch.randn_like(x), torch.full((8, 6, 7, 6), float("nan"))) for _ in range(100)]
    with enable_on_host(host, workspace_limit=3000) as on:
        for turn in range(3):
            for image, out in layers:
                monkeypatch.setattr(OutputForm, "new", lambda self, out=out: out.fill_(float("nan")))
                assert forward(image, w) is out
                assert_near([out], [reference(image, w)])
            bound = max(0, turn - 1) * 100
            expected = {"bound": bound, "looked up": (turn + 1) * 100 - bound, "divided": (turn + 1) * 100, "passed": 0}
            assert on.report().kinds() == expected, "two micro-batches fit the limit, and recurring addresses are bound"
        forward(x[:0], w)  # empty: left to PyTorch
        assert "calls: 100 bound, 200 looked up, 300 divided, 1 passed" in str(on.report())
