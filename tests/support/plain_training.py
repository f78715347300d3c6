"""A plain training loop and the same loop over a fitted step, for comparison to the bit."""

import copy

import torch

import ucudnn.memory
from tests.support.training_steps import training_step


def optimizer_of(kind, model):
    """Return a new optimizer: 'sgd' with momentum, or 'adam'."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def state_of(model, optimizer):
    """Return parameters, buffers and optimizer state as tensors."""
    found = [tensor.clone() for tensor in model.state_dict().values()]
    return found + [
        value.clone()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def train(call, optimizer, inputs, steps=5, seed=1):
    """Train, and return the losses; `call` returns the loss of inputs."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(*inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


class Race:
    """A step of a small network, trained plainly; fitted copies of it must train to the same bits.

    Args:
        name: as `training_step` has it, or a function that returns model, inputs, target and loss.
    """

    def __init__(self, name, kind="sgd", steps=5):
        torch.manual_seed(0)
        if callable(name):
            self.model, self.inputs, self.loss = name()
        else:
            step = training_step(name, optimizer=None)
            self.model, self.inputs, self.loss = step.model, (*step.inputs, *step.targets), step.loss
        self.kind, self.steps = kind, steps
        plain = copy.deepcopy(self.model)
        optimizer = optimizer_of(kind, plain)

        def called(*args):
            return self.loss(plain(*args[:-1]), args[-1])

        self.losses = train(called, optimizer, self.inputs, steps)
        self.state = state_of(plain, optimizer)

    def fitted(self, policy="auto", **options):
        """Return a fitted copy of the step and its optimizer."""
        model = copy.deepcopy(self.model)
        optimizer = optimizer_of(self.kind, model)
        step = ucudnn.memory.fit(model, self.inputs, loss=self.loss, optimizer=optimizer, policy=policy, **options)
        return step, optimizer

    def check(self, step, optimizer):
        """Train a fitted step and compare losses, parameters, buffers and optimizer state."""
        losses = train(step, optimizer, self.inputs, self.steps)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(losses, self.losses, strict=True))
        ours = state_of(step.model, optimizer)
        assert all(torch.equal(mine, plain) for mine, plain in zip(ours, self.state, strict=True))


class FixedPlan:
    """A policy whose plan is made by a function of graph and costs."""

    def __init__(self, make):
        self.make = make

    def plan(self, graph, costs, budget):
        return self.make(graph, costs)
