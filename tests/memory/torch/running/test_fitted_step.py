"""A fitted step behaves as a model does in a training loop, and says what it cannot do."""

import copy
import gc
import re
from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.plain_training import Pair, Race, assert_same_bits, gradients_of
from tests.support.small_networks import small_network
from tests.support.torch_cases import enable_on_cpu
from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError
from ucudnn.memory import fit
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.step.liveness import measure_liveness


def small(name="inplace"):
    torch.manual_seed(0)
    return small_network(name)


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p", "swap"])
def test_outputs_without_a_loss_train_to_the_bits_of_the_plain_loop(policy):
    trained = Race(small("several"), outside=True)
    step = trained.fitted(policy)
    trained.check(step)
    outputs = step(*trained.inputs[:-1])
    assert outputs["scale"] == 1.0
    assert not outputs["best"].requires_grad
    assert outputs["best"].dtype is torch.int64


def test_fit_itself_computes_nothing_and_says_what_it_does():
    model, inputs, loss = small()
    before, state, told = copy.deepcopy(model.state_dict()), torch.get_rng_state(), []
    step = fit(model, inputs, loss=loss, policy="stock", progress=told.append)
    assert told == ["tracing InPlace", f"planning {len(step.plan.graph.operations)} operations"]
    assert_same_bits([*model.state_dict().values(), torch.get_rng_state()], [*before.values(), state])
    assert all(parameter.grad is None for parameter in model.parameters())
    step(inputs[0][:1], inputs[1][:1]).backward()
    assert len(told) == 4  # a smaller mini-batch has a plan of its own


def test_a_larger_input_or_one_of_another_type_is_refused_with_the_size_that_was_traced():
    pair = Pair(small())
    step, inputs = pair.step, pair.data
    with pytest.raises(InvalidValueError, match=r"argument 0 is 8x3x8x8 of float32 .* fitted to 4x3x8x8 of float32"):
        step(*(each.repeat(2, *[1] * (each.dim() - 1)) for each in inputs))
    with pytest.raises(InvalidValueError, match=r"argument 0 is 4x3x8x8 of float64"):
        step(inputs[0].double(), inputs[1])
    with pytest.raises(InvalidValueError, match="fitted to 2 arguments, and is called with 3 arguments"):
        step(*inputs, inputs[1])
    with pytest.raises(InvalidValueError, match="with 2 arguments and weight by name"):
        step(*inputs, weight=inputs[1])
    with pytest.raises(InvalidValueError, match="arguments of the structure"):
        step(inputs, inputs[1])
    with pytest.raises(InvalidValueError, match="same modes"), torch.autocast("cpu", torch.bfloat16):
        step(*inputs)


def test_tensors_that_others_of_their_kind_replace_are_followed():
    pair = Pair(small())

    def loop(model, call):
        yield from pair.backward(model, call)
        model.first[1].running_mean = torch.ones(8)
        model.fc.weight = nn.Parameter(torch.ones_like(model.fc.weight))
        model.zero_grad()
        yield from pair.backward(model, call)

    pair.check(loop)


def test_memory_that_runs_out_within_a_step_leaves_no_copy_and_no_block_behind(monkeypatch):
    pair = Pair(small())
    before, transfers = copy.deepcopy(pair.model.state_dict()), pair.step.transfers
    assert transfers._block is not None
    prefetch = transfers.prefetch

    def no_memory(number, tensor):
        prefetch(number, tensor)  # a copy is under way when another allocation fails
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(transfers, "prefetch", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pair.step(*pair.data).backward()
    monkeypatch.undo()
    assert transfers._block is None
    assert not transfers._held
    pair.model.load_state_dict(before)
    pair.model.zero_grad()
    pair.check(pair.backward)
    assert transfers._block is not None, "the next step has its block again"


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
def test_the_step_after_an_exception_is_right(policy, monkeypatch):
    pair = Pair(small(), policy=policy)
    before, run = copy.deepcopy(pair.model.state_dict()), pair.step._run
    for part in ("forward", "backward"):
        broken = copy.copy(run.code)
        object.__setattr__(broken, part, failing_at_the_end(getattr(run.code, part)))
        monkeypatch.setattr(run, "code", broken)
        with pytest.raises(ArithmeticError, match="in the middle"):
            pair.step(*pair.data).backward()
        monkeypatch.undo()
        pair.model.load_state_dict(before)
        pair.model.zero_grad()
    gc.collect()
    pair.check(pair.backward)


def failing_at_the_end(function):
    """Return a function that runs and then fails, as an operator in the middle of a step would."""

    def called(*args):
        function(*args)
        raise ArithmeticError("in the middle")

    return called


def test_backward_runs_once_although_it_may_need_nothing_that_forward_left_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Conv2d(2, 3, 3))
    data = torch.randn(2, 2, 5, 5), torch.tensor(0.0)
    for pair in (Pair((model, data, lambda out, target: (out - target).sum()), policy="vdnn-all-p"), Pair(small())):
        pair.step(*pair.data)  # whose backward never runs

        def loop(_, call, pair=pair):
            value = call(*pair.data)
            value.backward(retain_graph=True)
            yield value
            if call is pair.step:
                with pytest.raises(RuntimeError, match="runs once"):
                    value.backward()

        pair.model.load_state_dict(pair.plain.state_dict())
        pair.check(loop)


def test_two_forwards_may_not_share_the_host():
    pair = Pair(small())
    first, second = pair.step(*pair.data), pair.step(*pair.data)
    with pytest.raises(RuntimeError, match="another forward"):
        first.backward()
    second.backward()


def test_a_budget_below_the_floor_is_refused_before_anything_runs_with_what_would_help():
    model, inputs, loss = small()
    inputs = tuple(each.repeat(8, *[1] * (each.dim() - 1)) for each in inputs)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=r"below the floor of InPlace, .*raise the budget to the floor") as caught:
        fit(model, inputs, loss=loss, budget="140KiB")
    assert_same_bits(model.state_dict().values(), before.values())
    most = int(re.search(r"a mini-batch of at most (\d+) instead of 32", str(caught.value))[1])
    smaller = tuple(each[:most].clone() for each in inputs)
    step = fit(model, smaller, loss=loss, budget=caught.value.required_bytes, policy="swap")
    step(*smaller).backward()
    assert measure_liveness(step.plan.graph, step.costs).floor_bytes <= 140 * 2**10
    with pytest.raises(BudgetError):
        fit(model, tuple(each[: most + 1].clone() for each in inputs), loss=loss, budget="140KiB")


def test_auto_takes_the_fastest_plan_that_keeps_the_budget():
    trained = Race(small("unet3d"), steps=2)
    stock = trained.fitted("stock").simulation
    assert trained.fitted("auto", stock.peak_bytes).plan.policy == "stock"
    step = trained.fitted("auto", int(stock.peak_bytes * 0.9))
    assert step.plan.policy != "stock"
    assert step.simulation.peak_bytes <= stock.peak_bytes * 0.9
    trained.check(step)


def test_poison_shows_a_storage_that_somebody_still_holds():
    pair, held = Pair(small(), policy="stock"), []
    code = pair.step._run.code
    assert "poisoned(" in code.text
    namespace = code.forward.__globals__
    native = namespace["aten_relu__default"]
    namespace["aten_relu__default"] = lambda tensor: (held.append(tensor), native(tensor))[1]
    with pytest.raises(StepGraphError, match="something still holds it") as caught:
        pair.step(*pair.data).backward()
    assert any("check_gone(" in note for note in caught.value.__notes__)


class OneBatch(nn.Module):
    """A model that is made for mini-batches of eight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("state", torch.ones(8, 16))

    def forward(self, x):
        return torch.tanh(self.linear(x) + self.state)


def test_below_the_floor_a_model_of_one_mini_batch_is_refused_as_any_other_one(caplog):
    with pytest.raises(BudgetError, match="raise the budget to") as caught:
        fit(OneBatch(), torch.randn(8, 16), budget=1000)
    assert "mini-batch" not in str(caught.value)
    assert not caplog.records, "that the model cannot compute other mini-batches is no news to its user"
    fit(OneBatch(), torch.randn(8, 16), budget=caught.value.required_bytes)


def test_an_operator_that_returns_memory_of_another_device_than_its_trace_is_named():
    trained = Race(small())
    step = trained.fitted("stock")
    namespace = step._run.code.forward.__globals__
    native = namespace["aten_mean_dim"]
    namespace["aten_mean_dim"] = lambda *arguments: native(*arguments).to("meta")
    message = "aten.mean.dim .*returned a tensor on meta, but its trace on fake tensors says cpu"
    with pytest.raises(StepGraphError, match=message):
        step(*trained.inputs)


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
def test_convolutions_go_through_ucudnn_where_it_is_enabled(policy):
    """Plain and fitted steps ask for the same kernels, and train to the same bits; recomputation runs them again."""
    with enable_on_cpu(workspace_limit="1MiB") as on:
        trained = Race(small(), steps=3)
        asked, plain = {*on._interceptor.problems()}, calls_of(on)
        assert plain == 3 * 5  # two forward, one gradient of an input, two of weights
        step = trained.fitted(policy)
        trained.check(step)
        assert {*on._interceptor.problems()} == asked
        again = [target for kind, target in step.plan.actions if kind is ActionKind.RECOMPUTE]
        repeated = sum(step.plan.graph.operations[target].problem is not None for target in again)
        assert calls_of(on) == 2 * plain + 3 * repeated
        assert (repeated > 0) == (policy == "checkpoint")


def calls_of(on):
    return sum(row["calls"] for row in on.report().records())


def test_host_memory_is_capped_and_a_plan_that_needs_more_is_refused_with_the_way_out():
    model, inputs, loss = small("unet3d")
    options = {"loss": loss, "policy": "vdnn-all-p"}
    step = fit(model, inputs, host_memory="1GiB", **options)
    needed = step.transfers.block_bytes
    assert needed > 0
    step.close()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=r"limit for host memory is .*host_memory=.*offloads less") as caught:
        fit(model, inputs, host_memory=needed - 1, **options)
    assert (caught.value.limit_bytes, caught.value.required_bytes) == (needed - 1, needed)
    assert_same_bits(model.state_dict().values(), before.values())
    fit(model, inputs, host_memory=needed, **options)(*inputs).backward()


class Coder(nn.Module):
    """An autoencoder: its input may be its target."""

    def __init__(self, *, in_place=False):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.in_place = in_place

    def forward(self, x):
        x = functional.relu(x, inplace=True) if self.in_place else x
        return self.last(functional.relu(self.first(x), inplace=True))


def images(seed):
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def twice(seed):
    one = images(seed)
    return one, one


def different(seed):
    return images(seed), images(seed + 100)


def squares(output, target):
    return (output - target).square().mean()


def coded(sample, *, in_place=False):
    torch.manual_seed(0)
    return Pair((Coder(in_place=in_place), sample, squares), policy="vdnn-all-p", debug=False)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("sample", "fed"), [(twice, different), (different, twice), (twice, twice)])
def test_arguments_that_are_one_tensor_at_times_are_not_taken_for_one_another(sample, fed, in_place):
    def loop(_, call):
        for seed, arguments in enumerate((fed, sample, fed)):
            loss = call(*arguments(seed))
            loss.backward()
            yield loss

    coded(sample(0), in_place=in_place).check(loop)


def test_what_shares_a_storage_is_named_where_there_is_no_other_plan():
    step = coded(twice(0)).step
    step._refit = None
    with pytest.raises(
        InvalidValueError,
        match="all arguments lie in storages of their own, and when the step was fitted arguments 0 and 1 lie in one",
    ):
        step(*different(0))


class Meanwhile(TorchDispatchMode):
    """Calls a function once, in another thread, in the middle of the operators of a call."""

    def __init__(self, function, after):
        super().__init__()
        self.function, self.left = function, after

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            thread = Thread(target=self.function)
            thread.start()
            thread.join()
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("after", [3, 5])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_call_in_the_middle_of_another_one_is_refused_and_the_other_is_right(phase, after):
    pair, refused = coded(different(0)), []
    assert pair.step.transfers.block_bytes

    def meanwhile():
        with pytest.raises(RuntimeError, match="called while another call of it runs") as caught:
            pair.step(*different(1))
        refused.append(caught)

    if phase == "forward":
        with Meanwhile(meanwhile, after):
            loss = pair.step(*different(0))
        loss.backward()
    else:
        loss = pair.step(*different(0))
        with Meanwhile(meanwhile, after + 1):  # the first operator makes the gradient of the loss
            loss.backward()
    assert len(refused) == 1
    pair.called(*different(0)).backward()
    assert_same_bits(gradients_of(pair.model), gradients_of(pair.plain))
    pair.step(*different(2)).backward()  # it runs again


@pytest.mark.parametrize("wrapped", [lambda step: step, nn.Sequential])
def test_a_step_that_was_fitted_already_is_refused_with_the_way_out(wrapped):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    step = fit(model, (x,))
    with pytest.raises(InvalidValueError, match=r"is a step that fit returned, or holds one.*attribute `model`"):
        fit(wrapped(step), (x,))
    assert torch.equal(fit(step.model, (x,))(x), model(x))


@pytest.mark.parametrize("kind", ["Rprop", "Adam", "Adagrad"])
def test_the_floor_that_a_refusal_names_is_enough_for_each_optimizer(kind):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    arguments = (model, (torch.randn(8, 16), torch.randn(8, 4)), functional.mse_loss, optimizer)
    with pytest.raises(BudgetError, match="below the floor") as refused:
        fit(*arguments, budget=1000)
    floor = refused.value.required_bytes
    assert fit(*arguments, budget=floor).simulation.peak_bytes <= floor
    with pytest.raises(BudgetError):
        fit(*arguments, budget=floor - 1)
