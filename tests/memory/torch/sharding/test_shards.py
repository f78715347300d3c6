"""What a training loop sees of shards: DTensors, whose checkpoints pass between FSDP2 and fitted steps."""

import copy
import gc
import weakref

import pytest
import torch
from torch.nn import functional

from tests.support.sharded_ranks import Odd, fsdp2, made_optimizer, on_ranks, trained
from ucudnn.errors import InvalidValueError, StepGraphError, UcudnnError

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


class Scaled(Odd):
    """Has one element in the place of the scalar, which FSDP2 does not take, so that both have one checkpoint."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))


class Branching(torch.nn.Module):
    """Computes otherwise where a token is large."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)

    def forward(self, tokens):
        x = self.table(tokens)
        if tokens.max() > 3:
            x = x.tanh()
        return x.sum()


def prepared(way, model, optimizer_name, mesh, data):
    """Return a model, its optimizer and what computes its loss, by FSDP2 or by a fitted step."""
    from ucudnn.memory import fit

    own = copy.deepcopy(model)
    if way == "fsdp2":
        fsdp2(own, mesh)
    optimizer = made_optimizer(optimizer_name, own.parameters())
    if way == "fit":
        return own, optimizer, fit(own, data[0], loss=functional.mse_loss, optimizer=optimizer, mesh=mesh)
    return own, optimizer, lambda x, y: functional.mse_loss(own(x), y)


def passed_on(mesh, folder):
    """Train three steps by one, save, load into the other one, and train on; return whether both went on alike."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(0)
    model = Scaled()
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    data = [(torch.randn(5, 6, generator=generator), torch.randn(5, 1, generator=generator)) for _ in range(6)]
    found = {}
    for first, second in (("fit", "fsdp2"), ("fsdp2", "fit")):
        own, optimizer, call = prepared(first, model, "adamw", mesh, data)
        trained(own, call, optimizer, data[:3])
        saved = dict(zip(("model", "optimizer"), get_state_dict(own, optimizer), strict=True))
        checkpoint.save(saved, checkpoint_id=f"{folder}/{first}")
        torch.manual_seed(1)
        other, its_optimizer, its_call = prepared(second, Scaled(), "adamw", mesh, data)
        state = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=f"{folder}/{first}")
        set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        one = trained(own, call, optimizer, data[3:])
        two = trained(other, its_call, its_optimizer, data[3:])
        found[first] = [one[0] == two[0], all(map(torch.equal, one[2], two[2])), one[0][-1]]
    return found


def test_checkpoints_pass_between_fsdp2_and_fitted_steps(tmp_path):
    for found in on_ranks(passed_on, tmp_path / "store", str(tmp_path / "saved")):
        assert found["fit"][:2] == found["fsdp2"][:2] == [True, True]
        assert found["fit"][2] == found["fsdp2"][2]


def dropped(mesh):
    """Train two steps, hold nothing of them, and return how many parameters are still there."""
    from ucudnn.memory import fit

    model = Scaled()
    optimizer = made_optimizer("adamw", model.parameters())
    data = torch.randn(5, 6), torch.randn(5, 1)
    step = fit(model, data, loss=functional.mse_loss, optimizer=optimizer, mesh=mesh)
    for _ in range(2):
        optimizer.zero_grad()
        step(*data).backward()
        optimizer.step()
    left = [weakref.ref(each) for each in model.parameters()]
    del model, optimizer, step
    gc.collect()
    return sum(each() is not None for each in left)


def test_a_sharded_step_that_nobody_holds_is_gone(tmp_path):
    assert on_ranks(dropped, tmp_path / "store") == [0, 0]


@pytest.fixture
def mesh(tmp_path):
    """Be the only rank of a mesh."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_parameters_become_dtensors_of_one_memory_and_optimizers_follow(mesh):
    from torch.distributed.tensor import DTensor

    from ucudnn.memory.torch.sharding.shards import placed_inside, shard_parameters

    model, given = Odd(), (torch.randn(5, 6), torch.randn(5, 1))
    optimizer = made_optimizer("adamw", model.parameters())
    functional.mse_loss(model(given[0]), given[1]).backward()
    optimizer.step()
    before = {name: optimizer.state[each].get("exp_avg") for name, each in model.named_parameters()}
    shards = shard_parameters(model, [optimizer], mesh)
    assert model.third.weight is model.second.weight
    assert len(shards) == len([*model.parameters()]) == len(before)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    for shard in shards:
        assert isinstance(shard.outside, DTensor)
        assert shard.outside.to_local().data_ptr() == shard.inside.data_ptr()
        assert shard.outside.requires_grad is shard.inside.requires_grad
        state = optimizer.state[shard.outside].get("exp_avg") if shard.outside.requires_grad else None
        assert (state is None) == (before[shard.name] is None)
        assert state is None or torch.equal(state.full_tensor(), before[shard.name])
    with placed_inside(shards):
        assert model.first.weight is shards[2].inside
    model.first.weight = torch.nn.Parameter(torch.zeros(7, 6))
    with pytest.raises(InvalidValueError, match=r"first\.weight is another tensor"), placed_inside(shards):
        pass


def test_what_cannot_be_sharded_is_refused_with_the_way_out(mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ucudnn.memory import fit

    data, loss = (torch.randn(5, 6), torch.randn(5, 1)), functional.mse_loss
    turned = Odd()
    turned.first.weight = torch.nn.Parameter(torch.randn(6, 7).t())
    with pytest.raises(InvalidValueError, match=r"first\.weight of \(7, 6\) has strides \(1, 7\).*contiguous"):
        fit(turned, data, loss=loss, mesh=mesh)
    with pytest.raises(InvalidValueError, match="mesh=2 is no DeviceMesh"):
        fit(Odd(), data, loss=loss, mesh=2)
    with pytest.raises(InvalidValueError, match="leave 'hooks', divide=, convolutions= out"):
        fit(Odd(), data, loss=loss, mesh=mesh, divide=True)
    with pytest.raises(InvalidValueError, match="float16, in which sums over ranks overflow"):
        fit(Odd(), data, loss=loss, mesh=mesh, mixed_precision=MixedPrecisionPolicy(torch.float16))
    other = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidValueError, match="parameter 0 of the optimizer's group 0 is none of the model's"):
        fit(Odd(), data, loss=loss, mesh=mesh, optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(InvalidValueError, match="DistributedDataParallel: give"):
        fit(torch.nn.parallel.DistributedDataParallel(Odd()), data, loss=loss, mesh=mesh)
    with pytest.raises(
        StepGraphError, match="goes one of two ways by the values of a tensor, which may differ between"
    ):
        fit(Branching(), torch.tensor([1, 5]), mesh=mesh)
    step = fit(Odd(), data, loss=loss, mesh=mesh)
    step.model.first.weight.requires_grad_(False)
    with pytest.raises(InvalidValueError, match=r"first\.weight was frozen or unfrozen"):
        step(*data)
    with pytest.raises(InvalidValueError, match="the model is a step that fit returned"):
        fit(step, data, mesh=mesh)


def test_a_loss_reads_whole_parameters_and_hooks_run(mesh):
    from ucudnn.memory import fit

    torch.manual_seed(0)
    model, x, y = Odd(), torch.randn(5, 6), torch.randn(5, 1)

    def loss(output, target):
        return functional.mse_loss(output, target) + sum(each.square().sum() for each in model.parameters())

    plain = copy.deepcopy(model)
    wanted = functional.mse_loss(plain(x), y) + sum(each.square().sum() for each in plain.parameters())
    wanted.backward()
    step = fit(model, (x, y), loss=loss, mesh=mesh)
    called = []
    model.scale.register_post_accumulate_grad_hook(called.append)
    for times in (1, 2):  # gradients add up
        value = step(x, y)
        value.backward()
        assert torch.equal(value, wanted)
        assert torch.equal(model.scale.grad.full_tensor(), times * plain.scale.grad)
    assert [each is model.scale for each in called] == [True, True]
    assert step.report().startswith("Odd, mini-batch 5, ")
    assert "sharded over 1 ranks" in step.report()


def test_each_backward_that_averages_does_so_though_another_forward_came_between(mesh):
    from ucudnn.memory import fit

    torch.manual_seed(0)
    model, data = Odd(), [(torch.randn(5, 6), torch.randn(5, 1)) for _ in range(3)]
    plain = copy.deepcopy(model)
    for x, y in data:
        functional.mse_loss(plain(x), y).backward()
    step = fit(model, data[0], loss=functional.mse_loss, mesh=mesh)
    step.set_requires_gradient_sync(False)
    step(*data[0]).backward()
    assert all(each.grad is None for each in model.parameters())
    step.set_requires_gradient_sync(True)
    losses = [step(*each) for each in data[1:]]
    for loss in losses:
        loss.backward()
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=name)


def test_an_update_that_is_planned_in_parts_runs_in_parts(mesh):
    from ucudnn.memory import fit

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(16)))
    optimizer, x = torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(2, 64)
    whole = fit(model, (x, x), loss=functional.mse_loss, optimizer=optimizer, mesh=mesh, policy="stock")
    peak = whole.simulation.peak_bytes
    options = {"loss": functional.mse_loss, "optimizer": optimizer, "policy": "stock"}
    step = fit(model, (x, x), mesh=mesh, budget=peak - 8 * 64 * 64, **options)
    step(x, x).backward()
    counts = []
    inner = optimizer._init_group

    def counting(group, params, *others):
        found = inner(group, params, *others)
        counts.append(len(params))
        return found

    optimizer._init_group = counting
    optimizer.step()
    assert sum(counts) == 16
    assert len(counts) == 8
    step.close()
    counts.clear()
    optimizer.step()
    assert counts == [16]


def trained_plainly(model, optimizer, data):
    """Return losses and parameters of two steps of the plain loop."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [each.detach().clone() for each in model.parameters()]


def raises(*_):
    raise ArithmeticError("no such cost")


def refused(mesh, holds):
    """Return whether the plain loop goes on as if no fit had been refused, and what was refused."""
    from ucudnn.memory.torch.running import fit as module

    def fails(x, y):
        if mesh.get_local_rank() == 1:
            raise InvalidValueError("no such loss")
        return functional.mse_loss(x, y)

    torch.manual_seed(0)
    model, data = Odd(), [(torch.randn(5, 6), torch.randn(5, 1)) for _ in range(2)]
    optimizer, noted, told = made_optimizer("adamw", model.parameters()), [], []
    trained_plainly(model, optimizer, data)  # there is state of the optimizer, and gradients if these are held
    optimizer.zero_grad(set_to_none=not holds)
    other, plain = copy.deepcopy((model, optimizer)), [id(each) for each in model.parameters()]
    model.shift.register_post_accumulate_grad_hook(lambda each: noted.append(each.numel()))
    held = [*model.parameters()] if holds else []
    for wrong in ({"budget": "100B"}, {"loss": fails}, {"optimizer": made_optimizer("sgd", Odd().parameters())}, {}):
        if not wrong and mesh.get_local_rank() == 1:
            module.step_costs = raises  # beside what ranks agree on
        given = {"loss": functional.mse_loss, "optimizer": optimizer, "mesh": mesh, **wrong}
        try:
            module.fit(model, data[0], **given)
        except (UcudnnError, ArithmeticError) as error:
            told.append([type(error).__name__, str(error)])
    kept = [id(each) == before for each, before in zip(model.parameters(), plain, strict=True)]
    (losses, parameters), (others, right) = trained_plainly(model, optimizer, data), trained_plainly(*other, data)
    is_own = {id(each) for each in model.parameters()} == {id(each) for each in optimizer.param_groups[0]["params"]}
    same = losses == others and all(map(torch.equal, parameters, right)) and model.third.weight is model.second.weight
    return same, is_own, noted, told, all(kept) or not held, [*map(type, parameters)] == [torch.Tensor] * len(right)


@pytest.mark.parametrize("holds", [True, False])
def test_a_fit_that_all_ranks_refuse_leaves_no_trace(holds, tmp_path):
    ranks = on_ranks(refused, tmp_path / "store", holds)
    for rank, (same, is_own, noted, told, kept, are_whole) in enumerate(ranks):
        assert same
        assert is_own
        assert noted == [1, 1]
        assert kept
        assert are_whole
        names = "BudgetError", "InvalidValueError", "InvalidValueError", "ArithmeticError"
        assert [*names] == [name for name, _ in told]
        assert [told[1][1], told[3][1]] == [f"{'rank 1: ' * (1 - rank)}no such {what}" for what in ("loss", "cost")]
