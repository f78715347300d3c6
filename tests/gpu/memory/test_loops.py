"""Training loops with fitted steps on a GPU: half precision, scaled losses, last mini-batches, several models."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.plain_training import state_of
from tests.support.small_networks import small_network
from tests.support.training_steps import training_step
from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.running.fit import fit

pytestmark = pytest.mark.usefixtures("fixed_plans")

POLICIES = ["checkpoint", "vdnn-ext-all-p"]


def race(model, loop, made):
    """Compare a loop over the model, twice, with one over the step that `made` returns of a copy; return the step.

    Where PyTorch's own loop does not repeat itself the test is skipped.
    """
    copies = [copy.deepcopy(model) for _ in range(2)]
    step = made(model)
    found = []
    for trained, call in ((copies[0], None), (copies[1], None), (model, step)):
        torch.manual_seed(1)
        figures = [float(each) for each in loop(trained, call)]
        found.append((figures, state_of(trained, None)))
    if not same(found[0], found[1]):
        pytest.skip("PyTorch's own loop does not repeat itself here")
    assert same(found[0], found[2])
    return step


def same(one, other):
    return str(one[0]) == str(other[0]) and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_half_precision_with_scaled_losses(policy, form):
    torch.manual_seed(0)
    model, (x, y), loss = small_network("unet")
    model, x, y = model.cuda().to(memory_format=form), x.cuda().contiguous(memory_format=form), y.cuda()

    def loop(trained, call):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=2)
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                value = loss(trained(x), y) if call is None else call(x, y)
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            yield nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            yield value.detach()
            yield scaler.get_scale()

    def made(given):
        with torch.autocast("cuda", torch.float16):
            return fit(given, (x, y), loss=loss, policy=policy, debug=True)

    race(model, loop, made)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_smaller_last_mini_batch_and_added_gradients(policy):
    torch.manual_seed(0)
    step = training_step("resnet18")
    x, y = step.inputs[0].cuda(), step.targets[0].cuda()

    def loop(trained, call):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            for size in (4, 3):
                value = step.loss(trained(x[:size]), y[:size]) if call is None else call(x[:size], y[:size])
                value.backward()
                yield value.detach()
            optimizer.step()

    fitted = race(
        step.model.cuda().train(),
        loop,
        lambda given: fit(given, (x, y), loss=step.loss, policy=policy, keep_gradients=True, debug=True),
    )
    assert [other.plan.graph.batch for other in fitted._others] == [3]
    fitted.close()


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.smooth_l1_loss, functional.soft_margin_loss])
def test_losses_that_are_reduced_in_place(loss):
    torch.manual_seed(0)
    x, y = torch.randn(64, 8, device="cuda"), torch.randn(64, 4, device="cuda").sign()

    def loop(trained, call):
        optimizer = torch.optim.Adam(trained.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(trained(x), y) if call is None else call(x, y)
            value.backward()
            optimizer.step()
            yield value.detach()

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda()
    race(model, loop, lambda given: fit(given, (x, y), loss=loss, policy="checkpoint", debug=True))


class First(nn.Module):
    """The output of a recurrent layer, without its state."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


def test_recurrent_layers_train_within_the_flag_that_the_refusal_names():
    torch.manual_seed(0)
    model, x, y = First().cuda(), torch.randn(3, 5, 8, device="cuda"), torch.randn(3, 5, 4, device="cuda")
    with pytest.raises(StepGraphError, match=r"_cudnn_rnn.* torch\.backends\.cudnn\.flags\(enabled=False\)"):
        fit(model, (x, y), loss=functional.mse_loss)

    def loop(trained, call):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.backends.cudnn.flags(enabled=False):
                value = functional.mse_loss(trained(x), y) if call is None else call(x, y)
            value.backward()
            optimizer.step()
            yield value.detach()

    def made(given):
        with torch.backends.cudnn.flags(enabled=False):
            return fit(given, (x, y), loss=functional.mse_loss, policy="checkpoint", debug=True)

    race(model, loop, made)
