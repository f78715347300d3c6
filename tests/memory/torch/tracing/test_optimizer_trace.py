"""Tests of traced updates: an optimizer may have stepped before the step is fitted, as where training is resumed."""

import copy

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.live_bytes import LiveBytes
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.subject.update_parts import at_once

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam, all at once": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adagrad": torch.optim.Adagrad,  # has its state before the first step
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "asgd, one by one": lambda parameters: torch.optim.ASGD(parameters, foreach=False),
    "sgd whose rate is a tensor": lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1)),
}


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def batch(size=16):
    return torch.randn(size, 8), torch.randint(4, (size,))


def update(run, optimizer, x, y):
    optimizer.zero_grad()
    loss = run(x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_is_fitted_to_an_optimizer_that_has_stepped(model, make):
    plain, optimizer = model, make(model.parameters())

    def loss(x, y):
        return F.cross_entropy(plain(x), y)

    for _ in range(6):
        update(loss, optimizer, *batch())
    resumed = copy.deepcopy(plain)
    other = make(resumed.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = fit(resumed, batch(), loss=F.cross_entropy, optimizer=other)
    for size in (16, 16, 10, 16):  # a smaller mini-batch is planned when the optimizer has stepped, too
        given = batch(size)
        assert torch.equal(update(loss, optimizer, *given), update(step, other, *given))
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), resumed.parameters(), strict=True))
    tensors = {id(each) for state in other.state.values() for each in state.values() if torch.is_tensor(each)}
    counted = [each for each in step.plan.graph.storages if each.role is Role.OPTIMIZER_STATE]
    assert len(counted) == len(tensors)
    step.close()


def test_the_counts_of_steps_stay_as_they_are(model):
    optimizer = torch.optim.Adam(model.parameters())
    x, y = batch()
    update(lambda x, y: F.cross_entropy(model(x), y), optimizer, x, y)
    step = fit(model, (x, y), loss=F.cross_entropy, optimizer=optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    step.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, nesterov=True, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, foreach=True),
        torch.optim.Adam,  # holds the denominators of one parameter until it has those of the next
        lambda parameters: torch.optim.Adagrad(parameters, foreach=True),
        torch.optim.Adafactor,
        torch.optim.Muon,
    ],
)
def test_temporaries_count_as_long_as_the_update_holds_them(make):
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
    optimizer, data = make(model.parameters()), (torch.randn(4, 128), torch.randn(4, 128))
    update(lambda x, y: F.mse_loss(model(x), y), optimizer, *data)  # makes its state
    with LiveBytes() as live:
        optimizer.step()
    graph = fit(model, data, loss=F.mse_loss, optimizer=optimizer).plan.graph
    liveness = measure_liveness(graph, device_costs(load_device("h200"), graph))
    updates = [place for place, each in enumerate(liveness.order) if graph.operations[each].phase is Phase.OPTIMIZER]
    counted = max(liveness.live_bytes[place] - liveness.persistent_bytes[place] for place in updates)
    assert counted == pytest.approx(live.peak, abs=8192)  # an allocator rounds scalars


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"foreach": False}, False),
        ({"foreach": True}, True),
        ({"fused": False}, False),
        ({"lr": torch.tensor(0.1)}, False),
    ],
)
def test_an_update_is_traced_at_once_where_pytorch_updates_parameters_of_a_gpu_so(monkeypatch, options, expected):
    found = optimizers._get_foreach_kernels_supported_devices()
    monkeypatch.setattr(optimizers, "_get_foreach_kernels_supported_devices", lambda: [*found, "cpu"])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    (x, y), optimizer = batch(), torch.optim.Adam(model.parameters(), **options)
    step = fit(model, (x, y), loss=F.cross_entropy, optimizer=optimizer)
    kinds = [each.kind for each in step.plan.graph.operations if each.phase is Phase.OPTIMIZER]
    assert any("foreach" in each for each in kinds) is expected
    ran = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func._opname)
            return func(*args, **(kwargs or {}))

    step(x, y).backward()
    with Watched():
        optimizer.step()
    assert any("foreach" in each for each in ran) is expected, "PyTorch does otherwise"
    group = optimizer.param_groups[0]
    assert not at_once({**group, "foreach": None, "differentiable": True})
    assert at_once({**group, "foreach": None, "fused": None, "lr": torch.tensor(0.1), "capturable": True})
