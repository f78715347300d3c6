"""The order in which PyTorch's operators allocate their scratch on a GPU, and indices that cost what real ones do."""

from statistics import median

import torch
from torch import nn

from ucudnn.memory.torch.measuring.made_operands import operand_storages, operator_on_made_up
from ucudnn.memory.torch.measuring.operation_costs import measure_operator
from ucudnn.memory.torch.measuring.scratch_order import with_scratch_pieces
from ucudnn.memory.torch.subject.step_program import StepSubject
from ucudnn.memory.torch.tracing.traced_program import trace_program

MIB = 2**20


def backward_of_a_transposed_convolution(contiguous):
    """Return a call whose gradient is half of a tensor's channels, as behind a concatenation."""
    whole = torch.randn(4, 128, 128, 128, device="cuda")
    gradient = whole[:, :64].contiguous() if contiguous else whole[:, :64]
    x, w = torch.randn(4, 128, 64, 64, device="cuda"), torch.randn(128, 64, 2, 2, device="cuda")
    return lambda: torch.ops.aten.convolution_backward(
        gradient, x, w, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1, [True, False, False]
    )


def test_a_gradient_that_is_not_contiguous_is_copied_before_the_result_is_allocated(device):
    call = backward_of_a_transposed_convolution(contiguous=False)
    call()
    _, pieces = with_scratch_pieces(call, device)
    assert pieces.before == (4 * 64 * 128 * 128 * 4,)
    cost = measure_operator(call, device, 1)
    rounded = [-(-size // 512) * 512 for size in (*cost.pieces.before, *cost.pieces.after)]
    assert sum(rounded) == cost.scratch_bytes
    contiguous = measure_operator(backward_of_a_transposed_convolution(contiguous=True), device, 1)
    assert contiguous.pieces is None or not contiguous.pieces.before


def test_a_bias_gradient_comes_when_the_workspace_is_freed(device):
    gradient, x = torch.randn(8, 256, 56, 56, device="cuda"), torch.randn(8, 256, 56, 56, device="cuda")
    w = torch.randn(256, 256, 3, 3, device="cuda")

    def call():
        return torch.ops.aten.convolution_backward(
            gradient, x, w, [256], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True]
        )

    cost = measure_operator(call, device, 1)
    assert cost.scratch_bytes
    assert cost.pieces.later == (256 * 4,)
    rounded = [-(-size // 512) * 512 for size in (*cost.pieces.before, *cost.pieces.after)]
    assert sum(rounded) == cost.scratch_bytes + 256 * 4


def test_a_record_of_somebody_else_stays(device):
    call = backward_of_a_transposed_convolution(contiguous=False)
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        result, pieces = with_scratch_pieces(call, device)
        assert pieces is None
        assert result[0].shape == (4, 128, 64, 64)
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    with_scratch_pieces(call, device)
    assert not torch._C._cuda_isHistoryEnabled()


def test_made_up_indices_take_about_as_long_as_those_of_a_forward(device):
    x = torch.randn(2, 32, 64, 64, 64, device="cuda", requires_grad=True)
    model = nn.Sequential(nn.Identity(), nn.MaxPool3d(2)).cuda()
    program = trace_program(StepSubject(model=model, args=(x,), kwargs={}), "model", 2)
    call = next(each for each in program.calls if "max_pool3d_with_indices_backward" in str(each.func))
    made = operator_on_made_up(call, operand_storages(call), device, len(program.graph.storages))
    out, indices = torch.ops.aten.max_pool3d_with_indices(x.detach(), [2, 2, 2])
    gradient = torch.randn_like(out)

    def real():
        return torch.ops.aten.max_pool3d_with_indices_backward(
            gradient, x.detach(), [2, 2, 2], [], [0, 0, 0], [1, 1, 1], False, indices
        )

    found = [[measure_operator(each, device, 5).time_ms for each in (made, real)] for _ in range(3)]
    made_ms, real_ms = (median(each) for each in zip(*found, strict=True))
    assert made_ms < 2 * real_ms
