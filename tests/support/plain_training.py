"""A plain training loop, and the same loop over fitted steps, for comparison to the bit."""

import copy
from collections import Counter

import torch

from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.running.fit import fit_plan
from ucudnn.memory.torch.subject.step_arguments import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program


def optimizer_of(kind, model):
    """Return a new optimizer: 'sgd' with momentum, or 'adam'."""
    if kind is None:
        return None
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def state_of(model, optimizer):
    """Return parameters, buffers and optimizer state as tensors."""
    states = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    return [each.clone() for each in (*model.state_dict().values(), *states) if torch.is_tensor(each)]


def train(call, optimizer, inputs, steps=5, seed=1):
    """Train, and return the losses; `call` returns the loss of inputs."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        loss = call(*inputs)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def assert_trained_alike(plain, model, step, data, loss):
    """Train a model plainly and another one by its fitted step; losses, parameters and buffers are the same bits."""
    found = []
    for each, call in ((plain, lambda *args: loss(plain(*args[:-1]), args[-1])), (model, step)):
        losses = train(call, torch.optim.SGD(each.parameters(), lr=0.1), data)
        found.append([*losses, *state_of(each, None)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Race:
    """A step that was trained plainly; plans of it must train to the same bits.

    Args:
        subject: the model, its inputs with the target behind them, and the loss.
        kind: the optimizer.
        steps: how many steps are taken.
        outside: whether the caller computes the loss of the step's outputs.
        device: where the step is trained.
    """

    def __init__(self, subject, kind="sgd", steps=5, *, outside=False, device="cpu"):
        model, inputs, self.loss = subject
        self.model, self.inputs = model.to(device), tuple(each.to(device) for each in inputs)
        self.kind, self.steps, self.outside = kind, steps, outside
        self.before = copy.deepcopy(self.model.state_dict())
        self.losses, self.after = self.plain()
        self.optimizer = optimizer_of(kind, self.model)
        sample, inner = (self.inputs[:-1], None) if outside else (self.inputs, self.loss)
        self.subject = step_subject(self.model, sample, inner, self.optimizer)
        self.program = trace_program(self.subject, "race", len(self.inputs[0]) or 1)
        self.costs = step_costs(self.program.graph, torch.device(device))

    def plain(self):
        """Train a copy of the model by a plain loop from the start; return losses, and the state after it."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.before)
        optimizer = optimizer_of(self.kind, model)
        return train(self.called(model), optimizer, self.inputs, self.steps), state_of(model, optimizer)

    def called(self, model):
        """Return what computes the loss of inputs by a model."""
        return lambda *args: self.loss(model(*args[:-1]), args[-1])

    def fitted(self, policy, budget=None, *, debug=True):
        """Return the step by a policy's plan, or by a plan."""
        plan = policy if hasattr(policy, "actions") else make_plan(self.program.graph, self.costs, budget, policy)
        return fit_plan(self.subject, self.program, plan, self.costs, debug=debug)

    def trained(self, step):
        """Train a fitted step from the start; return losses, parameters, buffers and optimizer state."""
        self.model.load_state_dict(self.before)
        self.model.zero_grad()
        self.optimizer = optimizer_of(self.kind, self.model)
        call = self.called(step) if self.outside else step
        losses = train(call, self.optimizer, self.inputs, self.steps)
        return losses, state_of(self.model, self.optimizer)

    def check(self, step):
        """Train a fitted step from the start; compare losses, parameters, buffers and optimizer state."""
        losses, after = self.trained(step)
        assert [*map(float, losses)] == [*map(float, self.losses)]
        assert all(torch.equal(ours, plain) for ours, plain in zip(after, self.after, strict=True))


class CountedCopies:
    """Counts the copies of a fitted step while it is entered, by the name of the method."""

    def __init__(self, step):
        self.calls = Counter()
        self._run, self._transfers = step._run, step._run.transfers

    def __enter__(self):
        self._run.transfers = self
        return self

    def __exit__(self, *_):
        self._run.transfers = self._transfers

    def __getattr__(self, name):
        def called(*args):
            self.calls[name] += 1
            return getattr(self._transfers, name)(*args)

        return called
