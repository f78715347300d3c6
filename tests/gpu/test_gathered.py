"""Gathered calls on a GPU: in micro-batches, in at most a quarter of the workspace, and in captures."""

import pytest

from tests.support.gpu import Operands, captured, measured, micro, open_or_skip, tolerance
from ucudnn.backends.base import Scaling
from ucudnn.backends.candidates import GATHERED, Candidates
from ucudnn.configuration import Configuration
from ucudnn.errors import StepError
from ucudnn.execution.plan import make_plan
from ucudnn.networks.tables import load_network
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation

MODES = [
    *[(dtype, MathMode.TF32) for dtype in (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)],
    *[(dtype, MathMode.FMA) for dtype in (DataType.FLOAT32, DataType.FLOAT64)],
]
SHAPES = {
    "pointwise": dict(channels=64, spatial=(28, 28), filters=96, kernel=(1, 1), stride=(2, 2)),
    "odd": dict(channels=64, spatial=(28, 27), filters=96, kernel=(1, 1), stride=(2, 3)),
    "in one dimension": dict(channels=16, spatial=(20, 22), filters=32, kernel=(3, 1), padding=(1, 0), stride=(2, 2)),
    "1-D": dict(channels=16, spatial=(98,), filters=32, kernel=(1,), stride=(2,)),
    "3-D": dict(channels=16, spatial=(8, 9, 10), filters=32, kernel=(1, 1, 1), stride=(2, 2, 2)),
    "grouped": dict(channels=32, spatial=(16, 14), filters=64, kernel=(1, 1), stride=(2, 2), groups=2),
}


@pytest.fixture
def cudnn():
    """Return cuDNN with the candidates of PyTorch's convolutions."""
    return open_or_skip(Candidates.GRAPH)


def gathered_plans(cudnn, problem, size):
    """Return plans of micro-batches of one size, one for each algorithm that convolves a copy and can be measured."""
    for each in measured(cudnn, problem, size):
        if each.name.endswith(GATHERED):
            parts = (micro(size, each),) * (problem.batch // size)
            yield each, make_plan(problem, Configuration(parts=parts), cudnn)


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
@pytest.mark.parametrize(("dtype", "math"), MODES, ids=lambda each: each.value)
@pytest.mark.parametrize("shape", SHAPES)
def test_micro_batches_of_copies(cupy, cudnn, shape, dtype, math, operation):
    problem = ConvolutionProblem(operation=operation, batch=12, dtype=dtype, math=math, **SHAPES[shape])
    plans = list(gathered_plans(cudnn, problem, 4))
    assert plans or dtype is DataType.FLOAT64
    operands = Operands.random(cupy, problem)
    for beta in (0.0, 1.0):
        expected = operands.expected(1.0, beta)
        for each, plan in plans:
            operands.prepare(cupy, beta)
            workspace = cudnn.allocate(plan.workspace_bytes)
            cudnn.queue()
            try:
                plan.launch(*operands.addresses(), workspace, Scaling(1.0, beta))
            except StepError as error:
                if beta and "NOT_SUPPORTED" in str(error):
                    continue  # some engines only overwrite
                raise
            parts = 3**0.5 if dtype.has_16_bits else 1  # each part of a filter gradient is rounded
            assert operands.error(cupy, expected) <= parts * tolerance(problem, each.name), (each.name, beta)


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_copies_are_replayed_in_graphs(cupy, cudnn, operation):
    problem = ConvolutionProblem(operation=operation, batch=12, **SHAPES["pointwise"])
    each, plan = next(gathered_plans(cudnn, problem, 4))
    operands = Operands.random(cupy, problem)
    expected = operands.expected(1.0, 0.0)
    workspace, stream = cudnn.allocate(plan.workspace_bytes), cupy.cuda.Stream(non_blocking=True)

    def launch():
        cudnn.queue()
        plan.launch(*operands.addresses(), workspace)

    with stream:
        launch()
    graph = captured(stream, launch)
    with stream:
        operands.poison()
        graph.launch(stream)
        stream.synchronize()
    cudnn.queue()
    assert operands.error(cupy, expected) <= tolerance(problem, each.name)


@pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)
def test_copies_need_a_quarter_of_the_workspace(cudnn, operation):
    kernels = [kernel for kernel in load_network("resnet50", 256).kernels() if kernel.layer == "l2.0.down"]
    (layer,) = [kernel.problem for kernel in kernels if kernel.problem.operation is operation]
    found = cudnn.algorithms(layer)
    copies = [each for each in found if each.name.endswith(GATHERED) and "TENSOR_CORE" in each.notes]
    plain = [each for each in found if "GATHERED" not in each.notes and "TENSOR_CORE" in each.notes]
    least = min(each.workspace_bytes for each in copies)
    assert least >= 256 * 256 * 28 * 28 * 4
    assert all(not each.workspace_bytes or each.workspace_bytes >= 3.5 * least for each in plain)
    assert not [each for each in open_or_skip(Candidates.GRAPH_PLAIN).algorithms(layer) if "GATHERED" in each.notes]
