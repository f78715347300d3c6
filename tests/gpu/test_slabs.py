"""Slabs on a GPU: every algorithm on every kind of slab compared with float64, and handles that need slabs."""

from dataclasses import replace
from math import sqrt

import pytest

import ucudnn
from tests.support.gpu import MODES, QUICK, SHAPES, Guarded, Operands, open_or_skip, tolerance
from tests.support.problems import LAYOUTS
from ucudnn.backends.base import Scaling
from ucudnn.backends.candidates import Candidates
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError
from ucudnn.execution.plan import make_plan
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.slabs import is_divisible, row_count, row_unit, slabs_by_problem


def offers(cudnn, problem, size, rows):
    """Return for each kind of slab its slabs, and by name the algorithms that the benchmark measures."""
    found = []
    with cudnn.bench(problem) as bench:
        for part, slabs in slabs_by_problem(problem.part(size), rows):
            usable = {
                each.name: each
                for each in cudnn.algorithms(part)
                if bench.measure(size, each, QUICK, slabs=slabs).measured
            }
            found.append((slabs, usable))
    return found


def configurations(cudnn, problem, rows):
    """Return for every algorithm a configuration in slabs; others compute the slabs that it cannot."""
    try:
        found = offers(cudnn, problem, 1, rows)
    except BackendError:
        return {}
    if not all(usable for _, usable in found):
        return {}
    made = {}
    for name in {name for _, usable in found for name in usable}:
        slabs = [
            SlabConfiguration(slab=slab, algorithm=chosen.name, time_ms=1.0, workspace_bytes=chosen.workspace_bytes)
            for own, usable in found
            for chosen in [usable.get(name) or next(iter(usable.values()))]
            for slab in own
        ]
        part = MicroConfiguration.of_slabs(1, sorted(slabs, key=lambda each: each.slab))
        made[name] = Configuration(parts=(part,) * problem.batch)
    return made


def error_of(cupy, cudnn, configuration, operands, beta, expected):
    """Return the error of a configuration, infinity if it writes outside of its workspace."""
    operands.prepare(cupy, beta)
    guarded = Guarded(cupy, cudnn, configuration.workspace_bytes, offset=256)
    plan = make_plan(operands.problem, configuration, cudnn)
    cudnn.queue()
    plan.launch(*operands.addresses(), guarded.buffer, Scaling(0.75, beta))
    return operands.error(cupy, expected) if guarded.intact() else float("inf")


def bound(problem, name, rows):
    """Return the tolerance of a result; filter gradients of 16 bits are rounded after each slab."""
    allowed = tolerance(problem, name)
    if problem.operation is not Operation.BACKWARD_FILTER or problem.dtype.itemsize > 2:
        return allowed
    unit = {DataType.FLOAT16: 2**-11, DataType.BFLOAT16: 2**-8}[problem.dtype]
    return allowed + unit / 2 * sqrt(problem.batch * -(-row_count(problem) // rows))


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(("dtype", "math"), MODES, ids=lambda each: each.value)
def test_every_algorithm_on_every_kind_of_slab(cupy, cudnn, operation, shape, last, dtype, math):
    layout = LAYOUTS[len(SHAPES[shape]["spatial"])][last]
    problem = ConvolutionProblem(operation=operation, batch=2, dtype=dtype, math=math, layout=layout, **SHAPES[shape])
    if not is_divisible(problem):
        pytest.skip("nothing to divide")
    operands = Operands.random(cupy, problem)
    wrong, ran = [], 0
    unit = row_unit(problem)
    for rows in {unit, -(-row_count(problem) // 3 // unit) * unit}:
        for name, configuration in configurations(cudnn, problem, rows).items():
            for beta in (0.0, 1.0):
                expected = operands.expected(0.75, beta)
                try:
                    error = error_of(cupy, cudnn, configuration, operands, beta, expected)
                except BackendError:
                    continue  # a handle drops it too
                ran += 1
                if not error <= bound(problem, name, rows):
                    wrong.append((name, rows, beta, error))
    assert wrong == []
    if not ran:
        pytest.skip("cuDNN has no algorithm for these slabs")


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16], ids=lambda each: each.value)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_a_volume_within_limits(cupy, operation, dtype, last):
    problem = ConvolutionProblem(
        operation=operation,
        batch=1,
        channels=32,
        spatial=(32, 48, 48),
        filters=64,
        kernel=(3, 3, 3),
        padding=(1, 1, 1),
        dtype=dtype,
        layout=LAYOUTS[3][last],
    )
    operands = Operands.random(cupy, problem)
    expected = operands.expected()
    for limit in (2 << 20, 8 << 20):
        each = ucudnn.Handle(backend=open_or_skip(Candidates.GRAPH), workspace_limit=limit, effort=QUICK)
        operands.poison()
        each.convolve(problem, *operands.addresses())
        (kernel,) = each.report().kernels
        assert operands.error(cupy, expected) <= tolerance(problem), kernel.configuration
        assert each.workspace_bytes <= limit
        # Within the smaller limit, an engine without workspace computes float32 undivided, and faster than slabs.
        undivided = dtype is DataType.FLOAT32 and limit < 8 << 20
        assert last or undivided or each._benchmark._findings._divisions, "slabs were measured"
        plain = ucudnn.Handle(backend=open_or_skip(Candidates.GRAPH), workspace_limit=limit, effort=QUICK, slabs=False)
        operands.poison()
        plain.convolve(replace(problem), *operands.addresses())
        assert operands.error(cupy, expected) <= tolerance(problem)
