"""Steps by hooks on a GPU: convolutions take the algorithms of the plain loop, within the budget."""

from contextlib import nullcontext
from multiprocessing import get_context

import pytest
import torch
from torch import nn

from tests.support.plain_training import assert_same_bits, gradients_of
from ucudnn.memory import budget
from ucudnn.memory.torch.device.stated_budget import outside_bytes

MIB = 2**20


class Block(nn.Module):
    """Saves tensors that no other module holds, and has convolutions whose channels come first."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.again = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return (self.again(self.second(self.norm(self.first(x)).relu())) + x).relu()


def trained(limit):
    """Return the gradients of the last of some steps, within some bytes or plain, and what kept the budget."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *(Block(64) for _ in range(6))).cuda()
    x = torch.randn(16, 3, 160, 160, device="cuda")
    within = budget(limit, device="cuda") if limit else None
    fixed = torch.backends.cudnn.flags(enabled=True, deterministic=True)
    with fixed, nullcontext() if within is None else within:
        for _ in range(10):
            model.zero_grad()
            model(x).square().mean().backward()
    return [each.cpu() for each in gradients_of(model)], within


@pytest.mark.alone
def test_a_convolution_that_is_met_within_a_budget_first_takes_the_algorithm_of_the_plain_loop(device):
    limit = 20 * 64 * 16 * 160 * 160 * 4 + outside_bytes(device) + 256 * MIB  # two thirds of what the blocks save
    found, within = trained(limit)
    assert within._begun.guard.slower == 0
    assert within.peak_bytes <= limit
    assert "recomputed: 0" not in within.report()
    with get_context("spawn").Pool(1) as other:  # PyTorch keeps the algorithms that a process has taken
        plain, _ = other.apply(trained, (0,))
    assert_same_bits(plain, found)


class Waits(nn.Module):
    """Takes what was queued away from the device, as an allocator does that unmaps pages."""

    def forward(self, x):
        torch.cuda.synchronize()
        return x


@pytest.mark.alone
def test_modules_behind_one_that_waits_for_the_device_take_it_what_they_take_it(device):
    model = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(1024, 1024), Waits(), nn.Tanh()))).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with budget("8GiB", device=device) as within:
        for _ in range(3):
            model(x).sum().backward()
        uses = within._begun.calls._uses
    torch.cuda._sleep(10**8)
    begin.record()
    for _ in range(20):
        model[0](x)
    end.record()
    end.synchronize()
    linear_ms = begin.elapsed_time(end) / 20
    assert [uses[each].device_ms for each in model if isinstance(each, nn.Linear)] == pytest.approx(
        [linear_ms] * 4, rel=0.5
    )
    assert uses[model].device_ms < 4 * (3 * linear_ms)


class FrontAndLinears(nn.Module):
    """Convolutions of a long signal, and linear layers whose gradients come before theirs."""

    def __init__(self):
        super().__init__()
        self.front = nn.ModuleList(nn.Conv1d(*sizes, bias=False) for sizes in ((1, 512, 10, 5), (512, 512, 3, 2)))
        self.linears = nn.ModuleList(nn.Linear(512, 2048) if n % 2 == 0 else nn.Linear(2048, 512) for n in range(16))

    def forward(self, x):
        for each in self.front:
            x = each(x).relu()
        x = x[..., ::16].transpose(1, 2)
        for each in self.linears:
            x = each(x).relu()
        return x


def front_trained(limit):
    """Return gradients, how many of them were moved together for a convolution, and the budget's peak."""
    torch.manual_seed(0)
    model, x = FrontAndLinears().cuda(), torch.randn(8, 1, 80_000, device="cuda")
    within, moved = budget(limit, device="cuda") if limit else None, []
    with torch.backends.cudnn.flags(enabled=True, deterministic=True), nullcontext() if within is None else within:
        if within is not None:
            gradients = within._begun.memory.gradients
            gather = gradients.gather
            gradients.gather = lambda new: moved.append(len(new)) or gather(new)
        for n in range(8):
            model.zero_grad()
            if within is not None:
                within._begun._pressure._since_unmapped = 0 if n == 6 else 64
                within._begun._tidies = n == 7
            model(x).square().mean().backward()
            assert len({each.grad.untyped_storage().data_ptr() for each in model.parameters()}) == 34
        if within is not None:  # the last step began with its memory in one piece, which no step took
            pressure = within._begun._pressure
            # Kernels were left 64 MiB as that step began and 32 at its end, and a page has 20.
            assert pressure.cap - 2**20 * (32 + 32 + 20) < torch.cuda.memory_reserved() <= pressure.cap
            assert pressure.most < 0.9 * pressure.cap
    return [each.cpu() for each in gradients_of(model)], moved, 0 if within is None else within.peak_bytes


@pytest.mark.alone
def test_gradients_that_are_moved_together_for_a_convolution_keep_their_bits(device):
    with get_context("spawn").Pool(1) as other:
        plain, moved, _ = other.apply(front_trained, (0,))
        assert not moved
    with get_context("spawn").Pool(1) as other:  # whose first step loads all kernels within the budget
        limit = 3 * 2**30
        found, moved, peak = other.apply(front_trained, (limit,))
    assert moved == [16]  # biases are small
    assert peak <= limit
    assert_same_bits(plain, found)
