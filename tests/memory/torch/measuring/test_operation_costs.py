"""Tests of the costs of single operations: all operations of real steps run on made-up operands, and leave no trace."""

import re
from dataclasses import replace
from functools import cache
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from tests.support.live_bytes import LiveBytes
from tests.support.training_steps import training_step
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.measuring import operation_costs
from ucudnn.memory.torch.measuring.operation_costs import measure_operations, step_costs
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.subject.step_program import StepSubject
from ucudnn.memory.torch.tracing.traced_program import trace_program

UNKNOWN = 12345.0


@cache
def program_of(name, optimizer="sgd"):
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
    number = len(program.graph.operations)
    unknown = replace(costs, time_ms=(UNKNOWN,) * number, scratch_bytes=(7,) * number, configurations={})
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


def test_measuring_says_how_far_it_is():
    told, program = [], program_of("unet3d")
    costs = device_costs(load_device("h200"), program.graph)
    seconds = count(step=3.0)
    measure_operations(program, costs, repeats=1, stages=Stages(told.append, clock=lambda: next(seconds)))
    first, *parts, last = told
    kinds = int(re.fullmatch(r"measuring (\d+) kinds of operations", first)[1])
    assert last == "measuring copies, and operations beside them"
    done = [int(re.fullmatch(rf"{first}: (\d+) of {kinds}", part)[1]) for part in parts]
    assert 1 < len(done) < kinds
    assert done == sorted(set(done))


@pytest.mark.parametrize("trials", [False, True])
def test_convolutions_are_measured_where_they_run(monkeypatch, trials):
    program = program_of("unet3d")
    thread, found = ["forward"], []
    inner, measure = operation_costs.in_backward, operation_costs.measure_operator

    def in_backward(call, device):
        def noted():
            thread.append("backward")
            try:
                return call()
            finally:
                thread.pop()

        return inner(noted, device)

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append((func, thread[-1]))
            return func(*args, **(kwargs or {}))

    def noted_measure(*args):
        with Noted():
            return measure(*args)

    monkeypatch.setattr(operation_costs, "in_backward", in_backward)
    monkeypatch.setattr(operation_costs, "measure_operator", noted_measure)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", trials)
    measured(program)
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    assert {each for func, each in found if func is backward} == {"backward"}
    # forward is computed again in backward, where cuDNN would try algorithms again
    assert {each for func, each in found if func is forward} == ({"forward", "backward"} if trials else {"forward"})


def test_what_runs_in_backward_returns_and_raises():
    device = torch.device("cpu")
    assert operation_costs.in_backward(lambda: torch._C._current_graph_task_id() >= 0, device)
    with pytest.raises(ValueError, match="odd"):
        operation_costs.in_backward(lambda: (_ for _ in ()).throw(ValueError("odd")), device)


def test_random_numbers_and_the_model_stay_as_they_were():
    program = program_of("unet")
    before = [tensor.clone() for tensor, _ in program.persistent]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    measured(program)
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(tensor, old) for (tensor, _), old in zip(program.persistent, before, strict=True))


def test_an_operation_that_cannot_run_on_made_up_operands_keeps_its_estimate(monkeypatch):
    program = program_of("unet")
    target = next(index for index, call in enumerate(program.calls) if "convolution" in str(call.func))
    call = program.calls[target]

    def refuses(*_, **__):
        raise RuntimeError("no")

    refuses._schema, refuses.namespace = call.func._schema, call.func.namespace
    calls = list(program.calls)
    calls[target] = replace(call, func=refuses)
    costs = measured(replace(program, calls=tuple(calls)))
    assert costs.time_ms[target] == UNKNOWN


def estimated(*names):
    """Return a program, and costs of it whose times are unknown."""
    program = program_of(*names)
    costs = step_costs(program.graph, torch.device("cpu"))
    return program, replace(costs, time_ms=(UNKNOWN,) * len(program.calls))


def test_measuring_takes_no_more_than_the_budget_leaves_beside_what_stays():
    program, costs = estimated("unet", "adam")
    graph, liveness = program.graph, measure_liveness(program.graph, costs)
    budget = liveness.floor_bytes
    rooms = [  # an operation's own parameters are made up a second time
        budget - stays + sum(graph.sizes[each] for each in {*done.reads, *done.writes} if graph.exists_after[each])
        for stays, done in zip(liveness.persistent_bytes, graph.operations, strict=True)
    ]
    with LiveBytes() as counted:
        found = measure_operations(program, costs, tensor_bytes=budget, repeats=1)
    assert 0.3 * budget < counted.peak <= max(rooms)
    assert all((time == UNKNOWN) == (index in program.outside) for index, time in enumerate(found.time_ms))


@pytest.mark.parametrize("share", [1.0, 1.05, 2.0])
def test_scratch_leaves_some_of_the_budget_to_holes_where_there_is_as_much(share):
    program, costs = estimated("unet", "adam")
    graph, liveness = program.graph, measure_liveness(program.graph, costs)
    budget = int(share * liveness.floor_bytes)
    rooms = operation_costs._rooms(graph, costs, budget)
    for place, done in enumerate(graph.operations):
        twice = sum(graph.sizes[each] for each in {*done.reads, *done.writes} if graph.exists_after[each])
        bare = liveness.persistent_bytes[place] + liveness.working_bytes[place]
        most_scratch = rooms[place] - twice - liveness.working_bytes[place]
        left = budget - bare - most_scratch
        assert left == min((budget - bare) // 2, int(0.06 * budget))
        assert most_scratch >= 0


def test_contention_is_that_of_the_operations_that_take_the_most_time(monkeypatch):
    program, ran, closed = program_of("unet3d"), [], []
    copies = SimpleNamespace(close=lambda: closed.append(True))  # a CPU has no copies beside its compute

    def timed(operator, beside, alone_ms, repeats):
        assert beside is copies
        assert repeats % 2 == 0  # both directions
        operator()
        ran.append((alone_ms, torch._C._current_graph_task_id() >= 0))
        return (1.0, 1.5) if alone_ms == 100.0 else (2.0, 1.0)

    monkeypatch.setattr(operation_costs, "CopiesBeside", lambda *_: copies)
    monkeypatch.setattr(operation_costs, "alone_and_beside", timed)
    kinds = list(operation_costs.alike_operations(program).values())
    costly = kinds[3:6]
    times = [1e-3] * len(program.calls)
    for alike in costly:
        for operation in alike:
            times[operation] = 100.0
    monkeypatch.setattr(operation_costs, "_MOST_CONTENDED", 3)
    assert operation_costs._contention(program, times, None, 1e6) == 1.5
    assert closed
    phases = [{program.graph.operations[each].phase for each in alike} == {Phase.BACKWARD} for alike in costly]
    assert sorted(ran) == sorted((100.0, backward) for backward in phases)
    ran.clear()
    monkeypatch.setattr(operation_costs, "_MOST_CONTENDED", 4)  # one more, which is faster beside copies
    weights = sum(map(len, costly)), max(len(alike) for alike in kinds if alike not in costly)
    expected = max(1.0, (1.5 * weights[0] + weights[1]) / (weights[0] + 2 * weights[1]))
    assert operation_costs._contention(program, times, None, 1e6) == pytest.approx(expected)
    ran.clear()
    assert operation_costs._contention(program, times, [0] * len(times), 1e6) == 1.0  # nothing has room
    assert ran == []


def test_an_operation_that_the_budget_has_no_room_for_keeps_its_estimate():
    program, costs = estimated("unet")
    graph = program.graph
    reads = [sum(graph.sizes[each] for each in operation.reads) for operation in graph.operations]
    little = max(measure_liveness(graph, costs).persistent_bytes) + 4096
    with LiveBytes() as counted:
        found = measure_operations(program, costs, tensor_bytes=little, repeats=1)
    assert found.time_ms[reads.index(max(reads))] == UNKNOWN
    assert min(found.time_ms) < UNKNOWN
    assert counted.peak < max(reads)
