"""The convolutions of fitted steps on addresses, as on a GPU: bound once, launched again, never on other alignments."""

import pytest
import torch

from tests.support.host_gpu import PROBLEM, assert_near, image_and_filters
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendError
from ucudnn.execution.plan import make_plan
from ucudnn.memory.torch.convolutions.planned_convolution import PlannedConvolution
from ucudnn.memory.torch.convolutions.step_kernel import StepKernel
from ucudnn.memory.torch.subject.traced_values import TracedTensor

REST = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.fixture
def planned(backend):
    """Return PROBLEM in two micro-batches, which takes the host's memory for a GPU's."""
    algorithm = max(backend.algorithms(PROBLEM.part(4)), key=lambda each: each.workspace_bytes)
    part = MicroConfiguration(size=4, algorithm=algorithm.name, time_ms=1.0, workspace_bytes=algorithm.workspace_bytes)
    output = TracedTensor(0, (8, 6, 7, 6), (252, 42, 6, 1), 0, torch.float32)
    kernel = StepKernel(
        name="convolution",
        problem=PROBLEM,
        transposed=False,
        result=None,
        output=output,
        memory_format=torch.contiguous_format,
        copied=(),
        bias=TracedTensor(1, (6,), (1,), 0, torch.float32),
    )
    plan = make_plan(PROBLEM, Configuration(parts=(part, part)), backend)
    found = PlannedConvolution(kernel, plan, backend, torch.device("cpu"))
    found._on_gpu = True
    return found


def test_calls_are_bound_to_addresses_and_launched_again(planned, host, calls):
    x, w = image_and_filters()
    bias = torch.randn(6)
    expected = torch.nn.functional.conv2d(x.double(), w.double(), bias.double(), padding=1)
    outputs = []
    for _ in range(3):
        calls()
        host.forget()
        outputs.append(planned(x, w, bias, *REST))
        launched = calls()
        assert len(launched) == 2
        assert {call.batch for call in launched} == {4}
        assert host.allocated == ([planned.plan.workspace_bytes] if planned.plan.workspace_bytes else [])
        assert_near([outputs[-1].double()], [expected])
    assert planned.calls == 3
    assert 1 <= len(planned._bound) <= 3
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_captured_launch_binds_nothing(planned, host):
    x, w = image_and_filters()
    host.stream, host.captures = 7, True
    found = planned(x, w, torch.zeros(6), *REST)
    assert len(planned._bound) == 0
    assert_near([found], [torch.nn.functional.conv2d(x, w, padding=1)])


def test_an_address_that_is_less_aligned_than_the_sample_is_refused(planned):
    x, w = image_and_filters()
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert shifted.data_ptr() % 16
    with pytest.raises(BackendError, match="no multiple of 16 bytes"):
        planned(shifted, w, torch.zeros(6), *REST)


def test_a_workspace_that_does_not_fit_is_an_error(planned, host):
    x, w = image_and_filters()
    assert planned.plan.workspace_bytes > 0
    host.most_bytes = planned.plan.workspace_bytes - 1
    with pytest.raises(MemoryError):
        planned(x, w, torch.zeros(6), *REST)
