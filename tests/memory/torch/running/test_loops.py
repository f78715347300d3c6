"""Fitted steps in the training loops that people have: each trains to the bits of the plain model, or is refused."""

import copy
import math
import pickle
import re
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.plain_training import Pair, assert_same_bits, state_of
from tests.support.small_networks import InPlace, small_network
from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError
from ucudnn.memory import fit

POLICY = "vdnn-ext-all-p"


def small(name="inplace"):
    torch.manual_seed(0)
    return small_network(name)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def test_scaled_losses_skip_the_steps_of_infinite_gradients():
    pair, scales = Pair(small()), set()

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
            scales.add(scaler.get_scale())
            yield from (loss, scaler.get_scale())

    pair.check(loop)
    assert min(scales) < 2.0**127, "no step was skipped"


@pytest.mark.parametrize("policy", ["stock", "checkpoint", POLICY])
def test_losses_without_backward_that_are_dropped_when_the_next_one_is_there(policy):
    pair = Pair(small("unet"), policy=policy)

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
    around = torch.autocast("cpu", torch.bfloat16)
    with around:
        pair = Pair(small(), policy=policy)
    pair.check(lambda model, call: pair.steps(model, around(call)))


def test_schedules_clipping_decay_and_averages():
    pair = Pair(small(), optimizer=None)

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
        yield from average.state_dict().values()

    pair.check(loop)


def test_several_optimizers_and_a_group_added_later():
    pair = Pair(small())
    model, lines = pair.model, []
    counted = [sgd(model.first), torch.optim.Adam([*model.second.parameters(), *model.fc.parameters()])]
    for each in (counted[:1], counted):
        report = fit(model, pair.data, loss=pair.loss, optimizer=each, policy="stock").report()
        lines.append([line for line in report.splitlines() if "optimizer state" in line])
    assert lines[0] != lines[1] != []

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


def enlarge(model):
    weight = model.first[0].weight
    weight.data = torch.randn(weight.shape[0] + 1, *weight.shape[1:])


def hooked(register):
    return lambda model: register(model)(lambda *_: None)


HOOKS, MODULES = "the model has other hooks", "the model has other modules"
CHANGES = [
    (lambda model: model.to(memory_format=torch.channels_last), r"first\.0\.weight is .* strides .*, and had strides "),
    (lambda model: model.first.requires_grad_(False), r"first\.0\.weight needs no gradient now, and did"),
    (lambda model: model.first[1].eval(), "module 'first.1' was in training mode when the step was fitted"),
    (lambda model: setattr(model.fc, "bias", None), "fc.bias is another tensor than"),
    (enlarge, r"first\.0\.weight is .*, and had strides "),
    (lambda model: model.to("meta"), "first"),
    (lambda model: model.double(), r"first\.0\.weight is "),
    (hooked(lambda model: model.first[0].register_forward_hook), HOOKS),
    (hooked(lambda model: model.first.register_forward_pre_hook), HOOKS),
    (hooked(lambda model: model.register_full_backward_hook), HOOKS),
    (lambda model: model.first.__setitem__(0, nn.Identity()), MODULES),
    (lambda model: model.first.append(nn.Tanh()), MODULES),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_model_that_was_changed_since_the_fit_is_refused(number):
    pair = Pair(small())
    change, message = CHANGES[number]
    change(pair.model)
    with pytest.raises(InvalidValueError, match=f"{message}.*fit it again"):
        pair.step(*pair.data)
    if number < 2:
        change(pair.plain)
        pair.fit()
        pair.check()


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 6), (torch.randn(4, 8), torch.randint(6, (4,))), functional.cross_entropy


class Branches(nn.Module):
    """A model whose numbers depend on the type and the sign of an argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x, value):
        return self.linear(x) * (2 if value is True else 3 if isinstance(value, float) else 4) * math.copysign(1, value)


@pytest.mark.parametrize(("sample", "other"), [(1, True), (True, 1), (1, 1.0), (0.0, -0.0), (math.nan, None)], ids=str)
def test_equal_values_of_other_types_or_signs_are_other_arguments(sample, other):
    model, x = Branches(), torch.randn(4, 8)
    step = fit(model, (x, sample), policy=POLICY)
    assert torch.equal(step(x, sample), model(x, sample))
    if other is not None:  # what is no number is equal to itself
        assert not torch.equal(model(x, other), model(x, sample))
        with pytest.raises(InvalidValueError, match=f"argument 1 is the value {other}, and the step was fitted to the"):
            step(x, other)


@pytest.mark.parametrize("policy", ["checkpoint", POLICY])
def test_micro_steps_add_up_and_count_when_the_plan_is_told(policy):
    pair = Pair(small(), policy=policy, keep_gradients=True)

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
    freed = fit(pair.model, pair.data, loss=pair.loss, policy=policy).simulation.peak_bytes
    assert pair.step.simulation.peak_bytes == freed + size
    assert "gradients of earlier steps" in pair.step.report()
    with pytest.raises(BudgetError):
        fit(pair.model, pair.data, loss=pair.loss, policy="stock", budget=freed, keep_gradients=True)


def test_kept_gradients_that_the_budget_does_not_count_are_told_once():
    pair, kept = (Pair(small(), policy="stock", budget="10MiB", keep_gradients=keeps) for keeps in (False, True))
    pair.step(*pair.data).backward()
    with pytest.warns(UserWarning, match=r"call zero_grad\(\) before the step, or fit\(\.\.\., keep_gradients=True\)"):
        pair.step(*pair.data).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (pair, kept, kept):
            each.step(*each.data).backward()


def test_evaluation_and_calls_without_gradients_between_steps():
    pair = Pair(small())
    x, y = pair.data

    def loop(model, call):
        optimizer, whole = sgd(model), pair.step if call is pair.step else model
        for _ in range(3):
            optimizer.zero_grad()
            loss = call(x, y)
            loss.backward()
            optimizer.step()
            yield loss
            with torch.no_grad():
                yield call(x[:2], y[:2])  # in training mode, too
                whole.eval()
                yield call(x[:3], y[:3])
                yield pair.step(x) if call is pair.step else model(x)  # the model's output
            with torch.inference_mode():
                yield model(x).sum().item()
            yield call(x[:1], y[:1])
            whole.train()

    pair.check(loop)


def test_a_saved_run_is_resumed_by_another_model(tmp_path):
    pair, path = Pair(small()), tmp_path / "checkpoint.pt"

    def take(model, call, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            call(*pair.data).backward()
            optimizer.step()
        return model.state_dict()

    optimizer = sgd(pair.model)
    torch.save({"model": take(pair.model, pair.step, optimizer), "optimizer": optimizer.state_dict()}, path)
    saved, other = torch.load(path), InPlace()
    optimizer = sgd(other)
    other.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = fit(other, pair.data, loss=pair.loss, optimizer=optimizer, policy="checkpoint")
    resumed, optimizer = take(other, step, optimizer), sgd(pair.plain)
    for _ in range(2):
        take(pair.plain, pair.called, optimizer)
    assert_same_bits(resumed.values(), pair.plain.state_dict().values())
    pair.step.load_state_dict({f"model.{key}": value for key, value in resumed.items()})
    assert_same_bits(pair.model.state_dict().values(), resumed.values())


def test_copies_and_pickles_of_a_fitted_step_are_refused_with_what_to_do():
    step = Pair(small(), policy="stock").step
    for way, message in (
        (copy.deepcopy, "copy its model, and fit the copy"),
        (torch.optim.swa_utils.AveragedModel, "copy its model, and fit the copy"),
        (copy.copy, r"save step\.model\.state_dict\(\)"),
        (pickle.dumps, r"save step\.model\.state_dict\(\)"),
        (lambda step: step._replicate_for_data_parallel(), "use DistributedDataParallel"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            way(step)


def test_a_smaller_last_mini_batch_has_a_plan_of_its_own_within_the_budget():
    budget = int(0.9 * Pair(small(), policy="stock").step.simulation.peak_bytes)
    pair = Pair(small(), policy="auto", budget=budget)
    x, y = pair.data

    def loop(model, call):
        optimizer = sgd(model)
        for size in (4, 4, 3) * 2:
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
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    step = fit(model, torch.randn(9, 6), policy=POLICY, debug=True)
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
    model, (x, y), loss = small()
    step = fit(model, (x, y), loss=loss, policy="stock")
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


def tagged():
    torch.manual_seed(0)
    ids, labels = torch.randint(20, (2, 3, 5))
    return {"input_ids": ids, "attention_mask": torch.ones(3, 5), "labels": labels}


@pytest.mark.parametrize("kind", [Named, Fields, Attributes, dict])
def test_keyword_arguments_and_outputs_with_attributes(kind):
    batch = tagged()
    pair = Pair((Tagger(kind), batch, None), policy="checkpoint")
    ids, mask, labels = batch.values()

    def loop(model, call):
        optimizer = sgd(model)
        for args, kwargs in (((), batch), ((), dict(reversed(batch.items()))), ((ids, mask), {"labels": labels})):
            optimizer.zero_grad()
            found = call(*args, **kwargs)
            assert type(found) is kind
            values = (
                found
                if kind is dict
                else vars(found)
                if kind is Fields
                else found._asdict()
                if kind is Named
                else found
            )
            values["loss"].backward()
            optimizer.step()
            yield from (values["loss"], values["logits"])

    pair.check(loop)
    assert pair.step(**batch) is not pair.step(**batch)
    with pytest.raises(InvalidValueError, match="with 0 arguments and input_ids, labels by name"):
        pair.step(input_ids=ids, labels=labels)


def test_an_output_that_hides_tensors_is_refused():
    with pytest.raises(StepGraphError, match="returns a SimpleNamespace, which holds tensors"):
        fit(Tagger(SimpleNamespace), tagged())


def test_positional_samples_take_names():
    model = nn.Bilinear(3, 4, 2)
    first, second = torch.randn(5, 3), torch.randn(5, 4)
    step = fit(model, (first, second), policy="stock", debug=True)
    assert torch.equal(step(input2=second, input1=first), model(first, second))
    assert torch.equal(step(first, input2=second), step(first, second))


def test_losses_of_each_sample():
    model, data, _ = small()
    pair = Pair((model, data, nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)))

    def loop(model, call):
        losses = call(*pair.data)
        losses.sort().values[:2].mean().backward()
        yield losses

    pair.check(loop)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_step_runs_its_plan_and_the_module_in_a_compiled_one_is_fitted():
    pair = Pair(small(), policy="checkpoint")
    step = pair.step
    pair.step = torch.compile(step, backend="aot_eager")
    pair.check(pair.backward)
    assert step._run.forwards == 1, "the plan did not run"
    assert fit(torch.compile(pair.model), pair.data, loss=pair.loss).model is pair.model
    model = InPlace()
    model.second.compile()
    with pytest.raises(InvalidValueError, match="module 'second' is compiled"):
        fit(model, pair.data, loss=pair.loss)


@pytest.mark.parametrize("policy", ["checkpoint", POLICY])
def test_channels_last(policy):
    model, (x, y), loss = small("unet")
    last = torch.channels_last
    pair = Pair((model.to(memory_format=last), (x.contiguous(memory_format=last), y), loss), policy=policy)

    def loop(model, call):
        for loss in pair.steps(model, call):
            yield loss
            yield from (each.grad.stride() for each in model.parameters())

    pair.check(loop)
    assert torch.equal(pair.step(x.contiguous(), y), pair.step(*pair.data))  # a plan of its own


@pytest.mark.parametrize("policy", ["checkpoint", POLICY])
def test_two_fitted_models_play_against_each_other(policy):
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    noise, real, one, zero = torch.randn(6, 4), torch.randn(6, 8), torch.ones(6, 1), torch.zeros(6, 1)
    made = Pair((maker, (noise,), None), policy=policy)
    judged = Pair((judge, (real, one), functional.binary_cross_entropy_with_logits), policy=policy)

    def loop(maker, make):
        judge, judge_it = (judged.model, judged.step) if make is made.step else (judged.plain, judged.called)
        optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (maker, judge)]
        for _ in range(3):
            optimizers[1].zero_grad()
            fake = make(noise)
            judge_it(real, one).backward()
            judge_it(fake.detach(), zero).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judge_it(fake, one).backward()  # the judge's input needs a gradient: a plan of its own
            optimizers[0].step()
        yield from state_of(judge, None)

    made.check(loop)
    assert judged.step._others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model=None is no torch.nn.Module"),
        ({"model": torch.relu}, "is no torch.nn.Module"),
        ({"policy": 5}, "policy=5 is no policy: give 'auto', a name, 'module:Class' or an object with a method"),
        ({"policy": None}, "policy=None is no policy"),
        ({"policy": ["auto"]}, "is no policy"),
        ({"policy": nn.Linear}, "is no policy"),
        ({"policy": "Auto"}, "policy 'Auto' is not known"),
        ({"budget": -1}, "size -1 is negative"),
        ({"budget": True}, "size True cannot be read"),
        ({"budget": float("nan")}, "size 'nan' cannot be read"),
        ({"host_memory": 1.5}, "size 1.5 cannot be read"),
        ({"loss": 5}, "loss=5 cannot be called"),
        ({"loss": "cross-entropy"}, "loss='cross-entropy' cannot be called"),
        ({"optimizer": 5}, "optimizer=5 is no torch.optim.Optimizer"),
        ({"optimizer": torch.optim.SGD}, "SGD'> is no torch.optim.Optimizer"),
        ({"optimizer": ["sgd"]}, "optimizer='sgd' is no torch.optim.Optimizer"),
        ({"optimizer": sgd(nn.Linear(2, 2))}, "none of the model's"),
        ({"progress": 5}, "progress=5 is no function: give one that takes a text, as print"),
        ({"plan_seconds": -1}, "plan_seconds=-1 is not 0 or more seconds"),
        ({"convolutions": {"plans": "p.json"}}, "plans have no effect in convolutions="),
        ({"convolutions": {"plans": "p.json", "strict": True}}, "plans and strict have no effect in convolutions="),
        ({"convolutions": 5}, "convolutions=5: give a batch-size policy"),
        ({"sample": (torch.ones(4, 8).numpy(), torch.zeros(4))}, "argument 0 of the sample is a NumPy array"),
        ({"sample": (torch.ones(4, 8), torch.zeros(4).numpy())}, "argument 1 of the sample is a NumPy array"),
        ({"model": nn.Linear(8, 6).eval()}, "call model.train()"),
        ({"model": nn.Linear(8, 6).requires_grad_(False)}, "nothing to train"),
    ],
)
def test_what_is_none_of_its_arguments_is_refused_by_name(changes, message):
    model, sample, loss = linear()
    with pytest.raises(InvalidValueError, match=re.escape(message)) as caught:
        fit(**{"model": model, "sample": sample, "loss": loss} | changes)
    assert "\n" not in str(caught.value)


def test_an_unknown_policy_is_refused_before_anything_is_traced():
    model, sample, loss = linear()
    model.forward = None  # whoever traces it fails
    with pytest.raises(InvalidValueError, match="policy 'magic' is not known"):
        fit(model, sample, loss, policy="magic")


def test_a_numpy_array_in_a_step_is_refused_by_name():
    pair = Pair(linear())
    with pytest.raises(InvalidValueError, match="an argument of the step is a NumPy array"):
        pair.step(pair.data[0], pair.data[1].numpy())
