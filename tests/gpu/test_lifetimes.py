"""Lifetimes on a real GPU: streams that end, arenas that are dropped while streams run, and graphs that run late."""

import gc
from dataclasses import replace

import pytest

from tests.support.gpu import Operands, captured, open_or_skip, tolerance
from ucudnn import Effort, Handle
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.gpu.driver import stream_id
from ucudnn.problem import ConvolutionProblem, Operation

PROBLEM = ConvolutionProblem(
    operation=Operation.FORWARD, batch=32, channels=16, spatial=(28, 28), filters=16, kernel=(3, 3), padding=(1, 1)
)


def open_handle(candidates=Candidates.GRAPH, **options):
    effort = Effort(warmup=0, repeats=1, time_limit_ms=1)
    return Handle(backend=open_or_skip(candidates), effort=effort, database="off", **options)


def test_streams_with_one_address_have_different_numbers(cupy):
    gpu = open_or_skip(Candidates.GRAPH)._device
    found = []
    for _ in range(64):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            found.append((stream.ptr, gpu.stream_number(gpu.queue()), gpu.stream_number(gpu.queue())))
            known = stream_id(stream.ptr) is not None  # asked while the stream exists: the driver crashes afterwards
        stream.synchronize()
        del stream
    if not known:
        pytest.skip("the driver has no numbers of streams")
    assert all(one == other for _, one, other in found)
    assert len({number for _, number, _ in found}) == len(found)
    if len({address for address, *_ in found}) == len(found):
        pytest.skip("CUDA gave no address twice")


def test_a_number_may_be_asked_for_in_a_capture(cupy):
    gpu = open_or_skip(Candidates.GRAPH)._device
    stream = cupy.cuda.Stream(non_blocking=True)
    memory = cupy.zeros(16, cupy.uint8)
    with stream:
        before = gpu.stream_number(gpu.queue())
        stream.begin_capture()
        inside = gpu.stream_number(gpu.queue())
        gpu.set_bytes(memory.data.ptr, 7, 16)
        graph = stream.end_capture()
    assert inside == before
    graph.launch(stream)
    stream.synchronize()
    assert (memory == 7).all()


def test_streams_that_come_and_go_do_not_share_workspaces(cupy):
    handle = open_handle(Candidates.LEGACY, policy="undivided", workspace_limit="64MiB")
    operands = [Operands.random(cupy, PROBLEM) for _ in range(8)]
    handle.convolve(PROBLEM, *operands[0].addresses())
    for each in operands:
        each.poison()
    cupy.cuda.Device().synchronize()
    for each in operands:
        stream = cupy.cuda.Stream(non_blocking=True)  # dropped while its work runs
        with stream:
            handle.convolve(PROBLEM, *each.addresses())
        del stream
    cupy.cuda.Device().synchronize()
    for each in operands:
        assert each.error(cupy, each.expected()) <= tolerance(PROBLEM)


def test_an_arena_is_not_reused_while_another_stream_uses_it(cupy):
    operands = Operands.random(cupy, PROBLEM)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for _ in range(10):
        handle = open_handle(total_workspace="64MiB")
        with first:
            handle.convolve(PROBLEM, *operands.addresses(), layer="a")
        operands.poison()
        cupy.cuda.Device().synchronize()
        with second:
            for _ in range(20):
                handle.convolve(PROBLEM, *operands.addresses(), layer="a")
        size = handle.workspace_bytes
        del handle
        gc.collect()
        with first:  # gets the memory of the arena, and writes NaN to it
            noise = [cupy.full(max(1, size), 0xFF, cupy.uint8) for _ in range(4)]
        cupy.cuda.Device().synchronize()
        del noise
        assert operands.error(cupy, operands.expected()) <= tolerance(PROBLEM)


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_a_graph_is_replayed_after_a_hundred_other_factors(cupy, operation):
    problem = replace(PROBLEM, operation=operation)
    operands, other = Operands.random(cupy, problem), Operands.random(cupy, problem)
    handle = open_handle(workspace_limit="64MiB")
    handle.convolve(problem, *operands.addresses())
    handle.convolve(problem, *other.addresses(), alpha=0.5)
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = captured(stream, lambda: handle.convolve(problem, *operands.addresses(), alpha=0.5))
    for number in range(100):
        handle.convolve(problem, *other.addresses(), alpha=1 + number / 128)
    gc.collect()
    operands.poison()
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert operands.error(cupy, operands.expected(alpha=0.5)) <= tolerance(problem)
