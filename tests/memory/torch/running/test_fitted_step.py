"""A fitted step behaves as a model does in a training loop, and says what it cannot do."""

import copy
import gc
import re
from threading import Thread

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import ucudnn.memory  # noqa: E402
from tests.support.plain_training import Race, state_of, train  # noqa: E402
from tests.support.small_networks import InPlace, small_network  # noqa: E402
from tests.support.torch_cases import enable_on_cpu  # noqa: E402
from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError  # noqa: E402
from ucudnn.memory.plans.actions import ActionKind  # noqa: E402
from ucudnn.memory.step.liveness import measure_liveness  # noqa: E402


def several():
    torch.manual_seed(0)
    return small_network("several")


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p", "swap"])
def test_outputs_without_a_loss_train_to_the_bits_of_the_plain_loop(policy):
    trained = Race(several(), outside=True)
    step = trained.fitted(policy)
    trained.check(step)
    outputs = step(*trained.inputs[:-1])
    assert outputs["scale"] == 1.0
    assert not outputs["best"].requires_grad
    assert outputs["best"].dtype is torch.int64


def first_head_loss(outputs, target):
    return functional.cross_entropy(outputs["heads"][0], target)


@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
def test_outputs_that_the_loss_does_not_use_give_no_gradient(policy):
    trained = Race((*several()[:2], first_head_loss), outside=True)
    step = trained.fitted(policy)
    trained.check(step)
    assert all(parameter.grad is None for parameter in step.model.heads[1].parameters())
    assert all(parameter.grad is not None for parameter in step.model.body.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("policy", ["stock", "dymem"])
def test_adam_trains_to_the_bits_of_the_plain_loop(policy):
    torch.manual_seed(0)
    trained = Race(small_network("unet"), kind="adam")
    trained.check(trained.fitted(policy))


def fitted_in_place(policy="vdnn-ext-all-p", **options):
    torch.manual_seed(0)
    model, inputs, loss = small_network("inplace")
    return ucudnn.memory.fit(model, inputs, loss=loss, policy=policy, debug=True, **options), inputs, loss


def gradients(step):
    return [parameter.grad.clone() for parameter in step.parameters()]


def test_fit_itself_computes_nothing():
    model, inputs, loss = small_network("inplace")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ucudnn.memory.fit(model, inputs, loss=loss, policy="stock")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fit_says_what_it_does():
    told = []
    step, inputs, _ = fitted_in_place(progress=told.append)
    assert told == ["tracing InPlace", f"planning {len(step.plan.graph.operations)} operations"]
    step(inputs[0][:1], inputs[1][:1]).backward()
    assert len(told) == 4  # a smaller mini-batch has a plan of its own
    with pytest.raises(InvalidValueError, match="progress=5 is no function"):
        fitted_in_place(progress=5)


def test_gradients_accumulate_over_steps():
    step, inputs, loss = fitted_in_place()
    plain = copy.deepcopy(step.model)
    for _ in range(2):
        step(*inputs).backward()
        loss(plain(inputs[0]), inputs[1]).backward()
    assert all(
        torch.equal(ours.grad, each.grad) for ours, each in zip(step.parameters(), plain.parameters(), strict=True)
    )


def test_evaluation_and_steps_without_gradients_run_the_model_as_it_is():
    step, inputs, loss = fitted_in_place()
    step.eval()
    assert torch.equal(step(inputs[0][:1], inputs[1][:1]), loss(step.model(inputs[0][:1]), inputs[1][:1]))
    step.train()
    with torch.no_grad():
        assert not step(inputs[0][:2], inputs[1][:2]).requires_grad


def test_a_larger_input_or_one_of_another_type_is_refused_with_the_size_that_was_traced():
    step, inputs, _ = fitted_in_place()
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model.fc.weight.requires_grad_(False),
            "fc.weight needs no gradient now, and did when the step was fitted",
        ),
        (lambda model: model.first[1].eval(), "module 'first.1' was in training mode when the step was fitted"),
        (lambda model: setattr(model.fc, "bias", None), "fc.bias is another tensor than"),
        (lambda model: model.double(), r"is another tensor|is torch.float64 now, and was torch.float32"),
    ],
)
def test_a_changed_model_is_refused(change, message):
    step, inputs, _ = fitted_in_place()
    change(step.model)
    with pytest.raises(InvalidValueError, match=message):
        step(*inputs)


def test_tensors_that_others_of_their_kind_replace_are_followed():
    step, inputs, loss = fitted_in_place()
    step(*inputs).backward()
    model = step.model
    model.first[1].running_mean = torch.ones(8)
    model.fc.weight = nn.Parameter(torch.ones_like(model.fc.weight))
    model.zero_grad()
    plain = copy.deepcopy(model)
    step(*inputs).backward()
    loss(plain(inputs[0]), inputs[1]).backward()
    assert torch.equal(model.first[1].running_mean, plain.first[1].running_mean)
    assert all(torch.equal(ours, each.grad) for ours, each in zip(gradients(step), plain.parameters(), strict=True))


def test_memory_that_runs_out_within_a_step_leaves_no_copy_and_no_block_behind(monkeypatch):
    step, inputs, loss = fitted_in_place("vdnn-ext-all-p")
    plain = copy.deepcopy(step.model)
    loss(plain(inputs[0]), inputs[1]).backward()
    before = copy.deepcopy(step.model.state_dict())
    assert step.transfers._block is not None
    prefetch = step.transfers.prefetch

    def no_memory(number, tensor):
        prefetch(number, tensor)  # a copy is under way when another allocation fails
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(step.transfers, "prefetch", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step(*inputs).backward()
    monkeypatch.undo()
    assert step.transfers._block is None
    assert not step.transfers._held
    step.model.load_state_dict(before)
    step.zero_grad()
    step(*inputs).backward()
    assert all(torch.equal(ours, each.grad) for ours, each in zip(gradients(step), plain.parameters(), strict=True))
    assert step.transfers._block is not None, "the next step has its block again"


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
def test_the_step_after_an_exception_is_right(policy, monkeypatch):
    step, inputs, loss = fitted_in_place(policy)
    plain = copy.deepcopy(step.model)
    loss(plain(inputs[0]), inputs[1]).backward()
    before = copy.deepcopy(step.model.state_dict())
    run = step._run
    for part in ("forward", "backward"):
        broken = copy.copy(run.code)
        object.__setattr__(broken, part, failing_at_the_end(getattr(run.code, part)))
        monkeypatch.setattr(run, "code", broken)
        with pytest.raises(ArithmeticError, match="in the middle"):
            step(*inputs).backward()
        monkeypatch.undo()
        step.model.load_state_dict(before)
        step.zero_grad()
    gc.collect()
    step(*inputs).backward()
    assert all(torch.equal(ours, each.grad) for ours, each in zip(gradients(step), plain.parameters(), strict=True))


def failing_at_the_end(function):
    """Return a function that runs and then fails, as an operator in the middle of a step would."""

    def called(*args):
        function(*args)
        raise ArithmeticError("in the middle")

    return called


def test_backward_runs_once():
    step, inputs, _ = fitted_in_place()
    loss = step(*inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


def test_backward_may_need_nothing_that_forward_left_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Conv2d(2, 3, 3))
    inputs = torch.randn(2, 2, 5, 5), torch.tensor(0.0)

    def loss(out, target):
        return (out - target).sum()

    step = ucudnn.memory.fit(model, inputs, loss=loss, policy="vdnn-all-p", debug=True)
    step(*inputs)  # whose backward never runs
    value = step(*inputs)
    value.backward(retain_graph=True)
    ours = gradients(step)
    with pytest.raises(RuntimeError, match="runs once"):
        value.backward()
    model.zero_grad()
    loss(model(inputs[0]), inputs[1]).backward()
    assert all(torch.equal(mine, each.grad) for mine, each in zip(ours, model.parameters(), strict=True))


def test_two_forwards_may_not_share_the_host():
    step, inputs, _ = fitted_in_place("vdnn-ext-all-p")
    first = step(*inputs)
    second = step(*inputs)
    with pytest.raises(RuntimeError, match="another forward"):
        first.backward()
    second.backward()


def test_two_forwards_without_copies_have_gradients_of_their_own():
    step, inputs, loss = fitted_in_place("checkpoint")
    plain = copy.deepcopy(step.model)
    first, second = step(*inputs), step(*inputs)
    (first + second).backward()
    (loss(plain(inputs[0]), inputs[1]) + loss(plain(inputs[0]), inputs[1])).backward()
    for ours, each in zip(step.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, each.grad)


def test_what_backward_reads_must_not_change_before_it():
    step, inputs, _ = fitted_in_place()
    loss = step(*inputs)
    with torch.no_grad():
        step.model.fc.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_fitted_models_train_side_by_side():
    first, second = Race(small_network("inplace"), steps=3), Race(small_network("unet"), steps=3)
    steps = [each.fitted("vdnn-ext-all-p") for each in (first, second)]
    for each, step in zip((first, second), steps, strict=True):
        each.check(step)
    first.check(steps[0])
    steps[1].close()
    first.check(steps[0])


def test_a_budget_below_the_floor_is_refused_before_anything_runs_with_what_would_help():
    model, inputs, loss = small_network("inplace")
    inputs = tuple(each.repeat(8, *[1] * (each.dim() - 1)) for each in inputs)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=r"below the floor of InPlace, .*raise the budget to the floor") as caught:
        ucudnn.memory.fit(model, inputs, loss=loss, budget="140KiB")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    most = int(re.search(r"a mini-batch of at most (\d+) instead of 32", str(caught.value))[1])
    smaller = tuple(each[:most].clone() for each in inputs)
    step = ucudnn.memory.fit(model, smaller, loss=loss, budget=caught.value.required_bytes, policy="swap")
    step(*smaller).backward()
    floor = measure_liveness(step.plan.graph, step.costs).floor_bytes
    assert floor <= 140 * 2**10
    one_more = tuple(each[: most + 1].clone() for each in inputs)
    with pytest.raises(BudgetError):
        ucudnn.memory.fit(model, one_more, loss=loss, budget="140KiB")


def test_auto_takes_the_fastest_plan_that_keeps_the_budget():
    trained = Race(small_network("unet3d"), steps=2)
    stock = trained.fitted("stock").simulation
    assert trained.fitted("auto", stock.peak_bytes).plan.policy == "stock"
    step = trained.fitted("auto", int(stock.peak_bytes * 0.9))
    assert step.plan.policy != "stock"
    assert step.simulation.peak_bytes <= stock.peak_bytes * 0.9
    trained.check(step)


class Constants(nn.Module):
    """Tensors that are no parameters: made anew, kept outside of the buffers, and buffers that are replaced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept = [torch.arange(4.0)]
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x) * self.kept[0] + torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(1)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y + torch.randn(4) + self.mean).sum(), torch.complex(y, y).abs().square()


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
def test_constants_random_numbers_and_replaced_buffers_are_those_of_the_model(policy):
    torch.manual_seed(0)
    model, x = Constants(), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    step = ucudnn.memory.fit(model, x, policy=policy, debug=True)
    results = []
    for call in (plain, step):
        optimizer = torch.optim.SGD(call.parameters(), lr=0.01)
        results.append(train(lambda given: sum(each.sum() for each in call(given)), optimizer, (x,)))  # noqa: B023
    assert results[0] == results[1]
    assert all(torch.equal(*each) for each in zip(state_of(plain, None), state_of(model, None), strict=True))


def test_gradients_of_inputs_are_those_of_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    step = ucudnn.memory.fit(model, x, policy="stock", debug=True)
    (ours,) = torch.autograd.grad(step(x).sum(), x)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(ours, plain)


def test_autocast_counts():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        step = ucudnn.memory.fit(model, x, policy="checkpoint", debug=True)
        output = step(x)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    ours = gradients(step)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    output.float().sum().backward()
    assert all(torch.equal(mine, each.grad) for mine, each in zip(ours, model.parameters(), strict=True))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else -y


def test_what_has_no_plan_is_named():
    with pytest.raises(StepGraphError, match="reads the value of a tensor"):
        ucudnn.memory.fit(Branching(), torch.randn(2, 4))
    with pytest.raises(InvalidValueError, match=re.escape("call model.train()")):
        ucudnn.memory.fit(InPlace().eval(), torch.randn(2, 3, 8, 8))
    with pytest.raises(InvalidValueError, match="nothing to train"):
        ucudnn.memory.fit(InPlace().requires_grad_(False), torch.randn(2, 3, 8, 8))
    with pytest.raises(InvalidValueError, match="policy 'fast' is not known"):
        ucudnn.memory.fit(InPlace(), torch.randn(2, 3, 8, 8), policy="fast")
    with pytest.raises(InvalidValueError, match="none of the model's"):
        ucudnn.memory.fit(InPlace(), torch.randn(2, 3, 8, 8), optimizer=torch.optim.SGD(InPlace().parameters(), lr=0.1))


def test_poison_shows_a_storage_that_somebody_still_holds():
    step, inputs, _ = fitted_in_place("stock")
    held = []
    code = step._run.code
    assert "poisoned(" in code.text
    namespace = code.forward.__globals__
    native = namespace["aten_relu__default"]
    namespace["aten_relu__default"] = lambda tensor: (held.append(tensor), native(tensor))[1]
    with pytest.raises(StepGraphError, match="something still holds it") as caught:
        step(*inputs).backward()
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
        ucudnn.memory.fit(OneBatch(), torch.randn(8, 16), budget=1000)
    assert "mini-batch" not in str(caught.value)
    assert not caplog.records, "that the model cannot compute other mini-batches is no news to its user"
    ucudnn.memory.fit(OneBatch(), torch.randn(8, 16), budget=caught.value.required_bytes)


def test_an_operator_that_returns_memory_of_another_device_than_its_trace_is_named():
    step, inputs, _ = fitted_in_place("stock")
    namespace = step._run.code.forward.__globals__
    native = namespace["aten_mean_dim"]
    namespace["aten_mean_dim"] = lambda *arguments: native(*arguments).to("meta")
    message = "aten.mean.dim returned a tensor on meta, but its trace on fake tensors says cpu"
    with pytest.raises(StepGraphError, match=re.escape(message)):
        step(*inputs)


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
def test_convolutions_go_through_ucudnn_where_it_is_enabled(policy):
    """Plain and fitted steps ask for the same kernels, and train to the same bits; recomputation runs them again."""
    torch.manual_seed(0)
    with enable_on_cpu(workspace_limit="1MiB") as on:
        trained = Race(small_network("inplace"), steps=3)
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
    model, inputs, loss = small_network("unet3d")
    step = ucudnn.memory.fit(model, inputs, loss=loss, policy="vdnn-all-p", host_memory="1GiB")
    needed = step.transfers.block_bytes
    assert needed > 0
    step.close()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=r"limit for host memory is .*host_memory=.*offloads less") as caught:
        ucudnn.memory.fit(model, inputs, loss=loss, policy="vdnn-all-p", host_memory=needed - 1)
    assert (caught.value.limit_bytes, caught.value.required_bytes) == (needed - 1, needed)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    exact = ucudnn.memory.fit(model, inputs, loss=loss, policy="vdnn-all-p", host_memory=needed)
    exact(*inputs).backward()


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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("sample", "fed"), [(twice, different), (different, twice), (twice, twice)])
def test_arguments_that_are_one_tensor_at_times_are_not_taken_for_one_another(sample, fed, in_place):
    torch.manual_seed(0)
    model = Coder(in_place=in_place)
    plain = copy.deepcopy(model)
    step = ucudnn.memory.fit(model, sample(0), loss=squares, policy="vdnn-all-p")
    for seed, arguments in enumerate((fed, sample, fed)):
        x, target = arguments(seed)
        loss = step(x, target)
        loss.backward()
        x, target = arguments(seed)
        expected = squares(plain(x), target)
        expected.backward()
        assert torch.equal(loss, expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_shares_a_storage_is_named_where_there_is_no_other_plan():
    step = ucudnn.memory.fit(Coder(), twice(0), loss=squares)
    step._again = None
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
    torch.manual_seed(0)
    model = Coder()
    plain = copy.deepcopy(model)
    step = ucudnn.memory.fit(model, different(0), loss=squares, policy="vdnn-all-p")
    assert step.transfers.block_bytes
    refused = []

    def call():
        try:
            step(*different(1))
        except RuntimeError as error:
            refused.append(str(error))

    if phase == "forward":
        with Meanwhile(call, after):
            loss = step(*different(0))
        loss.backward()
    else:
        loss = step(*different(0))
        with Meanwhile(call, after + 1):  # the first operator makes the gradient of the loss
            loss.backward()
    assert len(refused) == 1
    assert "called while another call of it runs" in refused[0]
    squares(plain(images(0)), images(100)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    step(*different(2)).backward()  # it runs again


@pytest.mark.parametrize("wrapped", [lambda step: step, nn.Sequential])
def test_a_step_that_was_fitted_already_is_refused_with_the_way_out(wrapped):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    step = ucudnn.memory.fit(model, (x,))
    with pytest.raises(InvalidValueError, match=r"is a step that fit returned, or holds one.*attribute `model`"):
        ucudnn.memory.fit(wrapped(step), (x,))
    again = ucudnn.memory.fit(step.model, (x,))
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("kind", ["Rprop", "SGD", "Adam", "Adagrad", "RMSprop", "Adamax", "NAdam"])
def test_the_floor_that_a_refusal_names_is_enough_for_each_optimizer(kind):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    arguments = (model, (torch.randn(8, 16), torch.randn(8, 4)), functional.mse_loss, optimizer)
    with pytest.raises(BudgetError, match="below the floor") as refused:
        ucudnn.memory.fit(*arguments, budget=1000)
    floor = refused.value.required_bytes
    assert ucudnn.memory.fit(*arguments, budget=floor).simulation.peak_bytes <= floor
    with pytest.raises(BudgetError):
        ucudnn.memory.fit(*arguments, budget=floor - 1)
