"""Gradients that DistributedDataParallel averages while backward of a fitted step goes on."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.support.live_bytes import LiveBytes
from tests.support.plain_training import assert_same_bits, gradients_of
from tests.support.ranked_training import NUMBERS, WAYS, collectives_before, train_ranks
from tests.support.small_networks import small_network
from ucudnn.memory import fit

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

CASES = [
    {"policy": "stock", "options": {}},
    {"policy": "vdnn-ext-all-p", "options": {}},
    {"policy": "checkpoint", "options": {"gradient_as_bucket_view": True}},
    {"policy": "stock", "options": {"find_unused_parameters": True}},
    {"policy": "checkpoint", "options": {"static_graph": True}},
    {"policy": "random", "seed": 0, "options": {}},
    {"policy": "checkpoint", "late": True, "options": {}},
    {"policy": "moves", "seed": 0, "options": {}},
]


def test_buckets_are_averaged_while_backward_goes_on_with_the_bits_of_plain_ranks(tmp_path):
    watched = [{**case, "watched": True} for case in CASES]
    for found in train_ranks(tmp_path / "store", "gloo", 3, (WAYS[0], WAYS[2]), watched):
        for case, (plain, ours) in zip(CASES, found, strict=True):
            assert [ours[each] for each in NUMBERS] == [plain[each] for each in NUMBERS], case
            assert ours["buckets"] == plain["buckets"], case
            before, expected = ([*map(collectives_before, each["orders"])] for each in (ours, plain))
            assert len(before) == len(expected) == 3
            assert all(0 < early < all_ for early, all_ in expected), expected
            if case["policy"] == "moves" or case.get("late"):  # what moves or is copied late is handed over late
                assert all(one[1] == other[1] for one, other in zip(before, expected, strict=True)), case
            else:
                assert before == expected, case
            assert (ours["moved"] > 0) == (case["policy"] not in ("stock", "checkpoint")), case
            assert ours["moves"] or case["policy"] != "moves", case


class Watched:
    """A fitted step in DistributedDataParallel with small buckets, and what happens in its backward.

    Attributes:
        events: 'op' for each gradient of a convolution that the code computes, 'grad' for each that is accumulated.
    """

    def __init__(self, policy, name="inplace", ran=0):
        torch.manual_seed(0)
        self.model, (self.x, self.y), loss = small_network(name)
        self.parallel = DistributedDataParallel(self.model, bucket_cap_mb=0.0005)
        self.step = fit(self.parallel, (self.x, self.y), loss=loss, policy=policy, debug=name == "inplace")
        self.events = []
        self.accumulators = []  # they live only as long as somebody holds them, or a graph
        for parameter in self.model.parameters():
            self.accumulators.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
            self.accumulators[-1].register_hook(lambda *_: self.events.append("grad"))
        for _ in range(ran):  # buckets are made anew when the second begins
            self.run()

    def watch_operators(self, failing=0):
        """Note operators from now on; the operator of this number fails. Return what ends that."""
        namespace = self.step._run.code.forward.__globals__
        native = namespace["aten_convolution_backward_default"]

        def noted(*args, **kwargs):
            self.events.append("op")
            if self.events.count("op") == failing:
                raise ArithmeticError("the operator failed")
            return native(*args, **kwargs)

        namespace["aten_convolution_backward_default"] = noted
        return lambda: namespace.update(aten_convolution_backward_default=native)

    def watch_handed(self):
        """Return the addresses of gradients that are handed over from now on before backward ends."""
        addresses, namespace = set(), self.step._run.code.forward.__globals__
        native = namespace["alias"]
        # the loss, which forward returns as an alias, has no dimension
        namespace["alias"] = lambda tensor: (tensor.dim() and addresses.add(tensor.data_ptr()), native(tensor))[1]
        return addresses

    def run(self):
        """Run forward and backward."""
        self.model.zero_grad()
        self.events.clear()
        value = self.step(self.x, self.y)
        value.backward()
        return value


@pytest.mark.usefixtures("alone", "one_thread")
@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
@pytest.mark.parametrize("name", ["resnet18", "inplace"])
def test_parts_of_backward_take_no_byte_beyond_the_prediction(name, policy):
    watched = Watched(policy, name, ran=2)
    watched.model.zero_grad()
    present = [*watched.model.state_dict(keep_vars=True).values(), watched.x, watched.y]
    buckets = sum(each.nbytes for each in watched.model.parameters())
    handed = watched.watch_handed()
    with LiveBytes(present) as live:
        watched.step(watched.x, watched.y).backward()
    assert len(watched.step._run.code.parts) > 2
    assert handed, "nothing was handed over before the end"
    assert handed <= {each.grad.data_ptr() for each in watched.model.parameters()}, "autograd copied a gradient"
    assert live.peak + buckets <= watched.step.simulation.peak_bytes * 1.001
    assert live.peak + buckets == pytest.approx(watched.step.simulation.peak_bytes, rel=0.02)


@pytest.mark.usefixtures("alone")
def test_hooks_and_steps_without_averaging_run_backward_as_one():
    """Hooks may take memory that no plan counts, and without averaging there is nothing to begin early."""
    watched = Watched("checkpoint", ran=1)
    weight = watched.model.fc.weight

    def grads_before_the_last_op():
        watched.watch_operators()
        watched.run()
        last = len(watched.events) - 1 - watched.events[::-1].index("op")
        return watched.events[:last].count("grad")

    assert grads_before_the_last_op() > 3
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        hook = register(lambda _: None)
        assert grads_before_the_last_op() == 0
        hook.remove()
    with watched.parallel.no_sync():
        assert grads_before_the_last_op() == 0
    assert grads_before_the_last_op() > 3
    watched.parallel.register_comm_hook(None, allreduce_hook)
    assert grads_before_the_last_op() == 0


@pytest.mark.usefixtures("alone")
def test_a_backward_in_parts_ends_once_behind_the_last_one():
    watched = Watched("checkpoint", ran=2)
    watched.watch_operators()
    ended = []
    watched.step._run.after_backward = lambda: ended.append(watched.events.count("op"))
    watched.run()
    assert len(watched.step._run.code.parts) > 2
    assert ended == [watched.events.count("op")]
    assert ended > [2]


@pytest.mark.usefixtures("alone")
def test_an_error_before_the_first_bucket_leaves_a_step_that_can_run_again():
    watched = Watched("vdnn-ext-all-p", ran=2)
    expected = gradients_of(watched.model)
    native = watched.watch_operators(failing=1)
    with pytest.raises(ArithmeticError):
        watched.run()
    assert watched.events == ["op"]
    native()
    watched.run()
    assert_same_bits(gradients_of(watched.model), expected)


@pytest.mark.usefixtures("alone")
def test_an_error_between_buckets_ends_copies_and_is_told_like_that_of_a_plain_model():
    watched = Watched("vdnn-ext-all-p", ran=2)
    watched.watch_operators(failing=3)  # two of the last layer's gradients are computed before
    with pytest.raises(ArithmeticError) as caught:
        watched.run()
    assert "grad" in watched.events
    assert any("aten_convolution_backward_default(" in note for note in caught.value.__notes__)
    assert watched.step.transfers._block is None, "copies go on"
    with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
        watched.run()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("policy", ["checkpoint", "vdnn-ext-all-p"])
def test_a_backward_of_few_gradients_leaves_the_rest_undone(policy):
    watched = Watched(policy, ran=1)
    expected = watched.model.fc.weight.grad.clone()
    watched.model.load_state_dict(watched.model.state_dict())
    value = watched.step(watched.x, watched.y)
    (gradient,) = torch.autograd.grad(value, watched.model.fc.weight)
    assert torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(value, watched.model.fc.weight)
    del value, gradient
    assert policy == "checkpoint" or watched.step.transfers._block is None, "copies go on"
    watched.run()
    assert torch.equal(watched.model.fc.weight.grad, expected)


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_changes_between_parts_is_found_as_in_a_plain_model():
    watched = Watched("stock", ran=1)
    changed = watched.model.first[0].weight

    def change(*_):
        with torch.no_grad():
            changed.add_(1)

    watched.accumulators[-1].register_hook(change)  # of the last layer's bias, whose gradient comes early
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        watched.run()
