"""An error at any point of a fit or of a step, Ctrl-C included, leaves everything as it was."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.interruption import Points, drawn_points, state
from ucudnn.memory.torch.running.fit import fit

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # errors in generators' ends
ERRORS = (RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError, MemoryError)
OURS = ("/ucudnn/", "<plan ", "/tests/memory/")


@pytest.fixture(autouse=True)
def frozen(older_objects_released):
    """Take the place of what freezes objects before each other test."""


class Busy(nn.Module):
    """Leaves something wherever a forward can: in attributes, buffers, generators, modes, hooks."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)
        self.register_buffer("moved", torch.zeros(3))
        self.kept = self.shown = None
        self.generator = torch.Generator()
        self.first.weight.grad = torch.ones_like(self.first.weight)
        self.first.weight.mark = ["of the user"]
        self.first.register_forward_hook(lambda *_: None)

    def forward(self, x):
        self.shown = x.shape
        self.kept = x * 2
        torch.randn(2, generator=self.generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=False), warnings.catch_warnings():
            x = self.norm(self.first(x)).relu()
        with torch.no_grad():
            self.moved += 1
        return self.last(checkpoint(nn.functional.dropout, x, 0.0, use_reentrant=False).flatten(1))


def _shared():
    body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    return nn.Sequential(body, nn.ReLU(), body, nn.Dropout(0.3), nn.Linear(8, 3))


SETUPS = {
    "busy": (Busy, (torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 2, 1]))),
    "shared": (_shared, (torch.randn(6, 8), torch.tensor([0, 1, 2, 1, 0, 1]))),
}


class Setup:
    """A model with its optimizer and a sample, and another one of the same numbers."""

    def __init__(self, name, policy="stock"):
        make, self.sample = SETUPS[name]
        torch.manual_seed(0)
        self.model = make()
        self.policy = policy
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def fit(self):
        """Return the step."""
        return fit(self.model, self.sample, loss=functional.cross_entropy, optimizer=self.optimizer, policy=self.policy)

    def trained(self, step, count=2):
        """Train, and return all numbers."""
        torch.manual_seed(3)
        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            *inputs, target = self.sample
            loss = functional.cross_entropy(self.model(*inputs), target) if step is None else step(*self.sample)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(each.detach().clone() for each in self.model.state_dict().values())]


def passed(points, work):
    """Return points when something has run, as far as it comes, and whether it has ended well."""
    try:
        with points:
            work()
    except BaseException:
        if not points.reached:
            raise
        return points, False
    return points, True


def check_state(after, before, error, point):
    """Check that two states are one, and name the error that changed it."""
    different = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
    assert {key: pair for key, pair in different.items() if pair[0] != pair[1]} == {}, (type(error).__name__, point)


def everything(setup):
    """Return the state of a setup."""
    return state(setup.model, setup.optimizer, setup.sample)


@pytest.mark.parametrize("name", SETUPS)
def test_an_error_at_any_point_of_a_fit_leaves_everything_as_it_was(name):
    with Points(OURS) as points:
        Setup(name).fit()
    plain = Setup(name).trained(None)
    setup = Setup(name)
    before, reached = everything(setup), 0
    for place, point in enumerate(drawn_points(points.counts, 6, seed=1)):
        error = ERRORS[place % len(ERRORS)]("drawn")
        points, ended_well = passed(Points(OURS, point, error), setup.fit)
        reached += points.reached
        if ended_well:  # nobody has met the error, or somebody was ready for it, and what forward has written stays
            before = everything(setup)
        assert gc.get_freeze_count() == 0, point
        check_state(everything(setup), before, error, point)
    assert reached > 3
    step = setup.fit()
    assert all(map(torch.equal, setup.trained(step), plain))
    assert all(map(torch.equal, Setup(name).trained(None), plain))


def _step(setup, step):
    setup.optimizer.zero_grad()
    step(*setup.sample).backward()


def _values_in_a_step(setup):
    """Return what parameters and buffers are in the course of a plain step: one that fails may leave any of it."""
    values = [copy.deepcopy(setup.model.state_dict())]
    for module in setup.model.modules():
        module.register_forward_hook(lambda *_: values.append(copy.deepcopy(setup.model.state_dict())))
    _step(setup, lambda x, target: functional.cross_entropy(setup.model(x), target))
    return values


@pytest.mark.parametrize("policy", ["swap", "checkpoint"])
def test_an_error_at_any_point_of_a_step_leaves_what_is_trained_and_a_step_that_runs(policy):
    setup = Setup("shared", policy)
    step = setup.fit()
    plain = Setup("shared").trained(None)
    begin = copy.deepcopy(setup.model.state_dict())
    values = _values_in_a_step(Setup("shared"))
    _step(setup, step)  # what is made in the first step is not made again
    with Points(OURS) as points:
        _step(setup, step)
    setup.model.load_state_dict(begin)
    setup.model.zero_grad()
    before, reached = everything(setup), 0
    for place, point in enumerate(drawn_points(points.counts, 9, seed=1)):
        error = ERRORS[place % len(ERRORS)]("drawn")
        points, ended = passed(Points(OURS, point, error), lambda: _step(setup, step))
        reached += points.reached
        if ended:
            setup.model.zero_grad()
        for key, value in setup.model.state_dict().items():
            assert any(torch.equal(value, each[key]) for each in values), (key, point)
        setup.model.load_state_dict(begin)
        after = everything(setup)
        for each in (before, after):
            each["process"].pop("torch", None)
        check_state(after, before, error, point)
    assert reached > 4
    assert all(map(torch.equal, setup.trained(step), plain))
