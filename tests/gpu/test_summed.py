"""Filter gradients of 16 bits in many parts on a GPU: a float32 sum has the error of the undivided kernel."""

from contextlib import suppress
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest

import ucudnn
from tests.support.gpu import QUICK, Guarded, Operands, captured, measured, micro, open_or_skip
from ucudnn.backends.base import Scaling
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.summed import FLOAT32, ROUNDED, WIDENED
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import StepError
from ucudnn.execution.plan import make_plan
from ucudnn.planning.decision import Decision
from ucudnn.planning.float32_sums import rounds_often, summed
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation
from ucudnn.slabs import slabs_by_problem

SHARE = {FLOAT32: 1.1, WIDENED: 1.1, ROUNDED: 1.6}
"""The largest error, divided by that of the undivided kernel. Parts that are rounded add up to 1.4, see `summed`."""

SCALINGS = [(1.0, 0.0), (1.0, 1.0), (-0.75, 0.5)]
TYPES = [DataType.FLOAT16, DataType.BFLOAT16]


def gradient(dtype, layout=Layout.NCHW, batch=64):
    return ConvolutionProblem(
        operation=Operation.BACKWARD_FILTER,
        batch=batch,
        channels=32,
        spatial=(14, 14),
        filters=48,
        kernel=(3, 3),
        padding=(1, 1),
        dtype=dtype,
        layout=layout,
    )


@pytest.fixture
def cudnn():
    return open_or_skip(Candidates.BEST)


def divided(cudnn, problem, size, algorithm, *, with_sum):
    total = cudnn.float32_sum(problem) if with_sum else None
    return Configuration(parts=(micro(size, algorithm),) * (problem.batch // size), float32_sum=total)


def end_of(name):
    (end,) = (each for each in SHARE if each in name)
    return end


def error_of(cupy, cudnn, configuration, operands, alpha, beta):
    """Launch a plan on a poisoned output and workspace, and return its error."""
    operands.prepare(cupy, beta)
    plan = make_plan(operands.problem, configuration, cudnn)
    assert len(plan.steps) == len(configuration.parts)
    guarded = Guarded(cupy, cudnn, plan.workspace_bytes, offset=256)
    cudnn.queue()
    plan.launch(*operands.addresses(), guarded.buffer, Scaling(alpha, beta))
    found = operands.error(cupy, operands.expected(alpha, beta))
    assert guarded.intact(), configuration
    return found


def undivided_errors(cupy, cudnn, operands):
    """Return the error of the undivided kernel for each alpha and beta.

    It is that of the most promising algorithm that takes all of them; some engines of cuDNN do not.
    """
    problem = operands.problem
    for each in measured(cudnn, problem, problem.batch):
        whole = divided(cudnn, problem, problem.batch, each, with_sum=False)
        with suppress(StepError):
            return {scaling: error_of(cupy, cudnn, whole, operands, *scaling) for scaling in SCALINGS}
    raise AssertionError("no algorithm computes the undivided kernel")


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC], ids=lambda each: each.value)
@pytest.mark.parametrize("count", [2, 4, 16, 64])
def test_parts_have_the_error_of_the_undivided_kernel(cupy, cudnn, dtype, layout, count):
    problem = gradient(dtype, layout)
    assert cudnn.float32_sum(problem) is not None
    operands = Operands.random(cupy, problem)
    undivided = undivided_errors(cupy, cudnn, operands)
    size = problem.batch // count
    algorithms = measured(cudnn, summed(problem), size)
    kinds = {end_of(each.name) for each in algorithms}
    assert {WIDENED, ROUNDED} <= kinds, "FLOAT32 depends on the version of cuDNN"
    for each in algorithms:
        parts = divided(cudnn, problem, size, each, with_sum=True)
        for scaling in SCALINGS:
            found = error_of(cupy, cudnn, parts, operands, *scaling)
            assert found <= SHARE[end_of(each.name)] * undivided[scaling], (each.name, scaling, kinds)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
def test_parts_that_round_the_output_have_larger_errors(cupy, cudnn, dtype):
    """So that the tests above can fail."""
    problem = gradient(dtype)
    operands = Operands.random(cupy, problem)
    (own, *_) = undivided_errors(cupy, cudnn, operands).values()
    each = measured(cudnn, problem, 2)[0]
    assert error_of(cupy, cudnn, divided(cudnn, problem, 2, each, with_sum=False), operands, 1.0, 0.0) > 1.3 * own


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@pytest.mark.parametrize("count", [2, 64])
def test_a_handle_launches_a_sum_and_a_graph_replays_it(cupy, cudnn, dtype, count):
    problem = gradient(dtype)
    operands = Operands.random(cupy, problem)
    undivided = undivided_errors(cupy, cudnn, operands)
    handle = ucudnn.Handle(backend=cudnn, effort=QUICK, workspace_limit="64MiB")
    handle.convolve(problem, *operands.addresses())
    (entry,) = handle._entries.values()
    size = problem.batch // count
    each = next(one for one in measured(cudnn, summed(problem), size) if one.name.endswith(WIDENED))
    parts = divided(cudnn, problem, size, each, with_sum=True)
    entry.decide(Decision(kernel=entry.kernel, configuration=parts, undivided=None))
    for alpha, beta in SCALINGS:
        operands.prepare(cupy, beta)
        handle.convolve(problem, *operands.addresses(), alpha=alpha, beta=beta)
        found = operands.error(cupy, operands.expected(alpha, beta))
        assert found <= SHARE[WIDENED] * undivided[alpha, beta]
    (kernel,) = handle.report().kernels
    assert kernel.configuration == str(parts)
    assert kernel.configuration.endswith(", summed in float32")
    assert kernel.replaced == ()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        handle.convolve(problem, *operands.addresses())
    graph = captured(stream, lambda: handle.convolve(problem, *operands.addresses()))
    with stream:
        operands.poison()
        graph.launch()
        stream.synchronize()
    assert operands.error(cupy, operands.expected()) <= SHARE[WIDENED] * undivided[1.0, 0.0]


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@pytest.mark.parametrize("limits", [{"workspace_limit": "1MiB"}, {"total_workspace": "1MiB"}], ids=["WR", "WD"])
def test_what_a_handle_chooses_rounds_once_or_a_limited_number_of_times(cupy, cudnn, dtype, limits):
    problem = gradient(dtype, batch=256)
    operands = Operands.random(cupy, problem)
    undivided = undivided_errors(cupy, cudnn, operands)
    handle = ucudnn.Handle(backend=cudnn, effort=QUICK, policy="powerOfTwo", **limits)
    operands.poison()
    handle.convolve(problem, *operands.addresses())
    (entry,) = handle._entries.values()
    configuration = entry.decision.configuration
    assert configuration.workspace_bytes <= 2**20
    assert configuration.float32_sum is not None or configuration.calls <= 32
    share = configuration.calls**0.5 if rounds_often(configuration) else max(SHARE.values())
    assert operands.error(cupy, operands.expected()) <= max(share, 1.1) * undivided[1.0, 0.0], str(configuration)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@pytest.mark.parametrize("count", [2, 16, 64])
def test_gradients_of_pytorch_have_the_error_of_the_undivided_kernel(torch_gpu, count, dtype):
    import ucudnn.torch

    torch = torch_gpu
    torch.manual_seed(count)
    theirs = {DataType.FLOAT16: torch.float16, DataType.BFLOAT16: torch.bfloat16}[dtype]
    x, out = ((torch.rand(64, each, 14, 14, device="cuda") - 0.5).to(theirs) for each in (32, 48))
    w = (torch.rand(48, 32, 3, 3, device="cuda") - 0.5).to(theirs)
    exact = torch.nn.grad.conv2d_weight(x.double(), w.shape, out.double(), padding=1)

    def gradient_of():
        weight = w.float().requires_grad_()
        with torch.autocast("cuda", dtype=theirs):
            torch.nn.functional.conv2d(x, weight, padding=1).backward(out)
        return weight.grad.double()

    def error():
        return float(torch.linalg.norm(gradient_of() - exact) / torch.linalg.norm(exact))

    with ucudnn.torch.enable(workspace_limit="256MiB", policy="undivided", effort=QUICK):
        own = error()
    with ucudnn.torch.enable(workspace_limit="256MiB", effort=QUICK, strict=True) as on:
        gradient_of()
        (handle,) = on._interceptor.handles().values()
        (entry,) = (
            each for each in handle._entries.values() if each.kernel.problem.operation is Operation.BACKWARD_FILTER
        )
        problem, backend = entry.kernel.problem, handle.backend
        size = problem.batch // count
        each = next(one for one in measured(backend, summed(problem), size) if one.name.endswith(WIDENED))
        parts = divided(backend, problem, size, each, with_sum=True)
        entry.decide(replace(entry.decision, configuration=parts))
        for _ in range(3):  # launched, bound, and launched as bound
            assert error() <= SHARE[WIDENED] * own
        (row,) = (each for each in on.report().layers if each.operation == "BackwardFilter")
        assert row.configuration == str(parts)
        assert on.report().left == {}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
def test_slabs_of_one_sample_have_the_error_of_the_undivided_kernel(cupy, cudnn, dtype):
    problem = replace(gradient(dtype, Layout.NHWC, batch=1), spatial=(64, 32), x_batch_stride=0, y_batch_stride=0)
    operands = Operands.random(cupy, problem)
    undivided = undivided_errors(cupy, cudnn, operands)
    asked = summed(problem)
    slabs = []
    for piece, same in slabs_by_problem(asked, 4):
        with cudnn.bench(asked) as bench:
            each = next(
                one
                for one in cudnn.algorithms(piece)
                if one.name.endswith(WIDENED) and bench.measure(1, one, QUICK, slabs=same).measured
            )
        slabs += [micro(1, each).on(slab) for slab in same]
    part = MicroConfiguration.of_slabs(1, sorted(slabs, key=lambda one: one.slab))
    configuration = Configuration(parts=(part,), float32_sum=cudnn.float32_sum(problem))
    assert configuration.calls == 16
    operands.poison()
    plan = make_plan(problem, configuration, cudnn)
    cudnn.queue()
    plan.launch(*operands.addresses(), cudnn.allocate(plan.workspace_bytes))
    found = operands.error(cupy, operands.expected())
    assert np.isfinite(found)
    assert found <= SHARE[WIDENED] * undivided[1.0, 0.0]


def test_a_thread_that_has_only_chosen_its_gpu_loads_the_kernels(torch_gpu):
    """Threads that build candidates of PyTorch's programs do nothing else with the GPU before."""
    from ucudnn.torch.device.gpu import TorchGpu

    torch_gpu.zeros(1, device="cuda")
    found = []

    def load():
        with torch_gpu.cuda.device(0):
            device = TorchGpu(0)
            found.extend([device.sum_kernels, device.copier, device.can_delay])

    thread = Thread(target=load)
    thread.start()
    thread.join()
    assert len(found) == 3
    assert all(found)
