"""Programs on a GPU that are tuned while they run: the same numbers, and no higher peak."""

from math import isfinite
from time import monotonic

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch  # noqa: E402
from tests.gpu.conftest import assert_same_gradients, gradients, settle  # noqa: E402
from tests.support.gate_call import directs  # noqa: E402
from tests.support.trained_program import TrainedProgram  # noqa: E402
from ucudnn.torch.calls.interceptor import Interceptor  # noqa: E402
from ucudnn.torch.device.timed_device import TimedGpu  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_before")


CAN_DELAY = TimedGpu.can_delay


@pytest.mark.parametrize(("batch", "side", "bounds"), [(1, 16, True), (256, 112, False)])
def test_a_program_that_its_host_bounds_is_left_alone(monkeypatch, batch, side, bounds):
    monkeypatch.setattr(TimedGpu, "can_delay", CAN_DELAY)
    delay, delays = TimedGpu.delay, []
    monkeypatch.setattr(TimedGpu, "delay", lambda self, time_ms: delays.append(time_ms) or delay(self, time_ms))
    layers = [torch.nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(6)]
    program = TrainedProgram(torch.nn.Sequential(*layers).cuda(), torch.randn(batch, 64, side, side, device="cuda"))
    with ucudnn.torch.enable(trial_share=0.5) as on:
        report = settle(program, on)
    assert report.host_bound is bounds
    assert bool(report.outcomes) is not bounds, "candidates are tried where the GPU bounds the program"
    sites = [each for tuner in on._interceptor._tuners.values() for each in tuner.sites.values()]
    assert len(delays) == 10, "as many steps are delayed as not"
    assert all(0 < each < 0.5 * report.step_ms for each in delays)
    if bounds:
        assert not any(each.baseline_ms for each in sites), "nothing is timed"
        return
    took_ms = [each.host_ms for each in sites if isfinite(each.host_ms)]
    assert took_ms, "how long the host takes is known of some"
    assert all(0 < each < 5 for each in took_ms), "milliseconds, of launches and not of kernels"


class Program(TrainedProgram):
    """Training steps of a network with strided, grouped, depth-wise and transposed convolutions."""

    def __init__(self):
        torch.manual_seed(0)
        conv = torch.nn.Conv2d
        model = torch.nn.Sequential(
            conv(3, 64, 7, 2, 3),
            torch.nn.ReLU(),
            conv(64, 128, 3, 2, 1, groups=4, bias=False),
            torch.nn.ReLU(),
            conv(128, 128, 5, padding=2, groups=128),
            conv(128, 256, 1, 2),
            torch.nn.ReLU(),
            torch.nn.ConvTranspose2d(256, 64, 2, 2),
        ).cuda()
        super().__init__(model, torch.randn(32, 3, 128, 128, device="cuda"))


def test_a_tuned_program_takes_no_more_memory_than_before():
    baseline = Program()
    for _ in range(5):
        baseline.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline.step()
    peak = torch.cuda.max_memory_allocated()
    del baseline
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    program = Program()
    with ucudnn.torch.enable(workspace_limit="auto", trial_share=0.5) as on:
        report = settle(program, on)
        assert report.seen > 10
        assert sum(report.outcomes.values()) > 10, "candidates were tried"
        assert torch.cuda.max_memory_allocated() <= peak
        for kernel in report.kernels:
            assert kernel.workspace_bytes <= kernel.headroom_bytes


def test_a_program_is_tuned_without_options_and_calls_go_through_the_gate():
    program = Program()
    with ucudnn.torch.enable(trial_share=0.5) as on:
        report = settle(program, on)
        program.step()
        interceptor = process_overrides.interceptor
        assert not process_overrides.is_gated("cuda") or report.kernels
        if report.kernels:  # this needs a C++ compiler
            assert process_overrides.is_gated("cuda")
            assert process_overrides._gates["CUDA"].passes_to_own()
            calls = on.report().calls
            program.step()
            assert on.report().calls == calls + sum(each.layers for each in report.kernels)
        else:
            assert interceptor.operators() == (None, None)
        found = gradients(program)
    assert_same_gradients(found, gradients(program))


def test_engines_add_biases_where_that_is_faster():
    torch.manual_seed(0)
    conv = torch.nn.Conv2d
    layers = conv(64, 64, 3, padding=1), torch.nn.ReLU(), conv(64, 96, 3, padding=1), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    with torch.no_grad():
        for each in (model[0], model[2]):
            each.bias.uniform_(-4, 4)
    x = torch.randn(32, 64, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    program = TrainedProgram(model, x)
    program.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the biases stay as they are
    with ucudnn.torch.enable(trial_share=0.5) as on:
        settle(program, on)
        (tuner,) = process_overrides.interceptor.tuners().values()
        forward = [kernel for problem, kernel in tuner.kernels.items() if problem.biased]
        assert any(kernel.fuses for kernel in forward), on.report()
        program.step()  # through the gate from now on, if there is one
        calls = on.report().calls
        found = model(x)
        assert on.report().calls == calls + len(forward)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = model(x)
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    expected = model(x).detach()
    for each in (found.detach(), captured):
        assert float((each - expected).norm() / expected.norm()) < 2e-3


def test_a_training_step_that_is_captured_before_all_is_settled_keeps_its_plans_while_tuning_goes_on():
    program = Program()
    with ucudnn.torch.enable(workspace_limit="auto", trial_share=0.5) as on:
        begin = monotonic()
        while not on.report().tuned or on.report().tuned[0].phase != "trying":
            program.step()
            torch.cuda.synchronize()
            assert monotonic() - begin < 60, on.report()
        graph, calls = torch.cuda.CUDAGraph(), on.report().calls
        kept = [each.detach().clone() for each in program.model.parameters()]
        program.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            program.model(program.x).square().mean().backward()
            program.optimizer.step()
        assert on.report().tuned[0].phase == "trying", "a capture ends no step"
        assert on.report().calls == calls, "nothing of ours is captured"
        for each, before in zip(program.model.parameters(), kept, strict=True):
            assert torch.equal(each.detach(), before), "a capture computes nothing"
        captured = [each.grad for each in program.model.parameters()]
        settle(program, on)  # the eager program goes on, with gradients of its own
        with torch.no_grad():
            for each, before in zip(program.model.parameters(), kept, strict=True):
                each.copy_(before)
            for each in captured:
                each.fill_(float("nan"))
        calls = on.report().calls
        graph.replay()
        torch.cuda.synchronize()
        assert on.report().calls == calls
        stepped = [each.detach().clone() for each in program.model.parameters()]
    with torch.no_grad():
        for each, before in zip(program.model.parameters(), kept, strict=True):
            each.copy_(before)
    expected = gradients(program)
    rate = program.optimizer.param_groups[0]["lr"]
    for gradient, wanted, before, after in zip(captured, expected, kept, stepped, strict=True):
        assert float((gradient - wanted).norm() / wanted.norm()) < 2e-2, "several layers of TF32"
        assert torch.allclose(after, before - rate * gradient), "the optimizer's step is part of the graph"


def test_inference_is_tuned_without_an_optimizer():
    program = Program()
    with torch.no_grad(), ucudnn.torch.enable(workspace_limit="auto", trial_share=0.5) as on:
        begin = monotonic()
        expected = program.model(program.x)
        while on.report().tuned[0].phase != "settled":
            for _ in range(10):
                program.model(program.x)
            torch.cuda.synchronize()
            assert monotonic() - begin < 90, on.report()
        found = program.model(program.x)
        assert float((found - expected).norm() / expected.norm()) < 1e-2
        assert sum(on.report().tuned[0].outcomes.values()) > 3


@pytest.mark.parametrize("limits", [{}, {"memory_limit": "4GiB"}], ids=["of workspaces", "of memory too"])
def test_a_settled_program_within_a_limit_is_computed_by_the_gate(monkeypatch, limits):
    program, seen = Program(), []
    with ucudnn.torch.enable(workspace_limit="16MiB", trial_share=0.5, database="off", **limits) as on:
        settle(program, on)
        begin = monotonic()
        while not process_overrides.is_gated("cuda"):  # this needs a C++ compiler
            program.step()
            torch.cuda.synchronize()
            assert monotonic() - begin < 60, "the gate was not opened"
        for name in ("forward", "backward"):
            run = getattr(Interceptor, name)
            monkeypatch.setattr(Interceptor, name, lambda *rest, run=run: seen.append(run) or run(*rest))
        process_overrides.use(process_overrides.interceptor)  # registers its methods again
        assert {each.most_bytes for each in directs("cuda")} == {(4 << 30) - (1 << 20) if limits else None}

        def peak_of_step():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            seen.clear()
            calls = on.report().calls
            program.step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated(), len(seen), on.report().calls - calls

        peak, in_python, calls = peak_of_step()
        with process_overrides.without_gates():
            peak_in_python, all_in_python, calls_in_python = peak_of_step()
        assert all_in_python == 10
        assert 2 <= in_python <= 6, "depth-wise convolutions are PyTorch's; strided inputs may be copied in Python"
        assert calls == calls_in_python
        assert peak <= peak_in_python + (1 << 20)
        if limits:
            ballast = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
            bounded = any(each.workspace_bytes for each in directs("cuda"))
            peak, more_in_python, _ = peak_of_step()
            assert (more_in_python > in_python) is bounded, "what needs a workspace, for which live bytes leave no room"
            assert peak <= peak_in_python + ballast.nbytes, "it gets none"
            del ballast
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            program.model(program.x[:8])  # the handle of cuDNN has this stream then
        torch.cuda.current_stream().wait_stream(side)
        found = gradients(program)
    assert_same_gradients(found, gradients(program))
