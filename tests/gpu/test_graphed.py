"""Graphed callables on a GPU, which replay what they captured while the rest of a program is tuned or keeps a limit."""

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch  # noqa: E402
from tests.gpu.conftest import settle  # noqa: E402
from tests.support.trained_program import TrainedProgram  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("torch_as_before"),
    # PyTorch warns of its own convolutions, too.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

CALLS = {"auto": 0, "16MiB": 4 * 5}
"""Kernels of ours by limit: three steps of warm-up and the capture have two outputs, and gradients of two weights and
of the input between them."""


class GraphedProgram(TrainedProgram):
    """Training steps of a network of two parts, of which the first one may become a graph."""

    def __init__(self):
        torch.manual_seed(0)
        conv, relu = torch.nn.Conv2d, torch.nn.ReLU
        body = torch.nn.Sequential(conv(32, 64, 3, 1, 1), relu(), conv(64, 64, 5, 2, 2))
        head = torch.nn.Sequential(relu(), conv(64, 128, 3, 1, 1, groups=2), relu(), conv(128, 16, 1))
        super().__init__(torch.nn.Sequential(body, head).cuda(), torch.randn(32, 32, 64, 64, device="cuda"))

    def graph(self):
        torch.cuda.make_graphed_callables(self.model[0], (torch.randn_like(self.x),))


def gradients(model, x):
    """Return the output of a model, and the gradients of its parameters."""
    model.zero_grad(set_to_none=True)
    out = model(x)
    out.square().mean().backward()
    return [out.detach().clone(), *(each.grad.clone() for each in model.parameters())]


def assert_as_in_float64(found, program):
    """Compare with the same network in float64, which has no graph, without ucudnn and without cuDNN."""
    process_overrides.clear()
    plain = GraphedProgram().model.double()
    plain.load_state_dict({name: each.double() for name, each in program.model.state_dict().items()})
    with torch.backends.cudnn.flags(enabled=False):
        expected = gradients(plain, program.x.double())
    for one, other in zip(found, expected, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        assert error < 2e-2, f"{error:.1e} off, several layers of TF32"


@pytest.mark.parametrize("limit", CALLS)
def test_graphs_that_are_made_before_the_first_step_replay_while_the_rest_is_tuned(limit):
    program = GraphedProgram()
    with ucudnn.torch.enable(workspace_limit=limit, trial_share=0.5, database="off") as on:
        program.graph()
        assert on.report().tuned, "the steps before the capture are seen"
        assert on.report().calls == CALLS[limit]
        report = settle(program, on)
        with torch.no_grad():
            for each in program.model[0].parameters():
                each.mul_(1.01)  # a replay reads the weights as they are then
        calls = on.report().calls
        found = gradients(program.model, program.x)
        head = sum(each.layers for each in report.kernels) if limit == "auto" else 6
        assert on.report().calls == calls + head, "a replay calls nothing"
    assert_as_in_float64(found, program)


@pytest.mark.parametrize("limit", CALLS)
def test_graphs_that_are_made_of_a_settled_program_outlive_what_was_turned_on(limit):
    program = GraphedProgram()
    with ucudnn.torch.enable(workspace_limit=limit, trial_share=0.5, database="off") as on:
        report = settle(program, on)
        program.step()
        gated = process_overrides.is_gated("cuda")
        calls = on.report().calls
        program.graph()
        if limit != "auto" or gated or not report.kernels:  # kernels that are called in Python run in other streams
            assert on.report().calls == calls + CALLS[limit]
        assert process_overrides.is_gated("cuda") == gated
        program.step()
    del on
    process_overrides.clear()
    noise = [torch.randn(1 << 20, device="cuda") for _ in range(8)]  # takes memory that was freed too early
    found = gradients(program.model, program.x)
    torch.cuda.synchronize()
    del noise
    assert_as_in_float64(found, program)
