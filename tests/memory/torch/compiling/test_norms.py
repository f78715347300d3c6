from dataclasses import replace

import torch
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.compiled_steps import SmallNet, images
from ucudnn.memory.step.graph import Affine, Phase, Role, Storage
from ucudnn.memory.torch.compiling.fused_program import RegionKinds, fused_program
from ucudnn.memory.torch.compiling.norms import with_native_norms
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.memory.torch.tracing.traced_program import trace_program

aten = torch.ops.aten


def as_on_a_gpu(program):
    """Return a step with cuDNN's operators in the place of PyTorch's own, and a reserve for each norm."""
    graph, reserves = program.graph, {}
    calls, operations, storages, sizes = [*program.calls], [*graph.operations], [*graph.storages], dict(program.sizes)
    for index, call in enumerate(calls):
        if call.func is aten.native_batch_norm.default:
            storage = reserves[call.results[1].storage] = len(storages)
            storages.append(Storage(name=f"reserve{index}", role=Role.ACTIVATION, size=Affine(64)))
            sizes[storage] = 64
            reserve = TracedTensor(storage, (64,), (1,), 0, torch.uint8)
            calls[index] = replace(call, func=aten.cudnn_batch_norm.default, results=(*call.results, reserve))
            operations[index] = replace(operations[index], writes=(*operations[index].writes, storage))
        elif call.func is aten.native_batch_norm_backward.default:
            grad, x, weight, mean, variance, save_mean, save_variance, _, epsilon, _ = call.args
            storage = reserves[save_mean.storage]
            reserve = TracedTensor(storage, (64,), (1,), 0, torch.uint8)
            args = x, grad, weight, mean, variance, save_mean, save_variance, epsilon, reserve
            calls[index] = replace(call, func=aten.cudnn_batch_norm_backward.default, args=args)
            operations[index] = replace(operations[index], reads=(*operations[index].reads, storage))
    assert len(reserves) == 2
    changed = replace(graph, operations=tuple(operations), storages=tuple(storages))
    return replace(program, calls=tuple(calls), graph=changed, sizes=sizes)


def test_the_batch_norms_of_cudnn_become_those_of_pytorch_without_their_reserve():
    program = trace_program(step_subject(SmallNet(), images(), F.cross_entropy, None), "net", 4)
    found, own = with_native_norms(as_on_a_gpu(program)), with_native_norms(program)
    assert [each.computed for each in found.calls] == [each.computed for each in own.calls]
    assert [each.func for each in own.calls] == [each.func for each in program.calls]
    assert [each.reads for each in found.graph.operations] == [each.reads for each in own.graph.operations]
    assert [each.writes for each in found.graph.operations] == [each.writes for each in program.graph.operations]


def test_backward_reads_no_running_statistics():
    program = trace_program(step_subject(SmallNet(), images(), F.cross_entropy, None), "net", 4)
    graph = fused_program(program, RegionKinds()).graph
    read = {graph.storages[each].name for op in graph.operations if op.phase is Phase.BACKWARD for each in op.reads}
    assert "norm.weight" in read
    assert not any("running" in each for each in read)


def test_regions_hold_them_and_the_reserve_is_in_no_plan():
    program = trace_program(step_subject(SmallNet(), images(), F.cross_entropy, None), "net", 4)
    ours, plain = (fused_program(each, RegionKinds()) for each in (as_on_a_gpu(program), program))
    assert [each.name for each in ours.graph.storages] == [each.name for each in plain.graph.storages]
    assert [str(each.func) for each in ours.calls] == [str(each.func) for each in plain.calls]
