"""Tests of peaks: the simulated peak of a recorded step is that of PyTorch's allocator, with the same line as owner."""

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tests.support.training_steps import Lambda, step_of, training_step  # noqa: E402
from ucudnn.memory.step.liveness import measure_liveness  # noqa: E402
from ucudnn.memory.torch.measuring import measured_peak as module  # noqa: E402
from ucudnn.memory.torch.measuring.measure import measure  # noqa: E402
from ucudnn.memory.torch.measuring.measured_peak import (  # noqa: E402
    descendants,
    measured_peak,
    memory_between_marks,
    peak_bytes,
)
from ucudnn.memory.torch.record import trace_step  # noqa: E402

STEPS = ["resnet18", "inception", "unet", "unet3d", "gpt", "densenet"]


@pytest.fixture(scope="module", params=STEPS)
def compared(request):
    """Return the liveness of a step that was recorded on fake tensors, with measured scratch, and the real peak."""
    with FakeTensorMode():
        graph = trace_step(training_step(request.param), request.param, 2).graph
    step = training_step(request.param)
    costs = measure(step, trace_step(step, request.param, 2), repeats=1)
    return measure_liveness(graph, costs), measured_peak(step)


def test_the_simulated_peak_is_pytorchs_within_one_percent_and_the_declared_scratch(compared):
    liveness, real = compared
    # With the measured scratch it is exact but for the first gradient, the number one.
    assert liveness.peak_bytes == pytest.approx(real.bytes, abs=8)
    scratch = liveness.scratch_bytes[liveness.peak_place]
    assert abs(real.bytes - max(liveness.live_bytes)) <= 0.01 * real.bytes + scratch


def test_the_peak_is_at_the_operation_and_the_line_that_pytorchs_profiler_shows(compared):
    liveness, real = compared
    operation = liveness.graph.operations[liveness.order[liveness.peak_place]]
    assert operation.kind == f"aten.{real.operator}"
    assert operation.source == real.source
    assert operation.source


def test_a_step_without_allocations_has_the_bytes_that_are_there():
    step = step_of(Lambda(lambda x, weight: weight, 3), torch.ones(5), loss=lambda out: out.sum())
    assert measured_peak(step).bytes >= 8 * 4


CALLS = 20_000


def many_calls(x, weight):
    """Compute in many calls of Python, as a convolution that NumPy computes piece by piece."""
    for _ in range(CALLS):
        abs(1)
    with torch.profiler.record_function("mark"):
        return (x * weight).relu()


@pytest.mark.parametrize("measure_peak", [peak_bytes, lambda step: dict(memory_between_marks(step, ("mark",)))["mark"]])
def test_the_bytes_of_a_step_are_measured_without_recording_its_calls_of_python(monkeypatch, measure_peak):
    profiles = []

    def watched(**options):
        profiles.append(torch.profiler.profile(**options))
        return profiles[-1]

    monkeypatch.setattr(module, "profile", watched)
    step = step_of(Lambda(many_calls, 300), torch.ones(2, 300), loss=lambda out: out.sum())
    step.run()
    found, expected = measure_peak(step), measured_peak(step).bytes
    assert found == expected
    short, whole = (len([*descendants(each.profiler.kineto_results.experimental_event_tree())]) for each in profiles)
    assert whole > CALLS
    assert short < 1000
