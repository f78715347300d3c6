"""Tensors without elements, as of an image without boxes, in steps by every policy: the plain loop's bits."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.memory_plans import random_plan_in_parts
from tests.support.plain_training import Pair, Race, assert_same_bits, state_of, train
from tests.support.training_steps import trace_step
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe, TrainingStep
from ucudnn.memory.torch.record import record, record_measured
from ucudnn.memory.torch.running.fit import FitOptions, fit_subject
from ucudnn.memory.torch.subject.step_program import step_subject


class Boxes(nn.Module):
    """A detector: what it finds is compared with boxes, of which there may be none."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, 16, 0.3))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens, boxes):
        found = self.head(self.body(tokens))
        count = boxes.shape[1]
        losses = [functional.smooth_l1_loss(found[:, :count], boxes, reduction="sum"), found.square().mean()]
        losses += [each(found[:, :count], boxes.sigmoid(), reduction="sum") for each in (_entropy, functional.mse_loss)]
        return sum(losses), found.detach()


def _entropy(found, wanted, **options):
    return functional.binary_cross_entropy(found.sigmoid(), wanted, **options)


class Parts(nn.Module):
    """Slices without elements, in-place operations on them, and an empty parameter and buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.rows = nn.Parameter(torch.zeros(0, 8))
        self.register_buffer("none", torch.zeros(3, 0))

    def forward(self, x):
        y = torch.tanh(self.first(x))
        self.none.mul_(2).add_(1)
        empty = torch.relu_(y[:0] * 2)
        y = torch.cat([y, empty, self.rows, functional.dropout(y[2:2] + self.rows)])
        return self.last(y) + self.none.sum() + y.new_zeros(0).sum()


class Narrow(nn.Module):
    """A layer without features beside one with some."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.to_none, self.from_none = nn.Linear(8, 0), nn.Linear(0, 8)

    def forward(self, x):
        y = functional.gelu(self.first(x))
        return self.last(functional.dropout(y) + self.from_none(torch.sigmoid(self.to_none(y) + 1)))


class Images(nn.Module):
    """Convolutions of images, and of a batch without any."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x, others):
        y = self.norm(self.second(functional.relu(self.first(x), inplace=True)).mean((2, 3)))
        z = functional.max_pool2d(functional.relu(self.first(others)), 2).flatten(1).sum(1, keepdim=True)
        return self.last(torch.cat([y, z.expand(-1, 4)]))


def total(output, target):
    """Return a number of all outputs, whatever their sizes."""
    return (output[0] if isinstance(output, tuple) else output).sum() * target


def linear(*sizes):
    """Return linear layers with tanh between them."""
    layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh(), nn.Dropout(0.3)) for pair in pairwise(sizes)]
    return nn.Sequential(*layers)


def convolutions():
    """Return a network of convolutions."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 5)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), *head)


KINDS = {
    "boxes": lambda: (Boxes(), (torch.randint(10, (2, 5)), torch.zeros(2, 0, 4))),
    "parts": lambda: (Parts(), (torch.randn(4, 6),)),
    "narrow": lambda: (Narrow(), (torch.randn(4, 6),)),
    "images": lambda: (Images(), (torch.randn(4, 3, 8, 8), torch.randn(0, 3, 8, 8))),
    "no features inside": lambda: (linear(6, 0, 5), (torch.randn(4, 6),)),
    "no samples": lambda: (linear(6, 8, 5), (torch.randn(0, 6),)),
    "no images": lambda: (convolutions(), (torch.randn(0, 3, 8, 8),)),
    "nothing at all": lambda: (linear(0, 0, 0), (torch.randn(3, 0),)),
}


def subject_of(kind):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of layers that have nothing to initialize
        model, inputs = KINDS[kind]()
    return model, (*inputs, torch.tensor(2.0)), total


@pytest.fixture(scope="module", params=KINDS)
def race(request):
    found = Race(subject_of(request.param), kind="adam", steps=3)
    found.number = [*KINDS].index(request.param)
    return found


@pytest.fixture(scope="module", params=KINDS)
def outside_race(request):
    return Race(subject_of(request.param), outside=True, steps=3)


def test_the_kinds_have_tensors_without_elements(race):
    made = [each for call in race.program.calls for each in call.outputs]
    assert any(0 in each.shape for each in made)
    assert race.program.uncounted == (), "a plan knows of all that runs"


def test_every_policy_trains_to_the_bits_of_the_plain_loop(race):
    graph, costs = race.program.graph, race.costs
    plans = {plan.actions: plan for plan in (make_plan(graph, costs, None, policy) for policy in POLICIES)}
    assert plans
    for plan in plans.values():  # several policies make the same one
        moved = [target for kind, target in plan.actions if kind in (ActionKind.OFFLOAD, ActionKind.PREFETCH)]
        assert all(graph.sizes[target] for target in moved), "a copy of nothing takes time"
    for plan in [*plans.values()][race.number % 4 :: 4]:  # the other kinds train by the others
        race.check(race.fitted(plan))


@pytest.mark.parametrize("seed", range(2))
def test_random_plans_train_to_the_bits_of_the_plain_loop(race, seed):
    race.check(race.fitted(random_plan_in_parts(race.program.graph, race.costs, seed)))


@pytest.mark.parametrize("policy", ["checkpoint", "vdnn-ext-all-p"])
def test_the_loss_may_be_outside_of_the_step(outside_race, policy):
    outside_race.check(outside_race.fitted(policy))


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_measured_on_operands_without_elements(kind):
    model, inputs, loss = subject_of(kind)
    plain = copy.deepcopy(model)
    choices = "undivided" if kind in ("images", "no images") else None
    options = FitOptions(measured=True, convolutions=choices, debug=True)
    step = fit_subject(step_subject(model, inputs, loss, None), options)
    found = []
    for trained, call in ((plain, lambda *given: loss(plain(*given[:-1]), given[-1])), (model, step)):
        losses = train(call, torch.optim.SGD(trained.parameters(), lr=0.1), inputs, steps=2)
        found.append([*losses, *state_of(trained, None)])
    if not step.plan.configurations:
        assert_same_bits(*found)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)  # ucudnn's convolutions round otherwise, each element


def test_boxes_come_and_go():
    """A plan for five boxes, and one of its own for none."""
    model, (tokens, none, _), _ = subject_of("boxes")
    some = torch.randn(2, 5, 4)
    pair = Pair((model, (tokens, some), None), policy="checkpoint")

    def loop(model, call):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for boxes in (some, none, some, none):
            optimizer.zero_grad()
            loss = call(tokens, boxes)[0]
            loss.backward()
            optimizer.step()
            yield loss

    pair.check(loop)
    assert len(pair.step._others) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_recorded(kind):
    model, inputs, loss = subject_of(kind)
    step = TrainingStep(model=model, inputs=inputs[:-1], targets=inputs[-1:], loss=loss)
    traced = trace_step(step, kind, 4)
    assert min(traced.graph.sizes) > 0, "what has no bytes is no part of a record"
    assert traced.dispatched


def narrow():
    """Return a model for a recipe."""
    return subject_of("narrow")[0]


def test_a_recipe_is_recorded_and_measured():
    recipe = TrainingRecipe(model=f"{__name__}:narrow", batch=4, shape=(6,), optimizer="none")
    graph = record(recipe)
    measured, costs = record_measured(recipe, torch.device("cpu"), repeats=1)
    assert [each.kind for each in measured.operations] == [each.kind for each in graph.operations]
    assert len(costs.time_ms) == len(measured.operations)
