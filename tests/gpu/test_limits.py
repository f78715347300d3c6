"""Programs on a GPU within stated limits: heuristic plans at once, others later, the same numbers, bytes counted."""

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch  # noqa: E402
from tests.gpu.conftest import assert_same_gradients, gradients, settle  # noqa: E402
from tests.support.trained_program import TrainedProgram  # noqa: E402
from ucudnn.benchmarking.measurer import Measurer  # noqa: E402
from ucudnn.torch.trials.candidate_list import WRONG, CandidateState  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_before")

MIB = 1 << 20
LIMIT = 4 * MIB
MODES = ({"workspace_limit": "auto"}, {"workspace_limit": LIMIT})


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """Refuse measurements before a run."""
    monkeypatch.setattr(Measurer, "explore", lambda *arguments: pytest.fail("something is measured"))


class Program(TrainedProgram):
    """Training steps of a network whose convolutions want workspace."""

    def __init__(self):
        torch.manual_seed(0)
        conv = torch.nn.Conv2d
        model = torch.nn.Sequential(
            conv(3, 64, 7, 2, 3),
            torch.nn.ReLU(),
            conv(64, 64, 3, padding=1, bias=False),
            torch.nn.ReLU(),
            conv(64, 128, 5, padding=2),
            torch.nn.ReLU(),
            conv(128, 64, 1),
        ).cuda()
        super().__init__(model, torch.randn(32, 3, 96, 96, device="cuda"))


def test_a_stated_limit_measures_nothing_first_and_keeps_the_limit_throughout():
    program = Program()
    expected = gradients(program)
    with ucudnn.torch.enable(workspace_limit=LIMIT, trial_share=0.5, database="off", strict=True) as on:
        assert_same_gradients(gradients(program), expected)
        assert on.report().calls == len(on.report().layers) == 11, "the image needs no gradient"
        assert on.report().workspace_bytes <= LIMIT
        report = settle(program, on)
        assert sum(report.outcomes.values()) > 5, "others were tried"
        assert all(each.workspace_bytes <= LIMIT == each.headroom_bytes for each in report.kernels)
        assert all(each.time_ms < each.baseline_ms for each in report.kernels)
        assert on.report().workspace_bytes <= LIMIT
        found = gradients(program)
    assert_same_gradients(found, gradients(program))


def test_filter_gradients_of_16_bits_in_micro_batches_are_tried_with_a_sum_in_float32():
    torch.manual_seed(0)
    to = {"device": "cuda", "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    convolutions = (torch.nn.Conv2d(96, 96, 3, padding=1, groups=4, bias=False) for _ in range(3))
    program = TrainedProgram(torch.nn.Sequential(*convolutions).to(**to), torch.randn(64, 96, 56, 56).to(**to))
    with ucudnn.torch.enable(workspace_limit="32MiB", trial_share=0.5, database="off") as on:
        settle(program, on)
        (tuner,) = on._interceptor.tuners().values()
        tried = [
            each
            for site in tuner.sites.values()
            for each in site.candidates or ()
            if each.configuration.float32_sum is not None and each.state is not CandidateState.NEW
        ]
    assert any(len(each.configuration.parts) > 1 for each in tried), "threads have built them"
    assert not any(each.reason == WRONG for each in tried)


def test_live_bytes_and_workspace_together_keep_a_limit_of_memory():
    free = Program()
    with ucudnn.torch.enable(workspace_limit=0, tune="program", database="off"):
        free.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        free.step()
        least = torch.cuda.max_memory_allocated()
    del free
    torch.cuda.empty_cache()
    program, limit = Program(), least + 8 * MIB
    torch.cuda.reset_peak_memory_stats()
    with ucudnn.torch.enable(memory_limit=limit, trial_share=0.5, database="off", strict=True) as on:
        settle(program, on)
        assert torch.cuda.max_memory_allocated() <= limit, "trials and checks included"
        assert on.report().workspace_bytes > 0, "what is left is used"


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_graph_keeps_its_plans_while_others_are_tried(mode):
    program = Program()
    with ucudnn.torch.enable(**mode, trial_share=0.5, database="off") as on:
        for _ in range(2):
            program.step()
        with torch.no_grad():
            expected = program.model(program.x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            calls = sum(each.calls for each in on.report().tuned)
            with torch.cuda.graph(graph):
                out = program.model(program.x)
        assert sum(each.calls for each in on.report().tuned) == calls, "nothing is tried in a capture"
        weights = [each.detach().clone() for each in program.model.parameters()]
        settle(program, on)
        with torch.no_grad():
            for each, kept in zip(program.model.parameters(), weights, strict=True):
                each.copy_(kept)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert float((out - expected).norm() / expected.norm()) < 1e-5, "the same kernels"


@pytest.mark.parametrize("mode", MODES)
def test_streams_besides_the_first_one_compute_the_same_and_try_nothing(mode):
    program = Program()
    expected = gradients(program)
    with ucudnn.torch.enable(**mode, trial_share=0.5, database="off") as on:
        program.step()
        streams = [torch.cuda.Stream() for _ in range(2)]
        for number in range(40):
            with torch.cuda.stream(streams[number % 2]):
                streams[number % 2].wait_stream(streams[1 - number % 2])
                program.optimizer.zero_grad(set_to_none=True)
                program.model(program.x).square().mean().backward()
                for group in program.optimizer.param_groups:
                    group["lr"] = 0.0
                program.optimizer.step()
        torch.cuda.synchronize()
        assert not any(each.outcomes for each in on.report().tuned)
        report = settle(program, on)
        assert report.seen
        with torch.cuda.stream(streams[0]):
            found = gradients(program)
        torch.cuda.synchronize()
    assert_same_gradients(found, gradients(program))
    del expected
