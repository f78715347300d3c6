"""Every candidate algorithm against a float64 reference: poisoned outputs, guarded workspaces, fresh numbers."""

from dataclasses import replace

import pytest

from tests.support.gpu import MODES, SHAPES, Guarded, Operands, measured, tolerance
from tests.support.problems import LAYOUTS
from ucudnn.backends.base import Scaling
from ucudnn.backends.cudnn.algorithms.legacy_call import HALF
from ucudnn.errors import BackendError
from ucudnn.networks.tables import load_network
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation

SCALINGS = [(1.0, 0.0), (1.0, 1.0), (-0.75, 0.5)]


def wrong(cupy, cudnn, problem, algorithm, operands, alpha, beta, expected):
    """Run one algorithm; return its fault, '' if it has none, or None if cuDNN cannot run it."""
    operands.prepare(cupy, beta)
    guarded = Guarded(cupy, cudnn, algorithm.workspace_bytes, offset=256)
    try:
        call = cudnn.prepare(problem, algorithm.name)
        cudnn.queue()
        call.launch(*operands.addresses(), guarded.buffer, scaling=Scaling(alpha, beta))
    except BackendError:
        return None  # the benchmark drops it too
    error = operands.error(cupy, expected)
    if not guarded.intact():
        return f"{algorithm.name} wrote outside of its {algorithm.workspace_bytes} bytes of workspace"
    if not error <= tolerance(problem, algorithm.name):
        return f"{algorithm.name} is {error:.2e} off with alpha {alpha} and beta {beta}"
    return ""


def check(cupy, cudnn, problem, scalings):
    algorithms = measured(cudnn, problem)
    operands = Operands.random(cupy, problem)
    found = []
    for alpha, beta in scalings:
        expected = operands.expected(alpha, beta)
        found += [wrong(cupy, cudnn, problem, each, operands, alpha, beta, expected) for each in algorithms]
    assert [each for each in found if each] == []
    assert "" in found, "nothing ran"


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(("dtype", "math"), MODES, ids=lambda each: each.value)
def test_grid(cupy, cudnn, operation, shape, last, dtype, math):
    values = SHAPES[shape]
    layout = LAYOUTS[len(values["spatial"])][last]
    problem = ConvolutionProblem(operation=operation, batch=3, dtype=dtype, math=math, layout=layout, **values)
    try:
        cudnn.algorithms(problem)
    except BackendError:
        pytest.skip("cuDNN has no algorithm")
    check(cupy, cudnn, problem, SCALINGS)


def test_legacy_algorithms_that_sum_in_16_bits_are_among_those_that_are_exact_enough(cupy, cudnn):
    ran = set()
    for operation in Operation:
        problem = ConvolutionProblem(operation=operation, batch=2, dtype=DataType.FLOAT16, **SHAPES["2-D"])
        halves = [each for each in measured(cudnn, problem) if each.name.endswith(HALF)]
        assert all("REDUCED_PRECISION_REDUCTION" in each.notes for each in halves)
        operands = Operands.random(cupy, problem)
        for alpha, beta in SCALINGS:
            expected = operands.expected(alpha, beta)
            found = {each.name: wrong(cupy, cudnn, problem, each, operands, alpha, beta, expected) for each in halves}
            assert [each for each in found.values() if each] == []
            ran.update(name for name, fault in found.items() if fault == "")
    assert ran, "no algorithm summed in 16 bits"


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize("dtype", DataType, ids=lambda each: each.value)
def test_batch_strides_wider_than_dense(cupy, cudnn, operation, dtype):
    problem = ConvolutionProblem(operation=operation, batch=5, dtype=dtype, **SHAPES["2-D"])
    wide = replace(problem, x_batch_stride=problem.x_sample + 64, y_batch_stride=problem.y_sample + 32)
    operands = Operands.random(cupy, wide)
    gap = operands.memory[operands.written][:, -32:].copy() if operands.written != "w" else None
    check(cupy, cudnn, wide, [(1.0, 0.0)])
    if gap is not None:
        assert (operands.memory[operands.written][:, -32:] == gap).all()


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_deterministic_algorithms_repeat_to_the_bit(cupy, cudnn, operation):
    free = load_network("alexnet", 32).layers[2].forward.with_operation(operation)
    problem = replace(free, deterministic=True)
    assert {each.name for each in cudnn.algorithms(problem)} <= {each.name for each in cudnn.algorithms(free)}
    operands = Operands.random(cupy, problem)
    for algorithm in cudnn.algorithms(problem):
        workspace = cudnn.allocate(algorithm.workspace_bytes)
        results = []
        try:
            call = cudnn.prepare(problem, algorithm.name)
            for _ in range(3):
                operands.poison()
                call.launch(*operands.addresses(), workspace)
                results.append(operands.result(cupy))
        except BackendError:
            continue
        assert all((result == results[0]).all() for result in results[1:]), algorithm.name


@pytest.mark.parametrize("math", MathMode, ids=lambda each: each.value)
@pytest.mark.parametrize(
    "kernel",
    [*load_network("alexnet").kernels(), *load_network("resnet18").kernels()],
    ids=lambda kernel: f"{kernel.layer}-{kernel.problem.operation.value}-{kernel.problem.batch}",
)
def test_every_algorithm_of_networks(cupy, cudnn, kernel, math):
    check(cupy, cudnn, replace(kernel.problem, math=math), [(1.0, 0.0)])
    cupy.get_default_memory_pool().free_all_blocks()
