"""Slabs: volumes and images alone in their mini-batch are divided along their depth or height."""

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
from tests.support.strategies import examples
from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.division.part_axes import PartAxes
from ucudnn.memory.torch.division.segment import SegmentOrder, StepSegment

CHANNELS, WIDTH = 4, 4
CONVOLUTION = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX_POOL, AVERAGE_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}, {2: nn.AvgPool2d, 3: nn.AvgPool3d}
INSTANCE_NORM = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
LINEAR = {2: "bilinear", 3: "trilinear"}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class Skip(nn.Module):
    """Concatenates or adds what a layer makes of its input to the input."""

    def __init__(self, rank, joins):
        super().__init__()
        self.joins, self.layer = joins, CONVOLUTION[rank](CHANNELS, CHANNELS, 3, padding=1)
        self.narrow = CONVOLUTION[rank](2 * CHANNELS if joins else CHANNELS, CHANNELS, 1)

    def forward(self, x):
        return self.narrow(torch.cat([x, self.layer(x)], 1) if self.joins else x + self.layer(x))


class Positions(nn.Module):
    """Multiplies rows by a tensor of which only its size says that it has rows."""

    def __init__(self, rank):
        super().__init__()
        self.shape = -1, *[1] * (rank - 1)

    def forward(self, x):
        return x * (torch.arange(x.shape[2]).to(x) / x.shape[2]).view(self.shape)


def convolution(rank, kernel, **options):
    return CONVOLUTION[rank](CHANNELS, CHANNELS, kernel, **options)


def transposed(rank, kernel, **options):
    return TRANSPOSED[rank](CHANNELS, CHANNELS, kernel, **options)


def resized(rank, first, mode, by=2):
    return nn.Sequential(first, nn.Upsample(scale_factor=by, mode=mode))


LAYERS = {
    "grouped": lambda rank: convolution(rank, 3, padding=1, groups=2),
    "five rows": lambda rank: convolution(rank, 5, padding=2),
    "dilated": lambda rank: convolution(rank, 3, padding=2, dilation=2),
    "without padding": lambda rank: convolution(rank, (3, *[1] * (rank - 1))),
    "more padding": lambda rank: convolution(rank, (2, *[1] * (rank - 1)), padding=(1, *[0] * (rank - 1))),
    "strided, linear": lambda rank: resized(rank, convolution(rank, 3, stride=2, padding=1), LINEAR[rank]),
    "every other row": lambda rank: nn.Sequential(
        convolution(rank, 1, stride=2), transposed(rank, 3, stride=2, padding=1, output_padding=1, bias=False)
    ),
    "apart": lambda rank: nn.Sequential(convolution(rank, 2, stride=2), transposed(rank, 2, stride=2)),
    "four rows": lambda rank: nn.Sequential(
        convolution(rank, 4, stride=2, padding=1), transposed(rank, 4, stride=2, padding=1, bias=False)
    ),
    "transposed": lambda rank: transposed(rank, 3, padding=1, bias=False),
    "relu": lambda rank: nn.Sequential(convolution(rank, 1), nn.ReLU(inplace=True)),
    "prelu": lambda rank: nn.PReLU(CHANNELS),
    "gelu": lambda rank: nn.GELU(),
    "softmax": lambda rank: nn.Softmax(1),
    "instance norm": lambda rank: INSTANCE_NORM[rank](CHANNELS, affine=True),
    "instance norm, relu": lambda rank: nn.Sequential(INSTANCE_NORM[rank](CHANNELS), nn.ReLU(inplace=True)),
    "batch norm": lambda rank: BATCH_NORM[rank](CHANNELS, momentum=0.3),
    "group norm": lambda rank: nn.GroupNorm(2, CHANNELS),
    "dropout": lambda rank: nn.Dropout(0.3),
    "max pool, nearest": lambda rank: resized(rank, MAX_POOL[rank](2), "nearest"),
    "ceiling": lambda rank: resized(rank, MAX_POOL[rank](3, 2, ceil_mode=True), "nearest"),
    "average pool, linear": lambda rank: resized(rank, AVERAGE_POOL[rank](2), LINEAR[rank]),
    "four times": lambda rank: resized(rank, MAX_POOL[rank](4), LINEAR[rank], 4),
    "positions": lambda rank: Positions(rank),
    "cat": lambda rank: Skip(rank, True),
    "add": lambda rank: Skip(rank, False),
}
NORMS = "instance norm", "instance norm, relu"


def network(rank, kinds, rows, batch=1, *, last=False):
    """Return a network of float64 and its sample."""
    torch.manual_seed(1)
    form = LAST[rank] if last else torch.contiguous_format
    layers = [CONVOLUTION[rank](3, CHANNELS, 3, padding=1), *(LAYERS[kind](rank) for kind in kinds)]
    model = nn.Sequential(*layers, CONVOLUTION[rank](CHANNELS, 2, 1)).double().to(memory_format=form)
    x = torch.randn(batch, 3, rows, *[WIDTH] * (rank - 1)).double().contiguous(memory_format=form)
    with torch.no_grad():
        shape = copy.deepcopy(model)(x).shape
    return model, (x, torch.randn(shape).double())


def slabs_of(model, sample, parts, begin=0.0, end=1.0, loss=functional.mse_loss):
    _, program = program_of(model, sample, loss)
    return segment_of(PartAxes(program, slabs=True), program, begin, end, parts)


@st.composite
def divisions(draw):
    kinds = draw(st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=4))
    rows, parts = draw(st.integers(8, 19)), draw(st.integers(2, 4))
    begin, end = (draw(st.floats(0, 1) | st.just(each)) for each in (0.0, 1.0))
    return kinds, rows, parts, begin, end


@pytest.mark.slow
@given(divisions(), st.sampled_from([2, 3]), st.integers(1, 2), st.booleans())
@examples(1 / 2)
def test_slabs_have_the_gradients_of_the_whole(drawn, rank, batch, last):
    """PyTorch's own gradients of instance norm with channels last are wrong on a CPU where the mini-batch is one."""
    kinds, rows, parts, begin, end = drawn
    model, sample = network(rank, kinds, rows, batch, last=last and not {*kinds} & {*NORMS})
    order = slabs_of(model, sample, parts, begin, end)
    if order is not None:
        check(model, sample, functional.mse_loss, order)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_between_convolutions_is_divided(kind, rank):
    """The segment has forward and backward of each layer, but where it ends before what needs all rows."""
    model, sample = network(rank, [kind, "grouped", "relu"], 13)
    order = slabs_of(model, sample, 3)
    found = check(model, sample, functional.mse_loss, order)
    is_whole = kind in ("group norm", "dropout")
    assert (len(order.segment.forward) < 5) is is_whole
    if not is_whole:
        divided, whole = (
            sum(each.func._opname == "convolution_backward" for each in program.calls)
            for program in (found, order.axes.program)
        )
        assert divided >= 3 * whole


def test_rows_beside_gaps_stay_as_they_are():
    """The gradient of softmax has rows beside those that a slab needs, and PyTorch writes it as if it had none."""
    model, sample = network(3, ["softmax", "grouped", "relu"], 16)
    found = check(model, sample, functional.mse_loss, slabs_of(model, sample, 4))
    writes = [each for each in found.calls if each.func._opname == "_softmax_backward_data"]
    assert len(writes) == 4
    assert all(each.outputs[0].is_dense for each in writes)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_whole_gradient_that_slabs_would_change_twice_is_copied(rank):
    """GELU's gradient is written over what comes from behind the segment, of which two slabs read the same rows."""
    model, sample = network(rank, ["gelu", "grouped", "gelu"], 12)
    _, program = program_of(model, sample, functional.mse_loss)
    axes, graph = PartAxes(program, slabs=True), program.graph
    last = max(at for at, call in enumerate(axes.program.calls) if call.func._opname == "gelu")
    first = min(at for at, call in enumerate(axes.program.calls) if call.func._opname == "gelu_backward")
    order = SegmentOrder(axes, StepSegment(range(last + 1), range(first, graph.optimizer_begins), 3))
    assert order.copied
    check(model, sample, functional.mse_loss, order)


@pytest.mark.parametrize("rows", [12, 13])
@pytest.mark.parametrize("kind", [*NORMS, "batch norm"])
def test_a_norm_in_two_passes_has_the_statistics_of_all_rows(kind, rows):
    model, sample = network(3, ["grouped", kind], rows)
    order = slabs_of(model, sample, 3)
    assert (order.passes(0), order.passes(1)) == (2, 2)
    found = check(model, sample, functional.mse_loss, order)
    assert Counter(each.func for each in found.calls)[torch.ops.aten.var_mean.correction] == 4


@pytest.mark.parametrize("kind", ["group norm", "dropout"])
def test_a_segment_of_slabs_has_no_statistics_of_a_slab_and_no_other_random_numbers(kind):
    model, sample = network(3, [kind], 12)
    _, program = program_of(model, sample, functional.mse_loss)
    axes = PartAxes(program, slabs=True)
    turn, end = (getattr(axes.program.graph, each) for each in ("backward_begins", "optimizer_begins"))
    with pytest.raises(StepGraphError, match="is computed whole, and reads what is there for one part at a time"):
        SegmentOrder(axes, StepSegment(range(turn), range(turn + 1, end), 2))


def test_there_are_no_more_slabs_than_rows():
    model, sample = network(2, ["four times"], 16)
    order = slabs_of(model, sample, 4)
    with pytest.raises(StepGraphError, match="5 parts are more than the 4 rows that are divided"):
        SegmentOrder(order.axes, replace(order.segment, parts=5))


@pytest.mark.parametrize("loss", [
    lambda x, y: functional.cross_entropy(x, (y[:, 0] > 0).long()),
    lambda x, y: functional.cross_entropy(x, (y[:, 0] > 0).long(), weight=torch.tensor([1.0, 3.0]).double()),
    lambda x, y: 1 - 2 * (x.sigmoid() * y).sum((2, 3, 4)).div((x.sigmoid() + y.abs()).sum((2, 3, 4)) + 1).mean(),
    lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
])  # fmt: skip
def test_losses_of_volumes_are_added_over_slabs(loss):
    model, sample = network(3, ["cat"], 11)
    order = slabs_of(model, sample, 3, loss=loss)
    check(model, sample, loss, order)
    assert len(order.segment.forward) >= 7


def test_gradients_in_float32_are_as_exact_as_undivided_ones():
    model, (x, y) = network(3, ["instance norm, relu", "cat", "max pool, nearest", "apart"], 24)
    plain, exact = copy.deepcopy(model).float(), model
    divided, sample = copy.deepcopy(plain), (x.float(), y.float())
    step = divided_step(divided, sample, functional.mse_loss, slabs_of(divided, sample, 4))
    step(*sample).backward()
    functional.mse_loss(plain(sample[0]), sample[1]).backward()
    functional.mse_loss(exact(x), y).backward()
    own, other, right = (torch.cat([each.grad.double().flatten() for each in net.parameters()])
                         for net in (divided, plain, exact))  # fmt: skip
    assert (own - right).norm() <= 1.5 * (other - right).norm()
