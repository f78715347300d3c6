"""The gate in front of PyTorch's operators: what it lets through, and that all else is PyTorch's own."""

import ctypes
import sys
import warnings
from array import array
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import sleep

import pytest
import torch

import ucudnn
from tests.support.gate_call import GateCall
from ucudnn.torch.calls.aten_kernels import AtenKernels
from ucudnn.torch.gate.call_gate import PythonOperators

CASES = {
    "plain": ((4, 3, 9, 8), (6, 3, 3, 3), {"stride": (2, 1), "padding": (1, 2)}),
    "grouped": ((2, 4, 7, 7), (6, 2, 3, 3), {"groups": 2, "dilation": (2, 1)}),
    "transposed": ((2, 4, 5, 6), (4, 3, 3, 2), {"transposed": True, "stride": (2, 2), "output_padding": (1, 0)}),
    "volume": ((2, 3, 5, 4, 6), (4, 3, 3, 1, 2), {"stride": (1, 2, 1), "padding": (1, 0, 0), "dilation": (1, 1, 1)}),
}
SENTINEL = 1234.5


class Call(GateCall):
    """A call of CASES."""

    def __init__(self, name):
        torch.manual_seed(0)
        x_shape, w_shape, options = CASES[name]
        two = len(x_shape) - 2
        transposed, groups = options.get("transposed", False), options.get("groups", 1)
        bias = torch.randn(w_shape[1] * groups if transposed else w_shape[0])
        lists = {"stride": (1,) * two, "padding": (0,) * two, "dilation": (1,) * two, "output_padding": (0,) * two}
        lists |= {key: value for key, value in options.items() if key in lists}
        first = (lists[key] for key in ("stride", "padding", "dilation"))
        geometry = (*first, transposed, lists["output_padding"], groups)
        super().__init__(torch.randn(x_shape), torch.randn(w_shape), bias, geometry)


def ours(like):
    """Return what `writer` makes of an output."""
    return torch.full_like(like, SENTINEL)


def writer(seen, place, size):
    """Return what fills one of x, w and y with a sentinel, and notes the addresses of all three."""

    def compute(*addresses):
        seen.append(addresses)
        (ctypes.c_float * size).from_address(addresses[place])[:] = [SENTINEL] * size
        return True

    return compute


@contextmanager
def registered(**kernels):
    """Let PyTorch have other kernels of some operators."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced, and tests replace some
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
    yield
    library._destroy()


@pytest.fixture
def passed_on():
    """Return a list that gets the mask of each backward call that comes to PyTorch, which computes it."""
    masks, baseline = [], AtenKernels("CPU").backward
    with registered(convolution_backward=lambda *rest: masks.append(tuple(rest[-1])) or baseline(*rest)):
        yield masks


@pytest.fixture
def plain():
    """Return a call, its output, a gradient of that, and the gradients that follow."""
    call = Call("plain")
    expected = call.forward()
    grad = torch.randn_like(expected)
    return call, expected, grad, call.backward(grad)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_call_with_a_rule_is_computed_by_it_and_its_bias_is_added(gate, name, biased):
    call = Call(name)
    expected = call.forward()
    bias = call.bias if biased else None
    transposed, ones = call.geometry[3], (1,) * (call.x.dim() - 2)
    seen = []
    compute = writer(seen, 0 if transposed else 2, expected.numel())
    bias_as = ((len(call.bias), *ones), (1, *ones)) if biased else ((), ())
    gate.use("cpu", [call.forward_rule(compute, bias, bias_as=bias_as)])
    found = call.forward(bias=bias)
    assert found.shape == expected.shape
    assert torch.equal(found, ours(expected) + call.bias.view(-1, *ones) if biased else ours(expected))
    ((x, w, y),) = seen
    assert w == call.weight.data_ptr()
    assert (y if transposed else x) == call.x.data_ptr()
    assert torch.equal(call.forward(tf32=False), expected), "another signature"
    assert len(seen) == 1


def test_a_kernel_that_adds_the_bias_is_given_its_address(gate, plain):
    (call, expected, *_), seen = plain, []
    how = {"bias_as": ((len(call.bias), 1, 1), (1, 1, 1)), "fuses": True}
    gate.use("cpu", [call.forward_rule(writer(seen, 2, expected.numel()), call.bias, **how)])
    assert torch.equal(call.forward(bias=call.bias), ours(expected))
    ((x, w, _, bias),) = seen
    assert (x, w, bias) == tuple(each.data_ptr() for each in (call.x, call.weight, call.bias))
    assert torch.equal(call.forward(), expected), "another signature"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("computed", [(0,), (1,), (0, 1)])
def test_gradients_with_a_rule_are_computed_by_it_and_the_others_by_pytorch(gate, name, computed):
    call = Call(name)
    grad = torch.randn_like(call.forward())
    expected = call.backward(grad)
    transposed, seen = call.geometry[3], {0: [], 1: []}
    places = {0: 2 if transposed else 0, 1: 1}
    computes = {at: writer(seen[at], places[at], expected[at].numel()) for at in computed}
    gate.use("cpu", [], [call.backward_rule(grad, x=computes.get(0), weight=computes.get(1))])
    found = call.backward(grad)
    for at in range(3):
        assert torch.equal(found[at], ours(expected[at]) if at in computed else expected[at])
    for at in computed:
        ((x, w, y),) = seen[at]
        given = {"near": y if transposed else x, "filters": w, "far": x if transposed else y}
        known = {"near": call.x, "filters": call.weight, "far": grad}
        del known[("near", "filters")[at]]
        assert all(given[key] == tensor.data_ptr() for key, tensor in known.items())
    for left, right in zip(call.backward(grad, (False, True, False)), expected, strict=True):
        assert left is None or torch.equal(left, right), "another signature"
    assert sum(map(len, seen.values())) == len(computed)


def test_calls_that_are_set_aside_are_passed_on_whole_until_they_are_not(gate, plain, passed_on):
    (call, expected, grad, gradients), seen = plain, []
    mask, bypass = (True, True, True), array("q", [0])
    forward = call.forward_rule(writer(seen, 2, expected.numel()), bypass=bypass)
    gate.use("cpu", [forward], [call.backward_rule(grad, x=writer(seen, 0, call.x.numel()), bypass=bypass)])
    del forward  # the gate keeps the number
    for is_bypassed in (0, 1, 0, -1):
        bypass[0] = is_bypassed
        assert torch.equal(call.forward(), expected if is_bypassed else ours(expected))
        found = call.backward(grad)
        assert torch.equal(found[0], gradients[0] if is_bypassed else ours(call.x))
        assert all(map(torch.equal, found[1:], gradients[1:]))
    assert passed_on == [(False, True, True), mask, (False, True, True), mask], "one call, not one for each gradient"
    assert len(seen) == 4


def test_calls_that_are_set_aside_or_have_no_rule_go_to_python_over_plans(gate, plain):
    (call, expected, grad, gradients), came = plain, []
    kernels, bypass = AtenKernels("CPU"), array("q", [0])
    operators = PythonOperators(
        "cpu",
        (
            lambda *rest: came.append("forward") or kernels.forward(*rest),
            lambda *rest: came.append("backward") or kernels.backward(*rest),
        ),
    )
    gate.use("cpu", [call.forward_rule(writer([], 2, expected.numel()), bypass=bypass)], python=operators.names)
    for bypass[0] in (0, 1):
        came.clear()
        assert torch.equal(call.forward(), expected if bypass[0] else ours(expected))
        assert all(map(torch.equal, call.backward(grad), gradients))
        assert came == ["forward"] * bypass[0] + ["backward"]
    gate.close()
    operators.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (False, True, False)])
def test_calls_without_a_rule_are_pytorchs_own_whether_its_kernels_or_others_are_registered(gate, name, mask):
    call = Call(name)
    expected, without_bias = call.forward(bias=call.bias), call.forward()
    grad = torch.randn_like(expected)
    gradients = call.backward(grad, mask)
    kernels, came = AtenKernels("CPU"), []
    rules = [call.forward_rule(writer([], 2, expected.numel()))._replace(signature=[0])]

    def check(passes_to_own):
        gate.use("cpu", rules, rules)
        assert gate.passes_to_own() is passes_to_own
        assert torch.equal(call.forward(bias=call.bias), expected)
        assert torch.equal(call.forward(), without_bias)
        for found, wanted in zip(call.backward(grad, mask), gradients, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found, wanted)
        gate.close()
        assert not gate.passes_to_own()

    check(passes_to_own=True)
    with registered(
        _convolution=lambda *rest: came.append(rest) or kernels.forward(*rest),
        convolution_backward=lambda *rest: came.append(rest) or kernels.backward(*rest),
    ):
        check(passes_to_own=False)
    forward, unbiased, backward = came
    assert unbiased[2] is None
    assert forward[3:] == (*map(list, call.geometry[:3]), call.geometry[3], [*call.geometry[4]], call.geometry[5],
                           False, *call.flags, True)  # fmt: skip
    assert backward[3:] == ([*call.bias.shape], *forward[3:9], list(mask))
    assert all(map(torch.equal, forward[:3], (call.x, call.weight, call.bias)))
    assert all(map(torch.equal, backward[:3], (grad, call.x, call.weight)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("computed", "done", "order"),
    [
        ((0,), True, [0, (False, True)]),
        ((1,), True, [(True, False), 1]),
        ((0, 1), True, [0, 1]),
        ((0, 1), False, [0, (True, False), 1, (False, True)]),
        ((1,), False, [(True, False), 1, (False, True)]),
    ],
)
def test_gradients_are_computed_in_the_order_of_pytorch_so_that_memory_is_taken_in_that_order(
    gate, plain, passed_on, computed, done, order, biased
):
    (call, _, grad, _), mask = plain, (True, True, biased)
    expected = call.backward(grad, mask)
    passed_on.clear()

    def computes(at):
        write = writer([], at, expected[at].numel())
        return lambda *addresses: passed_on.append(at) or (done and write(*addresses))

    wanted = {name: computes(at) for at, name in enumerate(("x", "weight")) if at in computed}
    try:
        gate.use("cpu", [], [call.backward_rule(grad, mask=mask, **wanted)])
        found = call.backward(grad, mask)
    finally:
        gate.close()  # before the kernels to which it passes on are gone
    seen = [each if isinstance(each, int) else each[:2] for each in passed_on if each != (False, False, True)]
    assert seen == order
    biases = [each[2] for each in passed_on if isinstance(each, tuple)]
    assert sum(biases) == biased, "computed once, with the first gradients that PyTorch computes"
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if at in computed and done:
            assert torch.equal(one, ours(other))
        else:
            assert (one is None and other is None) or torch.equal(one, other)


def test_a_call_ends_by_the_rules_by_which_it_began_though_others_are_opened_meanwhile(gate, plain):
    (call, _, grad, expected), others, opened = plain, [], []
    not_called = writer(others, 1, 1)

    def opens(*addresses):  # as another thread may while this call goes on
        opened.append(len(gate._computes))
        gate.use("cpu", [], [call.backward_rule(grad, weight=not_called)])
        opened.append(len(gate._computes))
        return write(*addresses)

    write = writer([], 0, expected[0].numel())
    gate.use("cpu", [], [call.backward_rule(grad, x=opens, weight=writer([], 1, expected[1].numel()))])
    found = call.backward(grad)
    for at in range(2):
        assert torch.equal(found[at], ours(expected[at]))
    assert not others
    assert opened == [2, 3], "both sets of rules have what they compute by"
    assert torch.equal(call.backward(grad)[0], expected[0])
    assert len(others) == 1
    gate.use("cpu", [], [])
    assert not gate._computes
    assert not gate._earlier


def test_threads_compute_while_the_gate_gets_other_rules(gate, plain):
    call, expected, *_ = plain
    rule = call.forward_rule(writer([], 2, expected.numel()))
    gate.use("cpu", [rule], [])
    wanted, found, ended = ours(expected), Counter(), Event()

    def compute():
        while not ended.is_set():
            out = call.forward()
            found["ours" if torch.equal(out, wanted) else "PyTorch's" if torch.equal(out, expected) else "wrong"] += 1

    threads = [Thread(target=compute) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        for number in range(200):
            gate.use("cpu", [rule] * (number % 2), [])
        while len(found) < 2 and not found["wrong"]:
            gate.use("cpu", [rule] * (not found["ours"]), [])
            sleep(0.01)
    finally:
        ended.set()
        for each in threads:
            each.join()
    assert not found["wrong"]
    gate.use("cpu", [rule], [])
    assert len(gate._computes) == 1, "nothing is kept of rules by which nobody computes"


def test_a_gate_that_is_opened_again_passes_on_to_the_same_kernels_and_stands_before_what_had_no_rules(
    gate, plain, passed_on
):
    (call, expected, grad, gradients), seen = plain, []
    backward = call.backward_rule(grad, weight=lambda *addresses: False)
    forward = call.forward_rule(writer(seen, 2, expected.numel()))
    try:
        gate.use("cpu", [], [backward])
        assert torch.equal(call.forward(), expected)
        gate.use("cpu", [forward], [])
        assert torch.equal(call.forward(), ours(expected))
        assert all(map(torch.equal, call.backward(grad), gradients))
        assert len(passed_on) == 1
        gate.use("cpu", [], [backward])
        assert torch.equal(call.forward(), expected)
        assert len(seen) == 1
    finally:
        gate.close()  # before the kernels to which it passes on are gone


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_gradients_in_another_precision_than_stated_are_left_to_pytorch(gate, plain, flags, precision):
    (call, _, grad, (_, expected, _)), seen = plain, []
    flags.conv.fp32_precision = precision
    gate.use("cpu", [], [call.backward_rule(grad, weight=writer(seen, 1, expected.numel()))])
    flags.conv.fp32_precision = {"ieee": "tf32", "tf32": "ieee"}[precision]
    assert torch.equal(call.backward(grad)[1], expected)
    assert not seen
    flags.conv.fp32_precision = precision
    assert torch.equal(call.backward(grad)[1], ours(expected))
    assert len(seen) == 1


def test_what_cannot_be_computed_is_left_to_pytorch(gate, plain, caplog):
    call, expected, grad, gradients = plain

    def fails(*addresses):
        raise ValueError("on purpose")

    gate.use("cpu", [call.forward_rule(fails)], [call.backward_rule(grad, x=lambda *_: False)])
    assert torch.equal(call.forward(), expected)
    assert "on purpose" in caplog.text
    assert all(map(torch.equal, call.backward(grad), gradients))


def test_calls_that_are_passed_on_never_come_to_python(gate, plain):
    (call, expected, *_), other, seen, entered = plain, Call("grouped"), [], []
    gate.use("cpu", [call.forward_rule(writer(seen, 2, expected.numel()))])
    inside = str(Path(ucudnn.__file__).parent)
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        other.forward()
        passed = [each for each in entered if each.startswith(inside)]
        call.forward()
    finally:
        sys.setprofile(None)
    assert not passed
    assert len(seen) == 1
    assert any(each.startswith(inside) for each in entered), "the same look at a call that is not passed on"


def test_a_closed_gate_is_gone(gate, plain):
    (call, expected, *_), seen = plain, []
    rules = [call.forward_rule(writer(seen, 2, expected.numel()))]
    for give_back in (gate.close, lambda: gate.use("cpu")):
        gate.use("cpu", rules)
        call.forward()
        assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "CPU")
        give_back()
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "CPU")
        assert torch.equal(call.forward(), expected)
    assert len(seen) == 2


def test_errors_of_pytorch_are_those_without_the_gate(gate, plain):
    call, *_ = plain
    gate.use("cpu", [call.forward_rule(lambda *_: False)])
    with pytest.raises(RuntimeError, match=r"expected input\[.*to have 3 channels, but got 5"):
        call.forward(torch.randn(4, 5, 9, 8))
    with pytest.raises(RuntimeError, match="could not parse dispatch key"):
        gate.use("nothing")
