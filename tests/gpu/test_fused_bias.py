"""Forward with a bias on a GPU: engines that add it themselves, and algorithms with a kernel behind that adds it."""

from dataclasses import replace

import numpy as np
import pytest

import ucudnn
from tests.support.gpu import QUICK, SHAPES, Guarded, Operands, element_type, measured, micro, open_or_skip, tolerance
from ucudnn.arrays import BiasedFilters
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.configuration import Configuration
from ucudnn.execution.plan import make_plan
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation

MODES = [
    *[(dtype, MathMode.TF32) for dtype in (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)],
    (DataType.FLOAT32, MathMode.FMA),
    (DataType.FLOAT64, MathMode.FMA),
]
CASES = ["2-D", "pointwise", "grouped", "depth-wise", "3-D"]


@pytest.fixture
def cudnn():
    """Return cuDNN with the engines of the graph API."""
    return open_or_skip(Candidates.GRAPH)


def biased(shape, last, dtype, math):
    dimensions = len(SHAPES[shape]["spatial"])
    layout = (Layout.NHWC if dimensions == 2 else Layout.NDHWC) if last else Layout.channels_first(dimensions)
    shapes = {**SHAPES[shape], "layout": layout, "dtype": dtype, "math": math}
    return ConvolutionProblem(operation=Operation.FORWARD, batch=12, biased=True, **shapes)


def bias_for(cupy, problem):
    """Return a bias that is far from zero, with the same numbers in float64."""
    host = np.random.default_rng(9).uniform(-4, 4, problem.filters).astype(element_type(problem.dtype))
    return cupy.asarray(host), cupy.asarray(host.astype(np.float64)).reshape(-1, *[1] * len(problem.spatial))


@pytest.mark.parametrize(("dtype", "math"), MODES, ids=lambda each: each.value)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("shape", CASES)
def test_each_algorithm_adds_it_in_micro_batches(cupy, cudnn, shape, last, dtype, math):
    problem = biased(shape, last, dtype, math)
    operands = Operands.random(cupy, problem)
    bias, exact = bias_for(cupy, problem)
    expected = operands.expected() + exact
    x, w, y = operands.addresses()
    algorithms = measured(cudnn, problem, 4)
    assert any(each.name.endswith(ADDED) for each in algorithms)
    for each in algorithms:
        plan = make_plan(problem, Configuration(parts=(micro(4, each),) * 3), cudnn)
        operands.poison()
        workspace = Guarded(cupy, cudnn, plan.workspace_bytes)
        plan.launch(x, BiasedFilters(w, bias.data.ptr), y, workspace.buffer)
        assert operands.error(cupy, expected) < tolerance(problem), each.name
        assert workspace.intact(), each.name


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16], ids=lambda each: each.value)
def test_some_engines_add_it_themselves(cupy, cudnn, dtype):
    problem = biased("2-D", True, dtype, MathMode.TF32)
    fused = [each for each in measured(cudnn, problem, 12) if not each.name.endswith(ADDED)]
    assert fused
    operands = Operands.random(cupy, problem)
    bias, exact = bias_for(cupy, problem)
    x, w, y = operands.addresses()
    call = cudnn.prepare(problem, fused[0].name)
    operands.poison()
    call.launch(x, BiasedFilters(w, bias.data.ptr), y, cudnn.allocate(fused[0].workspace_bytes))
    with_bias = operands.error(cupy, operands.expected() + exact)
    without = operands.error(cupy, operands.expected())
    assert with_bias < tolerance(problem) < 0.1 < without


@pytest.mark.parametrize("policy", ["undivided", "powerOfTwo"])
def test_a_handle_adds_a_bias_within_its_limit(cupy, policy):
    problem = replace(biased("2-D", False, DataType.FLOAT32, MathMode.TF32), biased=False)
    operands = Operands.random(cupy, problem)
    bias, exact = bias_for(cupy, problem)
    x, w, y = (operands.views[name] for name in "xwy")
    backend = open_or_skip(Candidates.BEST)
    with ucudnn.Handle(backend=backend, effort=QUICK, policy=policy, workspace_limit="1MiB") as handle:
        for _ in range(2):
            operands.poison()
            handle.forward(x, w, y, bias=bias, padding=problem.padding)
            assert operands.error(cupy, operands.expected() + exact) < tolerance(problem)
        operands.poison()
        handle.forward(x, w, y, bias=bias, padding=problem.padding, alpha=0.5)
        assert operands.error(cupy, operands.expected(0.5) + exact) < tolerance(problem)
        assert all(each.kernel.problem.biased for each in handle.saved_plans())
        assert handle.workspace_bytes <= 1 << 20
