"""Divided segments: gradients of random small networks against those of the plain loop in float64."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.support.divided_steps import check, divided_step, program_of, segment_of
from tests.support.plain_training import fit_plan
from tests.support.strategies import examples
from ucudnn.errors import StepGraphError
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.torch.division.batch_norms import split_norms
from ucudnn.memory.torch.division.divided_program import divided
from ucudnn.memory.torch.division.part_axes import PartAxes
from ucudnn.memory.torch.division.segment import SegmentOrder, StepSegment
from ucudnn.memory.torch.division.segment_choice import SegmentChoice
from ucudnn.memory.torch.measuring.operation_costs import step_costs

FORMATS = torch.contiguous_format, torch.channels_last
CHANNELS, SIZE, TOKENS, WIDTH, WORDS = 4, 8, 6, 8, 11


class Skip(nn.Module):
    """Concatenates or adds what a layer makes of its input to the input."""

    def __init__(self, joins):
        super().__init__()
        self.joins, self.layer = joins, nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.narrow = nn.Conv2d(2 * CHANNELS if joins else CHANNELS, CHANNELS, 1)

    def forward(self, x):
        return self.narrow(torch.cat([x, self.layer(x)], 1) if self.joins else x + self.layer(x))


class Attention(nn.Module):
    """Attention of two heads, under a causal mask, or one that all samples share."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.qkv, self.out = masked, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.rand(TOKENS, TOKENS) > 0.3)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for each in self.qkv(x).split(WIDTH, -1))
        mask = self.mask | torch.eye(TOKENS, dtype=torch.bool) if self.masked else None
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not self.masked)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Applied(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


IMAGE_LAYERS = {
    "convolution": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=2),
    "transposed convolution": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
    "relu": lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.ReLU(inplace=True)),
    "prelu": lambda: nn.PReLU(CHANNELS),
    "gelu": nn.GELU,
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "instance norm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "plain instance norm, relu": lambda: nn.Sequential(nn.InstanceNorm2d(CHANNELS), nn.ReLU(inplace=True)),
    "layer norm": lambda: nn.LayerNorm([CHANNELS, SIZE, SIZE]),
    "evaluated batch norm": lambda: nn.BatchNorm2d(CHANNELS).eval(),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS, momentum=0.3),
    "plain batch norm, relu": lambda: nn.Sequential(
        nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False), nn.ReLU(inplace=True)
    ),
    "max pool, nearest": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
    "average pool, bilinear": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")),
    "adaptive pool": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Upsample(scale_factor=2, mode="bicubic")),
    "reflection": lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(CHANNELS, CHANNELS, 3)),
    "softmax": lambda: nn.Softmax(1),
    "dropout": lambda: nn.Dropout(0.3),
    "cat": lambda: Skip(True),
    "add": lambda: Skip(False),
    "strides": lambda: Applied(lambda x: x[:, :, ::2].repeat_interleave(2, 2) * x.amax((2, 3), keepdim=True)),
    "permuted": lambda: Applied(lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)),
    "other samples": lambda: Applied(lambda x: x - x.mean(0, keepdim=True)),
}
TOKEN_LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "attention": lambda: Attention(False),
    "masked attention": lambda: Attention(True),
    "silu": nn.SiLU,
    "glu": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "softmax": lambda: nn.Softmax(-1),
    "batched product": lambda: Applied(lambda x: x @ x.transpose(1, 2) @ x / 8),
    "dropout": lambda: nn.Dropout(0.3),
}
DENSE_LOSSES = {
    "mse": functional.mse_loss,
    "mse sum": lambda x, y: functional.mse_loss(x, y, reduction="sum"),
    "huber": functional.huber_loss,
    "smooth l1": lambda x, y: functional.smooth_l1_loss(x, y, beta=0.7),
    "l1": functional.l1_loss,
    "bce": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce with logits": lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "mean of a norm": lambda x, y: (x - y).flatten(1).norm(dim=1).mean(),
}
WEIGHT = torch.rand(WORDS, dtype=torch.float64) + 0.5
WORD_LOSSES = {
    "cross entropy": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten()),
    "weighted, ignored": lambda x, y: functional.cross_entropy(x.mT, y, weight=WEIGHT, ignore_index=3),
    "smoothed": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "sum": lambda x, y: functional.cross_entropy(x.mT, y, reduction="sum"),
}


def whole_order(model, sample, parts):
    """Return a segment with all that can be divided of a step."""
    _, program = program_of(model, sample, functional.mse_loss)
    order = segment_of(PartAxes(program), program, 0.0, 1.0, parts)
    assert order.segment.forward.start == 0
    return order


shares = st.floats(0, 1)


@st.composite
def divisions(draw, layers):
    kinds = draw(st.lists(st.sampled_from([*layers]), min_size=1, max_size=4))
    batch = draw(st.integers(2, 5))
    return kinds, batch, draw(st.integers(2, batch)), draw(shares | st.just(0.0)), draw(shares | st.just(1.0))


def check_random(model, sample, loss, parts, begin, end):
    model, sample = model.double(), tuple(each.double() if each.is_floating_point() else each for each in sample)
    _, program = program_of(model, sample, loss)
    order = segment_of(PartAxes(program), program, begin, end, parts)
    if order is not None:
        check(model, sample, loss, order)


@pytest.mark.slow
@given(divisions(IMAGE_LAYERS), st.sampled_from([*DENSE_LOSSES]), st.sampled_from(FORMATS))
@examples(1 / 5)
def test_divided_images_have_the_gradients_of_the_whole_mini_batch(drawn, loss, form):
    kinds, batch, parts, begin, end = drawn
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, CHANNELS, 3, padding=1), *(IMAGE_LAYERS[kind]() for kind in kinds)]
    model = nn.Sequential(*layers, nn.Conv2d(CHANNELS, 2, 1)).to(memory_format=form)
    sample = torch.randn(batch, 3, SIZE, SIZE).contiguous(memory_format=form), torch.randn(batch, 2, SIZE, SIZE)
    check_random(model, sample, DENSE_LOSSES[loss], parts, begin, end)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("batch", "parts"), [(2, 2), (5, 3)])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_two_batch_norms_in_a_segment_have_the_statistics_of_the_whole_mini_batch(options, batch, parts, form):
    torch.manual_seed(1)
    norms = (nn.BatchNorm2d(CHANNELS, **options) for _ in range(2))
    layers = (layer for norm in norms for layer in (norm, nn.ReLU(True), nn.Conv2d(CHANNELS, CHANNELS, 1)))
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), *layers).double().to(memory_format=form)
    sample = (
        torch.randn(batch, 3, SIZE, SIZE).double().contiguous(memory_format=form),
        torch.randn(batch, CHANNELS, SIZE, SIZE),
    )
    order = whole_order(model, sample, parts)
    assert (order.passes(0), order.passes(1)) == (3, 3)
    found = check(model, sample, functional.mse_loss, order)
    assert Counter(each.func for each in found.calls)[torch.ops.aten.var_mean.correction] == 2 * (parts + 1)


def test_weights_that_are_repeated_for_each_sample_are_cut_as_samples_are():
    """No call of the segment tells where samples lie in the weights of an instance norm."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1), nn.InstanceNorm2d(CHANNELS, affine=True), nn.Conv2d(CHANNELS, 2, 1)
    ).double()
    sample = torch.randn(4, 3, SIZE, SIZE).double(), torch.randn(4, 2, SIZE, SIZE).double()
    order = whole_order(model, sample, 4)
    assert len(order.segment.forward) == order.axes.program.graph.backward_begins
    check(model, sample, functional.mse_loss, order)


def test_norms_of_cudnn_are_split_as_those_of_pytorch():
    """No CPU runs them: a program that calls them is split into the same calls, its storage in reserve aside."""
    aten = torch.ops.aten
    _, program = program_of(
        nn.Sequential(nn.Conv2d(3, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)),
        (torch.randn(4, 3, SIZE, SIZE), torch.randn(4, CHANNELS, SIZE, SIZE)),
        functional.mse_loss,
    )

    def of_cudnn(call):
        if call.func is aten.native_batch_norm.default:
            return replace(call, func=aten.cudnn_batch_norm.default, results=(*call.results, call.results[1]))
        if call.func is aten.native_batch_norm_backward.default:
            grad, x, weight, mean, var, saved, invstd, _, epsilon, _ = call.args
            args = x, grad, weight, mean, var, saved, invstd, epsilon, saved
            return replace(call, func=aten.cudnn_batch_norm_backward.default, args=args)
        return call

    other = replace(program, calls=tuple(map(of_cudnn, program.calls)))
    one, two = map(split_norms, (program, other))
    assert one.program.calls == two.program.calls
    assert (len(one.norms), one.norms, one.gathers, one.backward_of) == (2, two.norms, two.gathers, {0: 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_parts_are_as_exact_as_those_of_the_whole(dtype):
    """The mean of what is normalized is far from zero, where sums of squares would have no digits left."""
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(CHANNELS)
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), norm, nn.GELU(), nn.Conv2d(CHANNELS, 2, 1)).to(dtype)
    model[1].float()
    nn.init.constant_(model[0].bias, 100.0 if dtype is torch.float32 else 4.0)
    sample = torch.randn(5, 3, SIZE, SIZE, dtype=dtype), torch.randn(5, 2, SIZE, SIZE, dtype=dtype)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    order = whole_order(model, sample, 3)
    step = divided_step(model, sample, functional.mse_loss, order)
    step(*sample).backward()
    functional.mse_loss(plain(sample[0]), sample[1]).backward()
    functional.mse_loss(exact(sample[0].double()), sample[1].double()).backward()
    errors = [
        torch.cat(
            [(a.grad.double() - b.grad).flatten() for a, b in zip(each.parameters(), exact.parameters(), strict=True)]
        ).norm()
        for each in (model, plain)
    ]
    assert errors[0] <= 1.5 * errors[1]
    for one, other in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=0)


def test_a_gradient_that_lies_otherwise_than_its_input_is_divided():
    """The gradient of evaluated batch normalization lies as its input, not as what it is given."""
    torch.manual_seed(1)
    kinds = "evaluated batch norm", "permuted"
    layers = [nn.Conv2d(3, CHANNELS, 3, padding=1), *(IMAGE_LAYERS[kind]() for kind in kinds)]
    sample = torch.randn(2, 3, SIZE, SIZE), torch.randn(2, 2, SIZE, SIZE)
    check_random(nn.Sequential(*layers, nn.Conv2d(CHANNELS, 2, 1)), sample, functional.mse_loss, 2, 0.0, 1.0)


@pytest.mark.slow
@given(divisions(TOKEN_LAYERS), st.sampled_from([*WORD_LOSSES]), st.booleans())
@examples(1 / 5)
def test_divided_tokens_have_the_gradients_of_the_whole_mini_batch(drawn, loss, tied):
    kinds, batch, parts, begin, end = drawn
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *(TOKEN_LAYERS[kind]() for kind in kinds), nn.Linear(WIDTH, WORDS, bias=False)
    )
    if tied:
        model[-1].weight = model[0].weight
    sample = torch.randint(0, WORDS, (batch, TOKENS)), torch.randint(0, WORDS, (batch, TOKENS))
    check_random(model, sample, WORD_LOSSES[loss], parts, begin, end)


@pytest.mark.parametrize("form", FORMATS)
def test_the_rest_of_a_skips_gradient_goes_before_the_skip_is_reached(form):
    """Calls that nothing divides are those of the step as it is, batch norms among them, and so are the bits."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, CHANNELS, 1), nn.Conv2d(2 * CHANNELS, 2, 1)
            layers = (
                nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.GELU()) for _ in "123"
            )
            self.deep = nn.Sequential(*layers)

        def forward(self, x):
            x = self.first(x)
            return self.last(torch.cat([x, self.deep(x)], 1))

    torch.manual_seed(1)
    model = Deep().to(memory_format=form)
    sample = torch.randn(4, 3, SIZE, SIZE).contiguous(memory_format=form), torch.randn(4, 2, SIZE, SIZE)
    plain = copy.deepcopy(model)
    subject, program = program_of(model, sample, functional.mse_loss)
    found = divided(PartAxes(program), []).program
    kinds, own = (Counter(each.kind for each in each.graph.operations) for each in (found, program))
    assert kinds - own == {"aten.clone": 1}
    assert not own - kinds
    costs = step_costs(found.graph, found.device)
    step = fit_plan(subject, found, find_policy("stock").plan(found.graph, costs, None), costs, debug=True)
    step(*sample).backward()
    functional.mse_loss(plain(sample[0]), sample[1]).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@pytest.mark.slow
def test_every_run_of_forward_has_the_gradients_of_the_whole_mini_batch():
    """The rectifier changes in place what instance norm makes, within a segment or behind it."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 1), nn.InstanceNorm2d(CHANNELS), nn.ReLU(True), Skip(True), nn.Conv2d(CHANNELS, 2, 1)
    ).double()
    sample = torch.randn(3, 3, 4, 4).double(), torch.randn(3, 2, 4, 4).double()
    _, program = program_of(model, sample, functional.mse_loss)
    choice = SegmentChoice(program, step_costs(program.graph, program.device))
    turn, found = choice.axes.program.graph.backward_begins, 0
    for run in (range(first, last) for first in range(turn) for last in range(first + 1, turn + 1)):
        for order in filter(lambda each: each.level, choice._orders(run)[:1]):
            check(model, sample, functional.mse_loss, order)
            model.zero_grad()
            found += 1
    assert found > 20


@pytest.mark.parametrize(("layer", "why"), [
    (nn.Dropout(0.3), "is computed whole, and reads what is there for one part at a time"),
    (nn.BatchNorm2d(CHANNELS).bfloat16(), "is computed whole, and reads what is there for one part at a time"),
    (nn.BatchNorm2d(CHANNELS), "is a batch norm of which only a part is in the segment"),
])  # fmt: skip
def test_a_segment_has_no_statistics_of_a_part_and_no_other_random_numbers(layer, why):
    """Statistics of 16 bits are not added up, and those of half a norm would be those of a part."""
    dtype = next((each.dtype for each in layer.parameters()), torch.float32)
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), layer, nn.Conv2d(CHANNELS, 2, 1)).to(dtype)
    sample = torch.randn(4, 3, SIZE, SIZE).to(dtype), torch.randn(4, 2, SIZE, SIZE).to(dtype)
    _, program = program_of(model, sample, functional.mse_loss)
    axes = PartAxes(program)
    graph = axes.program.graph
    turn = graph.backward_begins
    stop = axes.split.norms[0].stop - 1 if axes.split.norms else turn
    with pytest.raises(StepGraphError, match=why):
        SegmentOrder(axes, StepSegment(range(stop), range(turn + 1, graph.optimizer_begins), 2))
