"""The handle on a GPU: plans of every kind, streams, graphs, misaligned and missing memory, failing algorithms."""

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest

import ucudnn
from tests.support.gpu import QUICK, Operands, captured, open_or_skip, tolerance
from ucudnn.backends.candidates import Candidates
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import MicroConfiguration, configuration_of
from ucudnn.errors import BackendError, InvalidProblemError
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import Decision
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation

ALONE = pytest.mark.alone  # they ask how much of the whole GPU is free
PROBLEM = ConvolutionProblem(
    operation=Operation.FORWARD, batch=7, channels=32, spatial=(20, 20), filters=48, kernel=(3, 3), padding=(1, 1)
)


def handle(candidates=Candidates.BEST, **options):
    return ucudnn.Handle(backend=open_or_skip(candidates), effort=QUICK, **options)


def request(problem, *sizes, limit):
    return Request(problem=problem, sizes=tuple(sorted(set(sizes))), limit_bytes=limit)


def entry_of(each, problem):
    (entry,) = (entry for entry in each._entries.values() if entry.kernel.problem == problem)
    return entry


def run(each, operands, alpha=1.0, beta=0.0):
    each.convolve(operands.problem, *operands.addresses(), alpha=alpha, beta=beta)


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize("candidates", [Candidates.BEST, Candidates.LEGACY])
@pytest.mark.parametrize(("policy", "batch"), [("undivided", 7), ("powerOfTwo", 7), ("all", 7), ("adaptive", 50)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 1.0), (0.5, -0.25)])
def test_plans_of_every_kind(cupy, operation, candidates, policy, batch, alpha, beta):
    operands = Operands.random(cupy, replace(PROBLEM, operation=operation, batch=batch))
    each = handle(candidates, policy=policy, workspace_limit="1MiB")
    if beta == 0:
        operands.poison()
    run(each, operands, alpha, beta)
    assert operands.error(cupy, operands.expected(alpha, beta)) <= tolerance(operands.problem)
    assert each.workspace_bytes <= 2**20


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA], ids=lambda each: each.value)
def test_without_tf32_transforms_are_among_what_is_chosen(cupy, operation):
    # For this problem WINOGRAD_NONFUSED takes half the time of all algorithms of the graph API.
    layer = load_network("alexnet", 64).layers[3].forward
    operands = Operands.random(cupy, replace(layer, operation=operation, math=MathMode.FMA))
    each = ucudnn.Handle(backend=open_or_skip(Candidates.BEST), workspace_limit="256MiB", policy="powerOfTwo")
    operands.poison()
    run(each, operands)
    (kernel,) = each.report().kernels
    assert "WINOGRAD_NONFUSED" in kernel.configuration
    assert operands.error(cupy, operands.expected()) <= tolerance(operands.problem)


@pytest.mark.parametrize("candidates", [Candidates.GRAPH, Candidates.LEGACY])
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC], ids=lambda each: each.value)
def test_an_undivided_gradient_of_16_bits_is_computed_however_much_there_is_to_add(cupy, layout, candidates):
    # For this problem the plain algorithms of cuDNN that others are compared with add up in 16 bits, with large errors.
    layer = load_network("alexnet", 256).layers[0].forward
    problem = replace(layer, operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, layout=layout)
    operands = Operands.random(cupy, problem)
    each = handle(candidates, policy="undivided", workspace_limit="8GiB")
    operands.poison()
    run(each, operands)
    assert operands.error(cupy, operands.expected()) <= tolerance(problem)


@pytest.mark.parametrize("dtype", DataType, ids=lambda each: each.value)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC], ids=lambda each: each.value)
@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_micro_batches_are_as_exact_as_the_whole(cupy, dtype, layout, operation):
    problem = replace(PROBLEM, operation=operation, batch=64, dtype=dtype, layout=layout, math=MathMode.FMA)
    operands = Operands.random(cupy, problem)
    each = handle(workspace_limit="256MiB")
    run(each, operands)
    entry = entry_of(each, problem)
    expected = operands.expected()
    errors = {}
    sizes = (64, 16, 4, 2)
    benchmark = Benchmark(each.backend, effort=QUICK, exhaustive=True)
    measured = benchmark.micro_configurations(request(problem, *sizes, limit=2**28))
    offers = {size: {micro.algorithm: micro for micro in measured if micro.size == size} for size in sizes}
    everywhere = set.intersection(*map(set, offers.values()))
    algorithm = min(everywhere, key=lambda name: offers[64][name].time_ms)
    for size in sizes:
        fastest = offers[size][algorithm]
        entry.decide(
            Decision(kernel=entry.kernel, configuration=configuration_of([fastest] * (64 // size)), undivided=None)
        )
        operands.poison()
        run(each, operands)
        errors[size] = operands.error(cupy, expected)
    # Only the last rounding, to the type of the output, may add to the error.
    rounding = {DataType.FLOAT16: 2e-4, DataType.BFLOAT16: 2e-3, DataType.FLOAT32: 1e-7, DataType.FLOAT64: 1e-15}[dtype]
    assert errors[64] <= tolerance(problem)
    if operation is Operation.BACKWARD_FILTER and dtype in (DataType.FLOAT16, DataType.BFLOAT16):
        # Each micro-batch rounds the sum to 16 bits again.
        assert all(errors[size] <= errors[64] * max(1.1, (64 / size) ** 0.5) for size in sizes)
    else:
        assert max(errors.values()) <= 1.1 * max(errors[64], rounding)
    assert max(errors.values()) <= tolerance(problem)


def test_arrays_of_cupy(cupy):
    rng = np.random.default_rng()
    x, w = cupy.asarray(rng.random((8, 16, 15, 15), np.float32)), cupy.asarray(rng.random((24, 16, 3, 3), np.float32))
    y = cupy.full((8, 24, 15, 15), float("nan"), np.float32)
    dx, dw = cupy.full_like(x, float("nan")), cupy.ones_like(w)
    each = handle(workspace_limit="64MiB")
    each.forward(x, w, y, padding=1)
    each.backward_data(w, y, dx, padding=1)
    each.backward_filter(x, y, dw, padding=1, beta=1)
    for operation, out, base in (
        (Operation.FORWARD, y, 0),
        (Operation.BACKWARD_DATA, dx, 0),
        (Operation.BACKWARD_FILTER, dw, 1),
    ):
        problem = ucudnn.arrays.problem_of(operation, x, w, y, padding=1)
        operands = Operands(
            problem, {}, {}, {name: array.astype(np.float64) for name, array in zip("xwy", (x, w, y), strict=True)}
        )
        expected = operands.expected() + base
        assert float(cupy.linalg.norm(out - expected) / cupy.linalg.norm(expected)) < 2e-3
    with pytest.raises(InvalidProblemError, match="ndarray is not on a GPU"):
        each.forward(x.get(), w.get(), y.get(), padding=1)


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.FLOAT32], ids=lambda each: each.value)
@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize("candidates", [Candidates.BEST, Candidates.LEGACY])
def test_misaligned_tensors_and_micro_batches(cupy, dtype, operation, candidates):
    # 3 * 5 * 5 elements a sample: micro-batches begin at addresses of every alignment.
    problem = ConvolutionProblem(
        operation=operation, batch=7, channels=3, spatial=(5, 5), filters=5, kernel=(3, 3), dtype=dtype
    )
    for offset in (0, 1):
        operands = Operands.random(cupy, problem)
        shifted = {}
        for name, memory in operands.memory.items():
            whole = cupy.zeros(memory.size + 8, memory.dtype)
            whole[offset : offset + memory.size] = memory.ravel()
            shifted[name] = whole[offset : offset + memory.size].reshape(memory.shape)
        operands.memory = shifted
        operands.poison()
        run(handle(candidates, policy="all", workspace_limit="1MiB"), operands)
        assert operands.error(cupy, operands.expected()) <= 2e-3
        # and each size by itself
        each = handle(candidates, workspace_limit="1MiB")
        each.get_algorithm(problem)
        for size in (1, 2):
            micros = Benchmark(each.backend, effort=QUICK, exhaustive=True).micro_configurations(
                request(problem, 1, size, limit=2**20)
            )
            fastest = {micro.size: micro for micro in sorted(micros, key=lambda micro: -micro.time_ms)}
            parts = [fastest[size]] * (7 // size) + [fastest[1]] * (7 % size)
            run(each, operands)
            for entry in each._entries.values():
                entry.decide(Decision(kernel=entry.kernel, configuration=configuration_of(parts), undivided=None))
            operands.poison()
            run(each, operands)
            assert operands.error(cupy, operands.expected()) <= 2e-3


@pytest.mark.parametrize("candidates", [Candidates.BEST, Candidates.LEGACY])
@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_a_plan_is_captured_and_replayed(cupy, operation, candidates):
    problem = replace(PROBLEM, operation=operation, batch=16)
    operands, other = Operands.random(cupy, problem), Operands.random(cupy, replace(problem, batch=64))
    each = handle(candidates, workspace_limit="2MiB")
    run(each, operands)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        operands.poison()
        stream.synchronize()
    graph = captured(stream, lambda: run(each, operands))
    with stream:
        run(each, other)  # may need a larger workspace, but the graph's must stay
    cupy.cuda.Device().synchronize()
    for _ in range(2):
        operands.poison()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert operands.error(cupy, operands.expected()) <= tolerance(problem)


def test_the_first_call_that_adds_may_be_captured(cupy):
    """Its plan is built in the capture, where cuDNN may compile and load: it does for most groups of 16 bits."""
    problem = replace(
        PROBLEM, operation=Operation.BACKWARD_FILTER, batch=16, filters=32, groups=32, dtype=DataType.BFLOAT16,
        layout=Layout.NHWC,
    )  # fmt: skip
    operands = Operands.random(cupy, problem)
    each = handle(Candidates.GRAPH, policy="undivided", workspace_limit="64MiB")
    run(each, operands)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        operands.restore(cupy)
        stream.synchronize()
    graph = captured(stream, lambda: run(each, operands, beta=1.0))
    with stream:
        operands.restore(cupy)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert operands.error(cupy, operands.expected(1.0, 1.0)) <= tolerance(problem)


def test_planning_in_a_capture_is_refused_and_harmless(cupy):
    operands = Operands.random(cupy, replace(PROBLEM, channels=24))
    each = handle()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(BackendError, match="while a CUDA graph is captured"):
            run(each, operands)
        stream.end_capture()
    run(each, operands)
    assert operands.error(cupy, operands.expected()) <= tolerance(operands.problem)


@ALONE
def test_a_recurring_call_allocates_nothing(cupy):
    operands = Operands.random(cupy, replace(PROBLEM, batch=64))
    each = handle(workspace_limit="4MiB")
    run(each, operands)
    pool = cupy.get_default_memory_pool()
    free, _ = cupy.cuda.runtime.memGetInfo()
    before = pool.used_bytes(), pool.total_bytes(), free
    for _ in range(50):
        run(each, operands)
    cupy.cuda.Device().synchronize()
    free, _ = cupy.cuda.runtime.memGetInfo()
    assert (pool.used_bytes(), pool.total_bytes(), free) == before


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_an_algorithm_that_fails_is_replaced(cupy, caplog, operation, beta):
    problem = replace(PROBLEM, operation=operation, batch=16)
    operands = Operands.random(cupy, problem)
    each = handle()
    each.get_algorithm(problem)
    each.optimize()
    entry = entry_of(each, problem)
    good = entry.decision.configuration.parts[0]
    missing = MicroConfiguration(size=4, algorithm="eng999_k1=1", time_ms=1.0, workspace_bytes=0)
    entry.decide(Decision(kernel=entry.kernel, configuration=configuration_of([missing] * 4), undivided=None))
    entry.limit_bytes = 2**26
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            operands.restore(cupy)
            run(each, operands, beta=beta)
            assert operands.error(cupy, operands.expected(beta=beta)) <= tolerance(problem)
    assert sum("eng999_k1=1 failed" in record.message for record in caplog.records) == 1
    assert entry.decision.configuration.parts[0].algorithm != "eng999_k1=1"
    assert good.workspace_bytes <= 2**26


@ALONE
def test_a_full_gpu_gets_smaller_plans(cupy, caplog):
    problem = replace(load_network("alexnet", 256).layers[1].forward, batch=256)
    operands = Operands.random(cupy, problem)
    expected = operands.expected()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    free, _ = cupy.cuda.runtime.memGetInfo()
    ballast = cupy.cuda.memory.Memory(free - 420 * 2**20)
    try:
        each = handle(workspace_limit="4GiB")
        operands.poison()
        run(each, operands)
        cupy.cuda.Device().synchronize()
    finally:
        del ballast
    assert operands.error(cupy, expected) <= tolerance(problem)
    pool.free_all_blocks()


def test_types_that_do_not_fit_their_addresses(cupy):
    operands = Operands.random(cupy, PROBLEM)
    x, w, y = operands.addresses()
    with pytest.raises(InvalidProblemError, match="aligned to 2 bytes cannot hold float32"):
        handle().convolve(operands.problem, x + 2, w, y)


@ALONE
def test_benchmarks_give_their_memory_back(cupy):
    problem = replace(load_network("alexnet", 256).layers[1].forward, operation=Operation.BACKWARD_DATA)
    each = handle(workspace_limit="1GiB")
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before, _ = cupy.cuda.runtime.memGetInfo()
    each.get_algorithm(problem)
    each.optimize()
    cupy.cuda.Device().synchronize()
    after, _ = cupy.cuda.runtime.memGetInfo()
    # Kernels and their constants stay loaded; operands (more than 160 MiB) and workspaces (up to 1 GiB) do not.
    assert before - after < 128 * 2**20
    assert each.workspace_bytes == 0


def test_divided_workspace_on_streams_that_are_gone(cupy):
    each = handle(total_workspace="32MiB")
    problems = [replace(PROBLEM, operation=operation, batch=64) for operation in Operation]
    all_operands = [Operands.random(cupy, problem) for problem in problems]
    for problem in problems:
        each.get_algorithm(problem)
    for turn in range(4):
        for operands in all_operands:
            with cupy.cuda.Stream(non_blocking=turn % 2 == 0):
                operands.poison()
                run(each, operands)
    late = Operands.random(cupy, replace(PROBLEM, batch=48))  # a new division while the old one may be in use
    with cupy.cuda.Stream(non_blocking=True):
        run(each, late)
    cupy.cuda.Device().synchronize()
    for operands in (*all_operands, late):
        assert operands.error(cupy, operands.expected()) <= tolerance(operands.problem)
    assert 0 <= each.workspace_bytes <= 32 * 2**20


def test_threads_with_streams_of_their_own(cupy):
    each = handle(Candidates.LEGACY, workspace_limit="512MiB")
    problem = load_network("alexnet", 64).layers[1].forward
    all_operands = [Operands.random(cupy, problem) for _ in range(3)]
    run(each, all_operands[0])
    queues = []

    def work(operands):
        with cupy.cuda.Stream.ptds:
            for _ in range(5):
                operands.poison()
                run(each, operands)
            queues.append(each.backend.queue())
            cupy.cuda.Stream.ptds.synchronize()

    threads = [threading.Thread(target=work, args=(operands,)) for operands in all_operands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(queues)) == 3, "each thread's stream is a queue of its own"
    for operands in all_operands:
        assert operands.error(cupy, operands.expected()) <= tolerance(problem)


def test_a_pinned_stream_is_measured_and_used(cupy):
    from ucudnn.backends import open_backend

    backend = open_backend("cudnn")
    stream = cupy.cuda.Stream(non_blocking=True)
    backend.set_stream(stream.ptr)
    each = ucudnn.Handle(backend=backend, effort=QUICK, workspace_limit="8MiB")
    operands = Operands.random(cupy, replace(PROBLEM, batch=32))
    operands.poison()
    cupy.cuda.Device().synchronize()
    run(each, operands)
    stream.synchronize()
    assert operands.error(cupy, operands.expected()) <= tolerance(operands.problem)
    (entry,) = each._entries.values()
    assert entry.decision.configuration.time_ms > 1e-3  # a time of the stream, not of an empty interval


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_many_scalings_of_one_legacy_call(cupy, operation):
    operands = Operands.random(cupy, replace(PROBLEM, operation=operation, batch=2))
    each = handle(Candidates.LEGACY)
    for step in range(70):  # more than are kept
        alpha, beta = 1 + step / 100, step / 50
        operands.restore(cupy)
        run(each, operands, alpha, beta)
        if step > 60 or step % 16 == 15:
            assert operands.error(cupy, operands.expected(alpha, beta)) <= tolerance(operands.problem)


def test_a_temporary_array_is_not_overwritten_by_the_workspace(cupy):
    problem = replace(load_network("alexnet", 64).layers[2].forward, batch=64)
    operands = Operands.random(cupy, problem)
    expected = operands.expected()
    cupy.get_default_memory_pool().free_all_blocks()
    x = operands.memory.pop("x")
    host = x.get()
    del x
    each = handle(Candidates.LEGACY, workspace_limit="1GiB")
    each.convolve(problem, cupy.asarray(host), operands.memory["w"], operands.memory["y"])
    cupy.cuda.Device().synchronize()
    assert operands.error(cupy, expected) <= tolerance(problem)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("shape", [(64, 3), (56, 1), (9, 5)])
def test_leading_names_are_the_first_ones(cudnn, operation, shape):
    side, taps = shape
    size = {"spatial": (side, side), "kernel": (taps, taps), "padding": (taps // 2, taps // 2)}
    for changes in ({}, {"dtype": DataType.BFLOAT16}, {"math": MathMode.FMA}, {"deterministic": True}):
        problem = ConvolutionProblem(operation=operation, batch=24, channels=32, filters=48, **size, **changes)
        leading = list(cudnn.leading(problem, 3))
        call = cudnn.prepare(problem, leading[0].name)
        assert call.workspace_bytes <= leading[0].workspace_bytes
        assert leading == list(cudnn.algorithms(problem))[:3]
        assert leading == list(cudnn.leading(problem, 3)), "the list is made now"


def test_names_compute_other_sizes_than_they_were_offered_at(cupy, cudnn):
    problem = replace(PROBLEM, batch=64, operation=Operation.BACKWARD_FILTER)
    names = cudnn.names(problem, (1, 4, 16, 64))
    part = problem.part(23)
    found = [cudnn.algorithm(part, name) for name in names]
    assert sum(each is not None for each in found) > len(names) // 2
    listed = {each.name: each for each in cudnn.algorithms(part)}
    for each in found:
        if each is not None and each.name in listed:
            assert each == listed[each.name]
