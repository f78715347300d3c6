"""Calls that would give wrong numbers: outputs that overlap inputs, and convolutions inside a convolution."""

import signal
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from tests.support.operands import PROBLEM, QUICK, check_run, direct, operands, relative, written
from ucudnn import Handle
from ucudnn.errors import InvalidProblemError, ReentryError
from ucudnn.execution.plan import Plan
from ucudnn.problem import Operation


def handle(**options):
    return Handle(**{"backend": "cpu", "workspace_limit": "20KiB", "effort": QUICK, "database": "off"} | options)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("limit", ["0", "20KiB", "1GiB"])
def test_an_output_that_overlaps_an_input_is_refused(operation, limit):
    problem = PROBLEM.with_operation(operation)
    x, w, y = operands(problem)
    memory = np.zeros(x.size + w.size + y.size)
    out = written(problem, x, w, y)
    names = [name for name, each in zip("xwy", (x, w, y), strict=True) if each is not out]
    own = handle(workspace_limit=limit)
    for shared in names:
        tensors = {"x": x, "w": w, "y": y}
        other = tensors[shared] = memory[: tensors[shared].size].reshape(tensors[shared].shape)
        name = next(name for name, each in tensors.items() if each is out)
        tensors[name] = memory[other.size - 1 :][: out.size].reshape(out.shape)  # one element in common
        with pytest.raises(InvalidProblemError, match=f"^{name}, which {operation.value} writes, .* with {shared},"):
            own.convolve(problem, **tensors)
        tensors[name] = memory[other.size :][: out.size].reshape(out.shape)
        own.convolve(problem, **tensors)


def test_ranges_of_channels_of_one_array_are_accepted():
    memory = np.random.default_rng(3).uniform(-0.5, 0.5, (6, 10, 9, 8))
    before = memory.copy()
    x, y = memory[:, :4], memory[:, 4:]
    _, w, _ = operands(PROBLEM)
    handle().forward(x, w, y, padding=1)
    assert relative(y, direct(PROBLEM, before[:, :4], w, y, 1.0, 0.0)) < 1e-12
    np.testing.assert_array_equal(x, before[:, :4])


@contextmanager
def interrupted(monkeypatch, call):
    """Let a signal arrive in the middle of each launch; its handler calls."""
    errors, inside = [], []
    launch = Plan.launch

    def interrupt(*_):
        try:
            call()
        except Exception as error:  # noqa: BLE001  # it is what the test looks at
            errors.append(error)

    def launched(self, *arguments):
        if not inside:
            inside.append(self)
            signal.raise_signal(signal.SIGUSR1)
        launch(self, *arguments)

    before = signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(Plan, "launch", launched)
    try:
        yield errors
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("same", [True, False], ids=["the same handle", "another handle of the backend"])
@pytest.mark.parametrize("entry", ["forward", "optimize"])
def test_a_signal_handler_that_convolves_is_refused(monkeypatch, same, entry):
    x, w, y = operands(PROBLEM)
    own = handle()
    other = own if same else handle(backend=own.backend)
    calls = {"forward": lambda: other.forward(x, w, np.empty_like(y), padding=1), "optimize": other.optimize}
    with interrupted(monkeypatch, calls[entry]) as errors:
        check_run(PROBLEM, partial(own.forward, padding=1))
    assert [type(error) for error in errors] == [ReentryError]
    assert "let the handler set a flag" in str(errors[0])
    calls[entry]()  # afterwards all is as before
