"""Tests of recording: a traced step has PyTorch's operations, storages, in-place writes, modules and lines."""

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from tests.support.training_steps import Lambda, step_of, trace_step, training_step
from ucudnn.errors import InvalidNetworkError, StepGraphError
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.torch.hooks.hooked_step import INSTEAD_OF_A_PLAN
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe, make_step
from ucudnn.memory.torch.record import record, record_made, record_measured
from ucudnn.memory.torch.running.fit import fit
from ucudnn.networks.variants import Variant
from ucudnn.problem import DataType, Layout, Operation

UNET = TrainingRecipe(model="tests.support.training_steps:small_unet", batch=4, shape=(3, 16, 16))


@pytest.fixture(scope="module")
def resnet18():
    """Return a step's graph, which is traced once, because tests only read it."""
    return trace_step(training_step("resnet18"), "resnet18", 4).graph


@pytest.fixture(scope="module")
def unet():
    """Return the graph that is recorded of `UNET`, as above."""
    return record(UNET)


def storages(graph, indices):
    return {graph.storages[index].name for index in indices}


def kinds(graph, phase):
    return [each.kind for each in graph.operations if each.phase is phase]


def find(graph, name):
    return next(each for each in graph.operations if each.name == name)


@pytest.mark.parametrize("name", ["resnet18", "unet", "gpt", "densenet"])
def test_fake_and_real_tensors_give_the_same_graph(name):
    with FakeTensorMode():
        fake = trace_step(training_step(name), name, 2).graph
    real = trace_step(training_step(name), name, 2).graph
    assert fake.operations == real.operations
    assert fake.storages == real.storages


@pytest.mark.parametrize("name", ["resnet18", "gpt", "densenet"])
def test_gradients_are_added_in_place_where_pytorch_does(name):
    step = training_step(name)
    graph = trace_step(step, name, 2).graph
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step.clear()
        step.run()
    real = Counter(event.name for event in profiler.events())
    found = Counter(each.kind for each in graph.operations)
    assert found["aten.add_"] == real["aten::add_"]
    assert found["aten.add"] == real["aten::add"]
    assert "aten.add_" in kinds(graph, Phase.BACKWARD)


def test_parameters_state_and_gradients_have_their_roles():
    graph = trace_step(training_step("resnet18", "adam"), "resnet18", 4).graph
    found = Counter(each.role for each in graph.storages)
    assert found[Role.PARAMETER] == found[Role.GRADIENT] == 62
    assert found[Role.BUFFER] == 60  # mean, variance and count of 20 batch norms
    assert found[Role.OPTIMIZER_STATE] == 3 * 62  # two moments and a count
    assert found[Role.INPUT] == 2
    by_name = {each.name: each for each in graph.storages}
    assert by_name["fc.weight"].size == by_name["fc.weight.grad"].size == by_name["fc.weight.exp_avg"].size
    assert by_name["loss"].role is Role.OUTPUT


def test_operations_have_the_module_and_the_line_that_called_them(resnet18):
    forward = find(resnet18, "convolution_1")
    backward = next(each for each in reversed(resnet18.operations) if each.problem and each.module == "layer1.0.conv1")
    assert (forward.module, forward.phase, backward.phase) == ("layer1.0.conv1", Phase.FORWARD, Phase.BACKWARD)
    file, _, line = forward.source.partition(":")
    assert file == "bench/memory/models.py"
    assert int(line) > 0
    assert backward.source == forward.source
    assert all(each.source.startswith("torch/optim/") for each in resnet18.operations if each.phase is Phase.OPTIMIZER)
    without = [
        each for each in resnet18.operations if not each.source and each.kind not in ("aten.ones_like", "aten.add_")
    ]
    assert without == []


def test_an_operation_in_place_reads_and_writes_one_storage(resnet18):
    norm, relu = find(resnet18, "native_batch_norm"), find(resnet18, "relu")
    assert relu.reads == relu.writes
    assert relu.reads[0] in norm.writes


def test_views_make_no_operation_and_no_storage():
    def views(x, weight):
        return x.view(-1).reshape(4, 6).t()[1:].detach().unsqueeze(0) * weight

    graph = trace_step(step_of(Lambda(views, 1, 5, 4), torch.ones(24)), "views", 1).graph
    assert kinds(graph, Phase.FORWARD) == ["aten.mul", "aten.sum"]
    assert storages(graph, graph.operations[0].reads) == {"input", "weight"}


def test_a_batch_norm_writes_its_statistics(resnet18):
    norm = find(resnet18, "native_batch_norm")
    assert {"bn1.running_mean", "bn1.running_var"} <= storages(resnet18, norm.writes) & storages(resnet18, norm.reads)


def test_a_convolutions_backward_is_two_operations(resnet18):
    data, filters = (find(resnet18, f"convolution_backward_{part}") for part in ("data", "filter"))
    assert data.problem.operation is Operation.BACKWARD_DATA
    assert filters.problem.operation is Operation.BACKWARD_FILTER
    assert "layer4.1.conv2.weight" in storages(resnet18, data.reads)
    assert "layer4.1.conv2.weight" not in storages(resnet18, filters.reads)
    assert "layer4.1.conv2.weight.grad" in storages(resnet18, filters.writes)
    assert data.flops == filters.flops
    assert data.flops.fixed == 2 * 4 * 512 * 512 * 9 * 3 * 3
    # The first layer's input needs no gradient.
    assert len([each for each in resnet18.operations if each.name.startswith("convolution_backward_data")]) == 19
    assert len([each for each in resnet18.operations if each.name.startswith("convolution_backward_filter")]) == 20


def test_an_overwriting_operation_does_not_read():
    def overwrite(x, weight):
        out = torch.empty_like(x)
        out.copy_(x)
        part = torch.empty(2, 24)
        part[0].copy_(x)
        return (out * weight).sum() + part[0].sum()

    graph = trace_step(step_of(Lambda(overwrite, 24), torch.ones(24), loss=lambda out: out), "copies", 1).graph
    whole, part = find(graph, "copy"), find(graph, "copy_1")
    assert storages(graph, whole.reads) == {"input"}
    assert storages(graph, part.reads) == {"input", "empty"}


def test_gradients_that_are_kept_exist_before_the_step():
    freed = trace_step(training_step("unet"), "unet", 2).graph
    kept = trace_step(training_step("unet", gradients_kept=True), "unet", 2).graph
    gradient = next(index for index, each in enumerate(kept.storages) if each.role is Role.GRADIENT)
    assert kept.exists_before[gradient]
    assert not freed.gradients_kept
    assert kept.operations[0].kind == "aten.zero_"
    assert Counter(kinds(kept, Phase.BACKWARD))["aten.add_"] > Counter(kinds(freed, Phase.BACKWARD))["aten.add_"]


def test_only_what_draws_random_numbers_is_not_repeatable():
    graph = trace_step(
        step_of(torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Dropout()), torch.ones(2, 5)), "drop", 2
    )
    assert {each.kind for each in graph.graph.operations if not each.repeatable} == {"aten.bernoulli_"}
    assert all(each.repeatable for each in trace_step(training_step("gpt"), "gpt", 4).graph.operations)


def test_what_lives_after_the_step_is_an_output():
    kept = []

    def hold(x, weight):
        kept.append(x * weight)
        return kept[-1]

    graph = trace_step(step_of(Lambda(hold, 5), torch.ones(5)), "hold", 1).graph
    assert graph.storages[find(graph, "mul").writes[0]].role is Role.OUTPUT


def test_a_constant_of_the_program_exists_before_the_step():
    constant = torch.ones(5)
    graph = trace_step(step_of(Lambda(lambda x, weight: x * weight * constant, 5), torch.ones(5)), "name", 1).graph
    assert [each.name for each in graph.storages if each.role is Role.BUFFER] == ["constant"]


def test_a_step_stands_for_every_mini_batch(unet):
    assert unet.recorded == (4, 8, 12)
    with FakeTensorMode():
        other = record(replace(UNET, batch=5))
    assert unet.with_batch(7).sizes == other.with_batch(7).sizes
    assert unet.problems.keys() == other.problems.keys()
    assert unet.with_batch(7).problems == other.with_batch(7).problems
    assert {each.dtype for each in unet.operations} == {"float32", "int64"}


def test_a_step_that_is_not_affine_in_its_mini_batch_is_refused():
    with pytest.raises(StepGraphError, match=r"is another one at a mini-batch of 9 than the records at 3 and 6 say"):
        record(TrainingRecipe(model="tests.support.training_steps:squared_batch", batch=3, shape=(2,), loss="mse"))


def test_a_step_of_one_sample_that_others_do_not_follow_is_recorded_alone():
    recipe = TrainingRecipe(model=f"{__name__}:instance_norms", batch=1, shape=(1, 8, 8), loss="mse")
    alone, several = record(recipe), record(replace(recipe, batch=2))
    assert (alone.recorded, several.recorded) == ((1,), (2, 4, 6))
    assert len(alone.operations) < len(several.operations)
    with FakeTensorMode():
        expected = record_made(lambda: make_step(recipe, torch.device("cpu"), foreach=True), "", (1,), {})
    assert alone.sizes == expected.sizes
    with pytest.raises(StepGraphError, match="was recorded at a mini-batch of 1 only"):
        alone.with_batch(2)


def instance_norms():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.InstanceNorm2d(4, affine=True), torch.nn.ReLU())


def test_type_layout_and_autocast_reach_the_operations():
    half = record(replace(UNET, variant=Variant(dtype=DataType.BFLOAT16, channels_last=True)))
    assert {each.dtype for each in half.operations if each.problem} == {"bfloat16"}
    assert {problem.layout for problem in half.problems.values()} == {Layout.NHWC}
    cast = record(replace(UNET, autocast=DataType.BFLOAT16))
    assert {each.dtype for each in cast.operations if each.kind == "aten.convolution"} == {"bfloat16"}
    assert {each.role for each in cast.storages if each.name == "head.weight"} == {Role.PARAMETER}
    assert cast.conditions["autocast"] == "bfloat16"


@pytest.mark.parametrize(("precision", "math"), [("highest", "fma"), ("high", "tf32")])
def test_a_record_says_how_products_are_computed(precision, math):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert UNET.conditions()["matmul"] == math
    finally:
        torch.set_float32_matmul_precision(before)


def test_tied_weights_stay_one_parameter():
    graph = record(TrainingRecipe(model="tests.support.training_steps:small_gpt", batch=2, shape=(16,), tokens=True))
    assert [each.name for each in graph.storages if each.role is Role.PARAMETER].count("wte.weight") == 1
    assert sum(each.role is Role.PARAMETER for each in graph.storages) == 28


def test_a_measured_step_has_a_time_and_scratch_for_each_operation(unet):
    graph, costs = record_measured(UNET, torch.device("cpu"), repeats=2)
    assert graph.recorded == (4, 8, 12)
    assert sum(graph.with_batch(6).sizes) == sum(unet.with_batch(6).sizes)
    assert len(costs.time_ms) == len(costs.scratch_bytes) == len(graph.operations)
    assert min(costs.time_ms) > 0
    assert costs.offload_bytes_per_ms > 0
    assert costs.memory_bytes > 2**28


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"shape": (16,)}, "give the shape of one sample as --shape, or --tokens for numbers of tokens"),
        ({"shape": (16,), "tokens": True}, "give the shape of one sample as --shape, or leave out --tokens"),
    ],
)
def test_an_input_that_a_model_does_not_take_ends_in_one_line_with_the_way_out(fakes_log, changes, way_out):
    recipe = TrainingRecipe(model="tests.support.training_steps:two_layers", batch=4, **changes)
    with pytest.raises(InvalidNetworkError, match=rf"two_layers does not take 4x16: .*[^.]: .*{way_out}"):
        record(recipe)
    assert fakes_log() == []


REFUSED = {
    "number": lambda: Lambda(lambda x, w: x * w * float(x.detach().mean())),
    "mask": lambda: Lambda(lambda x, w: x[x[:, 0, 0] > 0] * w),
    "array": lambda: Lambda(lambda x, w: x * w * float(x.detach().numpy().mean())),
    "counter": lambda: torch.nn.BatchNorm2d(3, momentum=None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_fit_refuses_is_refused_with_the_same_words(name, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "refused", REFUSED[name], raising=False)
    with pytest.raises(StepGraphError) as ours:
        record(TrainingRecipe(model=f"{__name__}:refused", batch=2, shape=(3, 8, 8), loss="mse"))
    with pytest.raises(StepGraphError) as theirs:
        fit(REFUSED[name](), torch.randn(2, 3, 8, 8))
    assert str(ours.value) + INSTEAD_OF_A_PLAN == str(theirs.value)
