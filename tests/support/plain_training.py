"""A plain training loop, and the same loop over fitted steps, for comparison to the bit."""

import copy
from collections import Counter
from contextlib import nullcontext

import torch

from ucudnn.errors import UcudnnError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.torch.convolutions.convolution_choices import ConvolutionChoices
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.running.planned_run import PlannedRun
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program
from ucudnn.settings import Settings


def fit_plan(subject, program, plan, costs, *, debug=False):
    """Return a model that trains by a plan of its program, without a budget.

    Where the program has no functions for the plan's configurations, ucudnn with its default settings makes them.
    """
    if plan.configurations and not program.functions:
        program = ConvolutionChoices(program, Settings.load()).applied(plan.configurations)
    return FittedStep(subject, PlannedRun(program, plan, costs, debug=debug), costs)


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


def gradients_of(model):
    """Return a copy of each parameter's gradient; one without elements where there is none."""
    return [torch.empty(0) if each.grad is None else each.grad.clone() for each in model.parameters()]


def assert_same_bits(ours, plain):
    """Compare tensors or numbers one by one; what is no number is equal to itself."""
    for one, other in zip(ours, plain, strict=True):
        if torch.is_tensor(one) and torch.equal(one, other):
            continue
        assert repr(one.tolist() if torch.is_tensor(one) else one) == repr(
            other.tolist() if torch.is_tensor(other) else other
        )


def assert_trained_alike(plain, model, step, data, loss):
    """Train a model plainly and another one by its fitted step; losses, parameters and buffers are the same bits."""
    found = []
    for each, call in ((plain, lambda *args: loss(plain(*args[:-1]), args[-1])), (model, step)):
        losses = train(call, torch.optim.SGD(each.parameters(), lr=0.1), data)
        found.append([*losses, *state_of(each, None)])
    assert_same_bits(*found)


class Pair:
    """A model, and a copy of it that is fitted: loops train them one after the other, to the same bits.

    Args:
        subject: the model, its mini-batch as `fit` takes it, and the loss; None where loops compute one of the outputs.
        make: returns the optimizer of parameters, which `fit` counts; None for SGD, which it does not.
        options: of `fit`.
    """

    def __init__(self, subject, make=None, **options):
        self.plain, self.data, self.loss = subject
        self.model = copy.deepcopy(self.plain)
        self.make = make or (lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9))
        self.fit(**options, **({"optimizer": make(self.model.parameters())} if make else {}))

    def fit(self, **options):
        given = {"loss": self.loss, "policy": "vdnn-ext-all-p", "debug": True, **options}
        self.step = fit(self.model, self.data, **given)

    def called(self, *args, **kwargs):
        """Return what the plain model, or the loss of it, returns."""
        return self.plain(*args, **kwargs) if self.loss is None else self.loss(self.plain(*args[:-1]), args[-1])

    def check(self, loop=None):
        """Compare what a loop yields and leaves; it is given a model and what computes its loss."""
        found = []
        for model, call in ((self.model, self.step), (self.plain, self.called)):
            torch.manual_seed(1)
            yielded = [
                each.detach().clone() if torch.is_tensor(each) else each for each in (loop or self.steps)(model, call)
            ]
            assert yielded, "the loop yields nothing"
            found.append([*yielded, *gradients_of(model), *state_of(model, None)])
        assert_same_bits(*found)

    def steps(self, model, call, count=3):
        optimizer = self.make(model.parameters())
        for _ in range(count):
            optimizer.zero_grad()
            loss = call(*self.data)
            loss.backward()
            optimizer.step()
            yield loss
        yield from state_of(model, optimizer)

    def backward(self, _, call):
        """Yield the loss of one forward and its backward, without an update."""
        loss = call(*self.data)
        loss.backward()
        yield loss


class Race:
    """A step that was trained plainly; plans of it must train to the same bits.

    Args:
        subject: the model, its inputs with the target behind them, and the loss.
        kind: the optimizer.
        steps: how many steps are taken.
        outside: whether the caller computes the loss of the step's outputs.
        around: makes the context in which the loss is computed; backward and update come behind it.
        device: where the step is trained.
    """

    def __init__(self, subject, kind="sgd", steps=5, *, outside=False, around=nullcontext, device="cpu"):
        model, inputs, self.loss = subject
        self.model, self.inputs = model.to(device), tuple(each.to(device) for each in inputs)
        self.kind, self.steps, self.outside, self.around = kind, steps, outside, around
        self.before = copy.deepcopy(self.model.state_dict())
        self.losses, self.after = self.plain()
        self.optimizer = optimizer_of(kind, self.model)
        sample, inner = (self.inputs[:-1], None) if outside else (self.inputs, self.loss)
        self.subject = step_subject(self.model, sample, inner, self.optimizer)
        with around():
            self.program = trace_program(self.subject, "race", len(self.inputs[0]) or 1)
        self.costs = step_costs(self.program.graph, torch.device(device))

    def plain(self):
        """Train a copy of the model by a plain loop from the start; return losses, and the state after it."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.before)
        optimizer = optimizer_of(self.kind, model)
        losses = train(self.inside(self.called(model)), optimizer, self.inputs, self.steps)
        return losses, state_of(model, optimizer)

    def called(self, model):
        """Return what computes the loss of inputs by a model."""
        return lambda *args: self.loss(model(*args[:-1]), args[-1])

    def inside(self, call):
        """Return what calls a function in the context around the loss."""

        def called(*args):
            with self.around():
                return call(*args)

        return called

    def plan(self, policy, budget=None):
        return make_plan(self.program.graph, self.costs, budget, policy)

    def fitted(self, policy, budget=None, *, debug=True):
        plan = policy if hasattr(policy, "actions") else self.plan(policy, budget)
        return fit_plan(self.subject, self.program, plan, self.costs, debug=debug)

    def trained(self, step):
        """Train a fitted step from the start; return losses, parameters, buffers and optimizer state."""
        self.model.load_state_dict(self.before)
        self.model.zero_grad()
        self.optimizer = optimizer_of(self.kind, self.model)
        call = self.called(step) if self.outside else step
        losses = train(self.inside(call), self.optimizer, self.inputs, self.steps)
        return losses, state_of(self.model, self.optimizer)

    def check(self, step):
        """Train a fitted step from the start; compare losses, parameters, buffers and optimizer state."""
        losses, after = self.trained(step)
        assert_same_bits([*losses, *after], [*self.losses, *self.after])


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


def race_or_none(subject, **options):
    """Return a race; None where PyTorch itself refuses the step, as one that changes what its backward reads."""
    try:
        return Race(subject, **options)
    except UcudnnError:
        raise
    except RuntimeError:
        return None
