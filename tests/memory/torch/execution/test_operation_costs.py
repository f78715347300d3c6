"""Tests of the costs of single operations: all operations of real steps run on made-up operands, and leave no trace."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.support.training_steps import training_step  # noqa: E402
from ucudnn.memory.devices.profile import load_device  # noqa: E402
from ucudnn.memory.devices.roofline import device_costs  # noqa: E402
from ucudnn.memory.torch.execution.operation_costs import measure_operations  # noqa: E402
from ucudnn.memory.torch.execution.step_program import StepSubject, trace_program  # noqa: E402

UNKNOWN = 12345.0


def program_of(name, optimizer):
    step = training_step(name, optimizer)
    subject = StepSubject(
        model=step.model.train(),
        args=(*step.inputs, *step.targets),
        kwargs={},
        loss=step.loss,
        targets=1,
        optimizers=(step.optimizer,),
    )
    return trace_program(subject, name, 2)


def measured(program):
    costs = device_costs(load_device("h200"), program.graph)
    count = len(program.graph.operations)
    unknown = replace(costs, time_ms=(UNKNOWN,) * count, scratch_bytes=(7,) * count, configurations={})
    return measure_operations(program, unknown, repeats=1)


@pytest.mark.parametrize(("name", "optimizer"), [("unet3d", "sgd"), ("gpt", "adam")])
def test_every_operation_is_measured(name, optimizer):
    program = program_of(name, optimizer)
    costs = measured(program)
    wrong = {
        str(call.func): index
        for index, call in enumerate(program.calls)
        if (costs.time_ms[index] == UNKNOWN) != (index in program.outside)
    }
    assert wrong == {}
    assert min(costs.time_ms) > 0
    assert set(costs.scratch_bytes) == {7}  # a CPU's scratch stays as it was estimated
    assert costs.device == "cpu"
    assert costs.offload_bytes_per_ms > 1e5


def test_random_numbers_and_the_model_stay_as_they_were():
    program = program_of("unet", "sgd")
    before = [tensor.clone() for tensor, _ in program.persistent]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    measured(program)
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(tensor, old) for (tensor, _), old in zip(program.persistent, before, strict=True))


def test_an_operation_that_cannot_run_on_made_up_operands_keeps_its_estimate(monkeypatch):
    program = program_of("unet", "sgd")
    target = next(index for index, call in enumerate(program.calls) if "convolution" in str(call.func))
    call = program.calls[target]

    def refuses(*_, **__):
        raise RuntimeError("no")

    calls = list(program.calls)
    calls[target] = replace(call, func=refuses)
    costs = measured(replace(program, calls=tuple(calls)))
    assert costs.time_ms[target] == UNKNOWN
