"""Gradients that autograd alone has serve as workspace; those that somebody else has stay what they are."""

from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch as switch  # noqa: E402
from tests.torch.test_interceptor import assert_close  # noqa: E402
from ucudnn import Effort  # noqa: E402
from ucudnn.errors import (  # noqa: E402
    BackendError,
    BackendUnavailableError,
    MeasurementError,
    SettingsError,
    SpentError,
    StepError,
)
from ucudnn.execution.dispatcher import Dispatcher  # noqa: E402
from ucudnn.execution.plan import Plan  # noqa: E402
from ucudnn.problem import Operation  # noqa: E402
from ucudnn.torch import lending  # noqa: E402
from ucudnn.torch.lending import Counts, counts_alone  # noqa: E402
from ucudnn.torch.overrides import kernels  # noqa: E402

QUICK = Effort(warmup=0, repeats=1, time_limit_ms=1)
OPTIONS = {"backend": "cpu", "workspace_limit": "200KiB", "policy": "powerOfTwo", "database": "off", "effort": QUICK}


@pytest.fixture(autouse=True)
def off():
    """Turn everything off, whatever a test left."""
    yield
    switch.disable()


@pytest.fixture
def x():
    return torch.randn(32, 3, 20, 20, dtype=torch.float64)


@pytest.fixture
def layer():
    return torch.nn.Conv2d(3, 8, 3, padding=1, dtype=torch.float64)


@contextmanager
def lent():
    with switch.enable(lend_gradients=True, **OPTIONS) as on:
        yield on


def kernels_of(on):
    """Return whether what was planned overwrites the output's gradient, by operation and by whether it may."""
    (handle,) = on._switch.handles().values()
    entries = [entry for entry in handle._entries.values() if entry.plan is not None]
    found = {}
    for entry in entries:
        key = entry.kernel.operation, entry.kernel.spent
        found[key] = found.get(key, False) or any(step.head for step in entry.plan.steps)
    return found


def of_sines(y):
    """Let autograd compute a gradient that no other tensor has."""
    y.sin().sum().backward()


def gradients(x, module, run=of_sines):
    module.zero_grad()
    wanted = x.clone().requires_grad_()
    run(module(wanted))
    return [wanted.grad, *(each.grad for each in module.parameters())]


def test_gradients_are_the_same(x):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 6, 3, groups=2),
    ).double()
    expected = gradients(x, model)
    with lent() as on:
        for _ in range(2):
            for ours, theirs in zip(gradients(x, model), expected, strict=True):
                assert_close(ours, theirs)
    found = kernels_of(on)
    assert (Operation.BACKWARD_FILTER, True) not in found, "the other gradient needs it"
    assert found[Operation.BACKWARD_DATA, True]
    assert not on.report().left


def test_a_filter_gradient_that_is_alone_lends_it(x, layer):
    of_sines(layer(x))
    expected = [each.grad.clone() for each in layer.parameters()]
    with lent() as on:
        layer.zero_grad()
        of_sines(layer(x))
    assert kernels_of(on)[Operation.BACKWARD_FILTER, True]
    for each, theirs in zip(layer.parameters(), expected, strict=True):
        assert_close(each.grad, theirs)


def test_a_gradient_that_had_to_be_copied_is_nobodys(x, layer):
    def run(y):
        y.backward(kept[0])

    kept = [torch.randn(32, 20, 20, 8, dtype=torch.float64).permute(0, 3, 1, 2)]
    before = kept[0].clone()
    expected = gradients(x, layer, run)
    with lent() as on:
        for ours, theirs in zip(gradients(x, layer, run), expected, strict=True):
            assert_close(ours, theirs)
    assert kernels_of(on)[Operation.BACKWARD_DATA, True]
    assert torch.equal(kept[0], before)


def held(y):
    grad = y.detach().cos()
    y.backward(grad)
    return grad


def hooked(keep=lambda grad: grad, seen=lambda kept: kept):
    """Return a way in which a hook keeps something of a gradient, and how that is looked at afterwards."""

    def run(y):
        kept = []
        y.register_hook(lambda grad: kept.append(keep(grad)))
        of_sines(y)
        return seen(kept[0])

    return run


def of_storage(storage):
    return torch.empty(0, dtype=torch.float64).set_(storage).view(32, 8, 20, 20)


def of_another_library(y):
    given = y.detach().cos().numpy().copy()

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(context, y):
            return y.clone()

        @staticmethod
        def backward(context, grad):
            return torch.from_numpy(given)

    Identity.apply(y).sum().backward()
    return torch.from_numpy(given)


def hooked_at_the_node(y):
    kept = []
    y.grad_fn.register_hook(lambda inputs, outputs: kept.append(outputs[0]))
    of_sines(y)
    return kept[0]


def hooked_before_the_node(y):
    kept = []
    y.grad_fn.register_prehook(lambda grads: kept.extend(grads))
    of_sines(y)
    return kept[0]


def asked_for(y):
    (grad,) = torch.autograd.grad(y.sin().sum(), y, retain_graph=True)
    y.backward(grad)
    return grad


WAYS = {
    "held": held,
    "by a hook": hooked(),
    "as an array": hooked(torch.Tensor.numpy, torch.from_numpy),
    "as a view": hooked(lambda grad: grad[:]),
    "detached": hooked(torch.Tensor.detach),
    "as memory": hooked(torch.Tensor.untyped_storage, of_storage),
    "by another library": of_another_library,
    "by a hook of the node": hooked_at_the_node,
    "by a hook before it": hooked_before_the_node,
    "asked for": asked_for,
}


@pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
def test_what_somebody_has_is_not_overwritten(x, layer, run):
    with lent() as on:
        y = layer(x)
        found = run(y)
        assert_close(found, y.detach().cos())
    assert (Operation.BACKWARD_FILTER, True) not in kernels_of(on)


def test_what_is_retained_is_a_copy(x, layer):
    with lent() as on:
        y = layer(x)
        y.retain_grad()
        of_sines(y)
        assert_close(y.grad, y.detach().cos())
    assert kernels_of(on)[Operation.BACKWARD_FILTER, True]


def test_what_two_layers_have_is_overwritten_by_the_last_at_most(x, layer):
    other = torch.nn.Conv2d(3, 8, 3, padding=1, dtype=torch.float64)

    def both():
        for each in (layer, other):
            each.zero_grad()
        of_sines(layer(x) + other(x))
        return [each.grad for module in (layer, other) for each in module.parameters()]

    expected = both()
    with lent():
        for ours, theirs in zip(both(), expected, strict=True):
            assert_close(ours, theirs)


def test_a_gradient_of_gradients_finds_all_of_them(x, layer):
    def second():
        wanted = x[:8].clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(wanted).sin().sum(), wanted, create_graph=True)
        return torch.autograd.grad(first.square().sum(), layer.weight)[0]

    expected = second()
    with lent():
        assert_close(second(), expected)


def test_where_nothing_is_lent_nothing_is_spent(x, layer):
    with switch.enable(**OPTIONS) as on:
        of_sines(layer(x))
    assert not any(spent for _, spent in kernels_of(on))


FAULTS = [MemoryError("none left"), RuntimeError("a fault"), MeasurementError("nothing left")]


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=str)
@pytest.mark.parametrize("start", [None, 0, 4])
@pytest.mark.parametrize("copied", [False, True], ids=["its own", "a copy"])
def test_what_was_begun_and_cannot_be_ended_is_an_error(x, layer, monkeypatch, start, fault, copied):
    step = StepError("GEMM", 1, start or 0, BackendError("no more"))
    fault = fault or step

    def fails(self, x, w, y, **options):
        y[...] = float("nan") if start != 0 else y  # as if heads had been used
        raise fault if start is None else step

    def gives_up(self, entry, error, call):
        raise fault

    last = torch.randn(32, 20, 20, 8, dtype=torch.float64).permute(0, 3, 1, 2)  # somebody's, and of another layout

    def run(y):
        if copied:
            y.backward(last)
        else:
            of_sines(y)

    run(layer(x))
    expected = layer.weight.grad.clone()
    with lent() as on:
        y = layer(x)
        run(y)
        assert kernels_of(on)[Operation.BACKWARD_FILTER, True]
        y = layer(x)
        monkeypatch.setattr(Plan, "launch", fails)
        monkeypatch.setattr(Dispatcher, "_finish", gives_up)
        layer.zero_grad()
        lost = start == 4 or (start is None and fault is not step)
        if lost and not copied:
            with pytest.raises(SpentError, match="the gradient of its output was overwritten"):
                run(y)
            return
        if start is None and fault is step:
            return
        run(y)
        assert_close(layer.weight.grad, expected)
        assert copied or sum(on.report().left.values()) == 1


@pytest.mark.parametrize("counts", [Counts(3, 3, 3, 2, True), None])
def test_a_pytorch_that_does_not_tell_is_refused(monkeypatch, counts):
    def count(tensor):
        if counts is None:
            raise AttributeError("_use_count")
        return counts

    monkeypatch.setattr(lending, "counts_of", count)
    with pytest.raises(BackendUnavailableError, match="lend_gradients: PyTorch"):
        switch.enable(lend_gradients=True, **OPTIONS)
    assert kernels.switch is None
    x, w = torch.randn(1, 1, 3, 3), torch.randn(1, 1, 2, 2, requires_grad=True)
    torch.nn.functional.conv2d(x, w).sum().backward()


def test_counting_leaves_what_is_on_as_it_is(x, layer):
    with switch.enable(**OPTIONS) as on:
        layer(x)
        with torch.no_grad():
            first = counts_alone(kernels.probing)
        with torch.inference_mode():
            assert counts_alone(kernels.probing) == first
        assert kernels.switch is on._switch
        before = on.report().calls
        layer(x)
        assert on.report().calls == before + 1


def test_it_counts_whatever_goes_on_around_it():
    expected = counts_alone(kernels.probing)
    with torch.device("meta"), torch.no_grad():
        assert counts_alone(kernels.probing) == expected


def test_ranks_that_plan_together_are_refused(monkeypatch):
    monkeypatch.setenv("UCUDNN_BENCHMARK_DEVICES", "ranks")
    with pytest.raises(SettingsError, match="lend_gradients: which gradients are lent is for each rank"):
        switch.enable(lend_gradients=True, **OPTIONS)
    assert kernels.switch is None


def test_while_modules_are_converted_nothing_is_lent(x, layer):
    other = switch.convert(torch.nn.Conv2d(3, 4, 1, dtype=torch.float64), **OPTIONS)
    try:
        with lent() as on:
            of_sines(layer(x) + other(x).sum())
        assert not any(spent for _, spent in kernels_of(on))
    finally:
        kernels.clear()
