"""Fitted steps in the training loops that people have: each trains to the bits of the plain model, or is refused."""

import copy
import math
import pickle
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import ucudnn.memory  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402
from tests.support.plain_training import state_of  # noqa: E402
from tests.support.small_networks import InPlace, small_network  # noqa: E402
from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError  # noqa: E402

POLICY = "vdnn-ext-all-p"


class Pair:
    """A model and a fitted copy of it, which loops train one after the other; `data` has a mini-batch and its labels.

    Args:
        options: of `fit`.
        model: the model and its mini-batch; a small network with batch normalization by default.
    """

    def __init__(self, model=None, **options):
        torch.manual_seed(0)
        self.plain, self.data, self.loss = model or small_network("inplace")
        self.model = copy.deepcopy(self.plain)
        self.step = ucudnn.memory.fit(
            self.model, self.data, loss=self.loss, **{"policy": POLICY, "debug": True, **options}
        )

    def check(self, loop):
        """Compare what a loop leaves and returns; it is given a model and what computes its loss."""
        found = []
        for model, call in ((self.plain, self.plain_loss), (self.model, self.step)):
            torch.manual_seed(1)
            found.append(
                ([str(float(torch.as_tensor(each).detach())) for each in loop(model, call)], state_of(model, None))
            )
        (plain, plain_state), (ours, our_state) = found
        assert plain, "the loop returned nothing"
        assert plain == ours
        assert all(torch.equal(*each) for each in zip(plain_state, our_state, strict=True))

    def plain_loss(self, *args):
        return self.loss(self.plain(*args[:-1]), args[-1])


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def test_scaled_losses_skip_the_steps_of_infinite_gradients():
    pair = Pair()
    scales = set()

    def loop(model, call):
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        for _ in range(6):
            optimizer.zero_grad()
            loss = call(*pair.data)
            scaler.scale(4 * loss).backward()
            scaler.unscale_(optimizer)
            yield nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            yield loss
            scales.add(scaler.get_scale())
            yield scaler.get_scale()

    pair.check(loop)
    assert min(scales) < 2.0**127, "no step was skipped"


@pytest.mark.parametrize("policy", ["stock", "checkpoint", POLICY])
def test_losses_without_backward_that_are_dropped_when_the_next_one_is_there(policy):
    pair = Pair(small_network("unet"), policy=policy)

    def loop(model, call):
        optimizer = sgd(model)
        for number in range(6):
            loss = call(*pair.data)  # the loss before goes only now, after this one's forward
            yield loss
            if number % 2:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    pair.check(loop)


@pytest.mark.parametrize("policy", ["stock", "checkpoint", POLICY])
def test_autocast_around_the_call(policy):
    torch.manual_seed(0)
    subject = small_network("inplace")
    with torch.autocast("cpu", torch.bfloat16):
        pair = Pair(subject, policy=policy)

    def loop(model, call):
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(*pair.data)
            loss.backward()
            optimizer.step()
            yield loss

    pair.check(loop)


def test_schedules_clipping_decay_and_averages():
    pair = Pair(optimizer=None)

    def loop(model, call):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        for _ in range(5):
            optimizer.zero_grad()
            loss = call(*pair.data)
            loss.backward()
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            yield loss
        yield from (each.sum() for each in average.state_dict().values())

    pair.check(loop)


def test_several_optimizers_and_a_group_added_later():
    subject = small_network("inplace")
    model = subject[0]
    counted = [sgd(model.first), torch.optim.Adam([*model.second.parameters(), *model.fc.parameters()])]
    alone, both = (
        ucudnn.memory.fit(model, subject[1], loss=subject[2], optimizer=each, policy="stock")
        for each in (counted[:1], counted)
    )
    parts = [[line for line in step.report().splitlines() if "optimizer state" in line] for step in (alone, both)]
    assert parts[0] != parts[1] != []
    pair = Pair()

    def loop(model, call):
        first, second = sgd(model.first), torch.optim.Adam(model.fc.parameters())
        for number in range(4):
            first.zero_grad()
            second.zero_grad()
            loss = call(*pair.data)
            loss.backward()
            first.step()
            second.step()
            if number == 1:
                second.add_param_group({"params": [*model.second.parameters()], "lr": 0.1})
            yield loss

    pair.check(loop)


def three_steps(pair, model, call):
    """Yield the losses of three plain steps."""
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(*pair.data)
        loss.backward()
        optimizer.step()
        yield loss


def enlarge(model):
    weight = model.first[0].weight
    weight.data = torch.randn(weight.shape[0] + 1, *weight.shape[1:])


CHANGES = [
    (lambda model: model.to(memory_format=torch.channels_last), r"first\.0\.weight is .* strides .*, and had strides "),
    (enlarge, r"first\.0\.weight is .*, and had strides "),
    (lambda model: model.to("meta"), "first"),
    (lambda model: model.double(), r"first\.0\.weight is "),
    (lambda model: model.first[0].register_forward_hook(lambda *_: None), "the model has other hooks"),
    (lambda model: model.first.register_forward_pre_hook(lambda *_: None), "the model has other hooks"),
    (lambda model: model.register_full_backward_hook(lambda *_: None), "the model has other hooks"),
    (lambda model: model.first.__setitem__(0, nn.Identity()), "the model has other modules"),
    (lambda model: model.first.append(nn.Tanh()), "the model has other modules"),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_model_that_was_changed_since_the_fit_is_refused(number):
    pair = Pair()
    change, message = CHANGES[number]
    change(pair.model)
    with pytest.raises(InvalidValueError, match=f"{message}.*fit it again"):
        pair.step(*pair.data)


class Constants(nn.Module):
    """A model with constants of modules in its numbers: of PyTorch's, of one that derives from them, and of its own."""

    __constants__ = ("scale",)

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.inner = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), type("Own", (nn.LeakyReLU,), {})(0.1))

    def forward(self, x):
        return self.inner(x) * self.scale


def constants():
    torch.manual_seed(0)
    return Constants(), (torch.randn(4, 8), torch.randint(6, (4,))), torch.nn.functional.cross_entropy


CONSTANTS = [
    ("inner.2.negative_slope", lambda model: setattr(model.inner[2], "negative_slope", 0.9), "0.9 now, and was 0.1"),
    ("inner.1.momentum", lambda model: setattr(model.inner[1], "momentum", 0.5), "0.5 now, and was 0.1"),
    ("scale", lambda model: setattr(model, "scale", 3.0), "3.0 now, and was 2.0"),
]


@pytest.mark.parametrize(("name", "change", "values"), CONSTANTS, ids=lambda given: given if "." in str(given) else "")
def test_a_constant_of_a_module_that_changed_since_the_fit_is_refused(name, change, values):
    pair = Pair(constants())
    change(pair.model)
    with pytest.raises(InvalidValueError, match=rf"^{name} is {values} when the step was fitted: fit it again"):
        pair.step(*pair.data)
    change(pair.plain)
    pair.step = ucudnn.memory.fit(pair.model, pair.data, loss=pair.loss, policy=POLICY, debug=True)
    pair.check(lambda model, call: three_steps(pair, model, call))


class Branches(nn.Module):
    """A model whose numbers depend on the type and the sign of an argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x, value):
        return self.linear(x) * (2 if value is True else 3 if isinstance(value, float) else 4) * math.copysign(1, value)


@pytest.mark.parametrize(("sample", "other"), [(1, True), (True, 1), (1, 1.0), (0.0, -0.0)], ids=str)
def test_equal_values_of_other_types_or_signs_are_other_arguments(sample, other):
    model, x = Branches(), torch.randn(4, 8)
    step = ucudnn.memory.fit(model, (x, sample), policy=POLICY)
    assert torch.equal(step(x, sample), model(x, sample))
    assert not torch.equal(model(x, other), model(x, sample))
    with pytest.raises(InvalidValueError, match=f"argument 1 is the value {other}, and the step was fitted to the"):
        step(x, other)


def test_a_value_that_is_no_number_is_equal_to_itself():
    model, x = Branches(), torch.randn(4, 8)
    step = ucudnn.memory.fit(model, (x, float("nan")), policy=POLICY)
    assert torch.equal(step(x, float("nan")), model(x, float("nan")))


def test_channels_last_after_a_fit_trains_to_the_same_bits_after_another_one():
    pair = Pair()
    for model in (pair.model, pair.plain):
        model.to(memory_format=torch.channels_last)
    pair.step = ucudnn.memory.fit(pair.model, pair.data, loss=pair.loss, policy=POLICY, debug=True)
    pair.check(lambda model, call: three_steps(pair, model, call))


def test_frozen_layers_need_another_fit_which_trains_to_the_same_bits():
    pair = Pair()
    pair.model.first.requires_grad_(False)
    with pytest.raises(InvalidValueError, match=r"first\.0\.weight needs no gradient now.*fit it again"):
        pair.step(*pair.data)
    pair.plain.first.requires_grad_(False)
    pair.step = ucudnn.memory.fit(pair.model, pair.data, loss=pair.loss, policy=POLICY, debug=True)

    pair.check(lambda model, call: three_steps(pair, model, call))
    assert all(each.grad is None for each in pair.model.first.parameters())


@pytest.mark.parametrize("policy", ["checkpoint", POLICY])
def test_micro_steps_add_up_and_count_when_the_plan_is_told(policy):
    pair = Pair(policy=policy, keep_gradients=True)

    def loop(model, call):
        optimizer = sgd(model)
        for number in range(6):
            loss = call(*pair.data) / 3
            loss.backward()
            yield loss
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    pair.check(loop)
    size = sum(each.nbytes for each in pair.model.parameters())
    freed = ucudnn.memory.fit(pair.model, pair.data, loss=pair.loss, policy=policy)
    assert pair.step.simulation.peak_bytes == freed.simulation.peak_bytes + size
    assert "gradients of earlier steps" in pair.step.report()
    budget = freed.simulation.peak_bytes
    with pytest.raises(BudgetError):
        ucudnn.memory.fit(pair.model, pair.data, loss=pair.loss, policy="stock", budget=budget, keep_gradients=True)


def test_kept_gradients_that_the_budget_does_not_count_are_told_once():
    pair = Pair(policy="stock", budget="10MiB")
    pair.step(*pair.data).backward()
    with pytest.warns(UserWarning, match=r"call zero_grad\(\) before the step, or fit\(\.\.\., keep_gradients=True\)"):
        pair.step(*pair.data).backward()
    kept = Pair(policy="stock", budget="10MiB", keep_gradients=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.step(*pair.data).backward()
        for _ in range(2):
            kept.step(*kept.data).backward()


def test_evaluation_between_steps():
    pair = Pair()
    x, y = pair.data

    def loop(model, call):
        optimizer, whole = sgd(model), pair.step if call is pair.step else model
        for _ in range(3):
            optimizer.zero_grad()
            loss = call(x, y)
            loss.backward()
            optimizer.step()
            yield loss
            whole.eval()
            with torch.no_grad():
                yield call(x[:3], y[:3])
                yield (pair.step(x) if call is pair.step else model(x)).sum()  # the model's output
            with torch.inference_mode():
                yield model(x).sum()
            whole.train()

    pair.check(loop)


RESUMED = """
import sys
import torch
import ucudnn.memory
from tests.support.small_networks import InPlace

saved = torch.load(sys.argv[1])
model = InPlace()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
step = ucudnn.memory.fit(
    model, saved["data"], loss=torch.nn.functional.cross_entropy, optimizer=optimizer, policy="checkpoint"
)
for _ in range(2):
    optimizer.zero_grad()
    step(*saved["data"]).backward()
    optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""


def test_a_saved_run_is_resumed_in_another_process(tmp_path):
    pair = Pair()

    def take(model, call, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            call(*pair.data).backward()
            optimizer.step()

    optimizer = sgd(pair.model)
    take(pair.model, pair.step, optimizer, 2)
    path = tmp_path / "checkpoint.pt"
    saved = {"model": pair.model.state_dict(), "optimizer": optimizer.state_dict(), "data": pair.data}
    torch.save(saved, path)
    subprocess.run([sys.executable, "-c", RESUMED, str(path)], cwd=ROOT, check=True)
    take(pair.plain, pair.plain_loss, sgd(pair.plain), 4)
    resumed = torch.load(path)
    assert all(torch.equal(each, resumed[key]) for key, each in pair.plain.state_dict().items())
    pair.step.load_state_dict({f"model.{key}": value for key, value in resumed.items()})
    assert all(torch.equal(each, resumed[key]) for key, each in pair.model.state_dict().items())


def test_copies_and_pickles_of_a_fitted_step_are_refused_with_what_to_do():
    step = Pair(policy="stock").step
    for way in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(InvalidValueError, match="copy its model, and fit the copy"):
            way(step)
    for way in (copy.copy, pickle.dumps):
        with pytest.raises(InvalidValueError, match=r"save step\.model\.state_dict\(\)"):
            way(step)
    with pytest.raises(InvalidValueError, match="use DistributedDataParallel"):
        step._replicate_for_data_parallel()


def test_a_smaller_last_mini_batch_has_a_plan_of_its_own_within_the_budget():
    stock = Pair(policy="stock").step.simulation.peak_bytes
    budget = int(0.9 * stock)
    pair = Pair(policy="auto", budget=budget)
    x, y = pair.data

    def loop(model, call):
        optimizer = sgd(model)
        for _ in range(2):
            for size in (4, 4, 3):
                optimizer.zero_grad()
                loss = call(x[:size], y[:size])
                loss.backward()
                optimizer.step()
                yield loss

    pair.check(loop)
    (other,) = pair.step._others
    assert other.plan.graph.batch == 3
    assert other.simulation.peak_bytes <= budget
    assert f"mini-batch 3: policy {other.plan.policy}, peak predicted" in pair.step.report()


def test_sizes_are_planned_until_there_are_too_many():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    step = ucudnn.memory.fit(model, torch.randn(9, 6), policy=POLICY, debug=True)
    for size in (8, 7, 6, 5, 8):
        assert step(torch.randn(size, 6)).shape == (size, 1)
    with pytest.raises(InvalidValueError, match=r"plans for 4 other sizes .* argument 0 is 4x6 .* or pad them"):
        step(torch.randn(4, 6))
    with pytest.raises(InvalidValueError, match=r"argument 0 is 10x6 .* fitted to 9x6 .*: fit it again"):
        step(torch.randn(10, 6))
    step.close()
    with pytest.raises(InvalidValueError, match="closed"):
        step(torch.randn(8, 6)).sum().backward()


def test_the_sample_is_not_held():
    model, (x, y), loss = small_network("inplace")
    step = ucudnn.memory.fit(model, (x, y), loss=loss, policy="stock")
    alive = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    del x, y
    assert alive.expired()
    assert step.plan.policy == "stock"


class Named(NamedTuple):
    loss: Any
    logits: Any


@dataclass(frozen=True)
class Fields:
    loss: Any
    logits: Any
    scale: float = 1.0


class Attributes(OrderedDict):
    """A dictionary whose values are attributes, too."""

    def __getattr__(self, name):
        return self[name]


class Tagger(nn.Module):
    """A model as libraries have them: keyword arguments, a loss if there are labels, an object with attributes."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.kind = kind

    def forward(self, input_ids=None, attention_mask=None, *, labels=None):
        logits = self.head(torch.tanh(self.embedding(input_ids)) * attention_mask[..., None])
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self.kind(loss=loss, logits=logits)


@pytest.mark.parametrize("kind", [Named, Fields, Attributes, dict])
def test_keyword_arguments_and_outputs_with_attributes(kind):
    torch.manual_seed(0)
    plain = Tagger(kind)
    model = copy.deepcopy(plain)
    batch = {"input_ids": torch.randint(20, (3, 5)), "attention_mask": torch.ones(3, 5)}
    batch["labels"] = torch.randint(20, (3, 5))
    step = ucudnn.memory.fit(model, batch, policy="checkpoint", debug=True)
    ids, mask, labels = batch.values()
    calls = (
        lambda call: call(**batch),
        lambda call: call(labels=labels, attention_mask=mask, input_ids=ids),
        lambda call: call(ids, mask, labels=labels),
    )
    for trained, call in ((plain, plain), (model, step)):
        optimizer = sgd(trained)
        for given in calls:
            optimizer.zero_grad()
            found = given(call)
            assert type(found) is kind
            loss = found["loss"] if kind is dict else found.loss
            loss.backward()
            optimizer.step()
            assert (found["logits"] if kind is dict else found.logits).shape == (3, 5, 20)
    assert all(torch.equal(*each) for each in zip(state_of(plain, None), state_of(model, None), strict=True))
    other = step(**batch)
    assert other is not found
    with pytest.raises(InvalidValueError, match="with 0 arguments and input_ids, labels by name"):
        step(input_ids=ids, labels=labels)


def test_an_output_that_hides_tensors_is_refused():
    with pytest.raises(StepGraphError, match="returns a SimpleNamespace, which holds tensors"):
        ucudnn.memory.fit(Tagger(SimpleNamespace), {"input_ids": torch.zeros(1, 2, dtype=torch.long)} | _rest())


def _rest():
    return {"attention_mask": torch.ones(1, 2), "labels": torch.zeros(1, 2, dtype=torch.long)}


def test_positional_samples_take_names():
    model = nn.Bilinear(3, 4, 2)
    first, second = torch.randn(5, 3), torch.randn(5, 4)
    step = ucudnn.memory.fit(model, (first, second), policy="stock", debug=True)
    assert torch.equal(step(input2=second, input1=first), model(first, second))
    assert torch.equal(step(first, input2=second), step(first, second))


def test_losses_of_each_sample():
    torch.manual_seed(0)
    model, data, _ = small_network("inplace")
    pair = Pair((model, data, nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)))

    def loop(model, call):
        losses = call(*pair.data)
        losses.sort().values[:2].mean().backward()
        yield from (parameter.grad.sum() for parameter in model.parameters())

    pair.check(loop)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_step_runs_its_plan_and_a_compiled_model_is_refused():
    pair = Pair(policy="checkpoint")
    compiled = torch.compile(pair.step, backend="aot_eager")
    gradients = []
    for call in (pair.plain_loss, compiled):
        loss = call(*pair.data)
        loss.backward()
        gradients.append(loss.detach())
    assert torch.equal(*gradients)
    assert pair.step._run.forwards == 1, "the plan did not run"
    for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)
    with pytest.raises(InvalidValueError, match=r"the model is compiled.*without torch\.compile"):
        ucudnn.memory.fit(torch.compile(pair.model), pair.data, loss=pair.loss)
    model = InPlace()
    model.second.compile()
    with pytest.raises(InvalidValueError, match="module 'second' is compiled"):
        ucudnn.memory.fit(model, pair.data, loss=pair.loss)


@pytest.mark.parametrize("policy", ["checkpoint", POLICY])
def test_channels_last(policy):
    torch.manual_seed(0)
    model, (x, y), loss = small_network("unet")
    last = torch.channels_last
    pair = Pair((model.to(memory_format=last), (x.contiguous(memory_format=last), y), loss), policy=policy)

    def loop(model, call):
        for loss in three_steps(pair, model, call):
            yield loss
            yield from (stride for each in model.parameters() for stride in each.grad.stride())

    pair.check(loop)
    assert torch.equal(pair.step(x.contiguous(), y), pair.step(*pair.data))  # a plan of its own


@pytest.mark.parametrize("policy", ["checkpoint", POLICY])
def test_two_fitted_models_play_against_each_other(policy):
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    noise, real, one, zero = torch.randn(6, 4), torch.randn(6, 8), torch.ones(6, 1), torch.zeros(6, 1)
    fool = functional.binary_cross_entropy_with_logits
    plain = copy.deepcopy((maker, judge))
    made = ucudnn.memory.fit(maker, noise, policy=policy, debug=True)
    judged = ucudnn.memory.fit(judge, (real, one), loss=fool, policy=policy, debug=True)
    ways = ((*plain, plain[0], lambda x, y: fool(plain[1](x), y)), (maker, judge, made, judged))
    for first, second, make, judge_it in ways:
        optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (first, second)]
        for _ in range(3):
            optimizers[1].zero_grad()
            fake = make(noise)
            judge_it(real, one).backward()
            judge_it(fake.detach(), zero).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judge_it(fake, one).backward()  # the judge's input needs a gradient: a plan of its own
            optimizers[0].step()
    ours, theirs = (state_of(nn.ModuleList(each), None) for each in ((maker, judge), plain))
    assert all(torch.equal(*each) for each in zip(ours, theirs, strict=True))
    assert judged._others


class Images(torch.utils.data.Dataset):
    """Eleven images with labels: the last mini-batch of four has three."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator), index % 5


def test_a_loop_as_in_torchvisions_references():
    """Criterion outside of the model, autocast, scaler, clipping, warm-up, averaged model, accuracy, evaluation."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Images(), batch_size=4)
    plain, model = (small_network("inplace")[0] for _ in range(2))
    model.load_state_dict(plain.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        step = ucudnn.memory.fit(model, next(iter(loader))[0], policy="checkpoint", debug=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    found = []
    for trained, call in ((plain, plain), (model, step)):
        optimizer = sgd(trained, weight_decay=1e-4)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        scaler, average = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.swa_utils.AveragedModel(trained)
        figures = []
        for _ in range(2):
            trained.train()
            for image, target in loader:
                with torch.autocast("cpu", torch.bfloat16):
                    output = call(image)
                    loss = criterion(output, target)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                warm_up.step()
                average.update_parameters(trained)
                figures += [loss.item(), int((output.argmax(1) == target).sum())]
            trained.eval()
            with torch.inference_mode():
                figures += [criterion(call(image), target).item() for image, target in loader]
        found.append((figures, state_of(average, None) + state_of(trained, None)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*each) for each in zip(found[0][1], found[1][1], strict=True))
    assert [other.plan.graph.batch for other in step._others] == [3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model=None is no torch.nn.Module"),
        ({"model": torch.relu}, "is no torch.nn.Module"),
        ({"policy": 5}, "policy=5 is no policy: give 'auto', a name or an object with a method plan"),
        ({"policy": None}, "policy=None is no policy"),
        ({"policy": ["auto"]}, "is no policy"),
        ({"policy": nn.Linear}, "is no policy"),
        ({"policy": "Auto"}, "policy 'Auto' is not known"),
        ({"budget": -1}, "size -1 is negative"),
        ({"budget": True}, "size True cannot be read"),
        ({"budget": float("nan")}, "size nan cannot be read"),
        ({"host_memory": 1.5}, "size 1.5 cannot be read"),
        ({"loss": 5}, "loss=5 cannot be called"),
        ({"loss": "cross-entropy"}, "loss='cross-entropy' cannot be called"),
        ({"optimizer": 5}, "optimizer=5 is no torch.optim.Optimizer"),
        ({"optimizer": torch.optim.SGD}, "SGD'> is no torch.optim.Optimizer"),
        ({"optimizer": ["sgd"]}, "optimizer='sgd' is no torch.optim.Optimizer"),
        ({"convolutions": {"plans": "p.json"}}, "plans have no effect in convolutions="),
        ({"convolutions": {"plans": "p.json", "strict": True}}, "plans and strict have no effect in convolutions="),
        ({"convolutions": 5}, "convolutions=5: give a batch-size policy"),
        ({"sample": (torch.ones(4, 8).numpy(), torch.zeros(4))}, "argument 0 of the sample is a NumPy array"),
        ({"sample": (torch.ones(4, 8), torch.zeros(4).numpy())}, "argument 1 of the sample is a NumPy array"),
    ],
)
def test_what_is_none_of_its_arguments_is_refused_by_name(changes, message):
    model, sample, loss = constants()
    with pytest.raises(InvalidValueError, match=re.escape(message)) as caught:
        ucudnn.memory.fit(**{"model": model, "sample": sample, "loss": loss} | changes)
    assert "\n" not in str(caught.value)


def test_an_unknown_policy_is_refused_before_anything_is_traced(monkeypatch):
    model, sample, loss = constants()
    model.forward = None  # whoever traces it fails
    with pytest.raises(InvalidValueError, match="policy 'magic' is not known"):
        ucudnn.memory.fit(model, sample, loss, policy="magic")


def test_a_numpy_array_in_a_step_is_refused_by_name():
    pair = Pair(constants())
    with pytest.raises(InvalidValueError, match="an argument of the step is a NumPy array"):
        pair.step(pair.data[0], pair.data[1].numpy())
