"""How operators are computed for a part: which dimensions of arguments and results are cut.

Each rule names the dimensions of an operator's tensors by labels. Entries along a label that the rule allows do not
depend on each other, or their results are added. So the rules hold for any dimension, whatever the model means by it.
An operator without a rule is computed whole.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, final

import torch

from ucudnn.memory.torch.division.windows import Window
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, listed, tensors_in
from ucudnn.memory.torch.tracing.assemble import writes
from ucudnn.memory.torch.tracing.in_place import ELEMENTWISE

aten = torch.ops.aten


class Cut(NamedTuple):
    """Where a tensor is cut: a dimension, and how many of its entries each row, as a sample, has."""

    dim: int
    entries: int

    def rows(self, tensor: TracedTensor) -> int:
        """Return the number of rows of a tensor that is cut so."""
        return tensor.shape[self.dim] // self.entries


SUM = "sum"
"""In the place of a `Cut`: the results of the parts are added."""
OWN = "own"
"""In the place of a `Cut`: each part has a result of its own, in which samples are not told apart."""

Result = Cut | str | None


@final
@dataclass(frozen=True, kw_only=True)
class PartRule:
    """How a call is computed in parts.

    Attributes:
        cuts: the arguments that are cut; all others are given whole.
        results: what becomes of each result; None for results that are None.
        sizes: arguments that hold a number of rows: position, index in a list or -1, entries of each row, and whether
            they are rows of the fine axis.
        constants: arguments that have another value in a part, by position.
        func: the operator of a part; None for that of the call.
        over: the sum of the first result is divided by this number, or by the sum of the second result if it is 0.
        scaled: position of an argument that is divided by a number first, and the number.
        window: how rows of arguments and results belong together; None if they are the same.
        fine: the tensors on the fine axis of the window.
        places: entries of a row among which places are counted, which are arguments or results of whole numbers.
    """

    cuts: Mapping[TracedTensor, Cut]
    results: tuple[Result, ...]
    sizes: tuple[tuple[int, int, int, bool], ...] = ()
    constants: Mapping[int, Any] = field(default_factory=dict)
    func: Any = None
    over: int | None = None
    scaled: tuple[int, int] | None = None
    window: Window | None = None
    fine: frozenset[TracedTensor] = frozenset()
    places: int = 0


CutOf = Callable[[TracedTensor], Cut | None]
_Labels = Sequence[Hashable]
_MEAN, _TOTAL = 1, 2  # reductions of losses

_ALIKE = frozenset({
    "clone", "_to_copy", "copy_", "empty_like", "zeros_like", "ones_like", "full_like", "fill_", "zero_",
    "_prelu_kernel", "_prelu_kernel_backward", "prelu_backward", "native_dropout_backward",
    "masked_fill", "masked_fill_",
})  # fmt: skip
"""Operators of single elements that PyTorch does not tag as such."""

_ALONG = frozenset({
    "_softmax", "_log_softmax", "cumsum", "flip", "cat", "gather", "glu", "_softmax_backward_data",
    "_log_softmax_backward_data", "glu_backward", "slice_backward", "select_backward",
})  # fmt: skip
"""Operators along some dimensions, which are an argument of this name."""

_REDUCING = frozenset({
    "sum", "mean", "amax", "amin", "argmax", "argmin", "logsumexp", "var", "var_mean", "any", "linalg_vector_norm",
})  # fmt: skip

_FIRST = {
    "convolution": ("n", (0, 1), "n++"),
    "native_group_norm": ("nnn", (0, 1, 2, 3), "n++"),
    "max_pool": ("nn", (0, 1, 7), "n"),
    "adaptive_max_pool": ("nn", (0, 1, 2), "n"),
    **dict.fromkeys(("avg_pool", "_adaptive_avg_pool", "reflection_pad", "replication_pad"), ("n", (0, 1), "n")),
    **dict.fromkeys(("upsample_", "_upsample_", "pixel_"), ("n", (0,), "n")),
}
"""Operators of samples along the first dimension, by how they begin: for each result whether it has that dimension or
is a sum; of their backward the positions of arguments that have it, and its results."""
_SIZES = {
    "native_group_norm": 3,
    "native_group_norm_backward": 5,
    **dict.fromkeys(("slice_backward", "select_backward"), 1),
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"), 1),
}
"""Operators with a size of the mini-batch among their arguments, and where that or the list with it is."""
_LOSSES = frozenset({
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss",
})  # fmt: skip


def part_rule(call: TracedCall, cut: CutOf, batch: int) -> PartRule | None:
    """Return how a call is computed for parts of a mini-batch; None if it cannot, or no argument is cut.

    `cut` returns where an argument is cut, `batch` is the number of samples, or of other rows.
    """
    if call.draws or not any(cut(each) for each in call.inputs):
        return None
    rule = _rule_of(call, call.func._opname) if call.func.namespace in ("aten", "ucudnn") else None
    found = None if rule is None else rule(_Call(call, cut, batch))
    if (
        found is None
        or len(listed(call.results)) != len(found.results)
        or not all(each in found.cuts for each in writes(call))
    ):
        return None
    name, first = call.func._opname, found.results[0]
    position = 2 if name.startswith(("upsample_", "_upsample_")) and name.endswith("_backward") else _SIZES.get(name)
    if position is None or not isinstance(first, Cut):
        return found
    is_list = isinstance(call.args[position], (list, tuple))
    return replace(found, sizes=((position, first.dim if is_list else -1, first.entries, False),))


@final
class _Call:
    def __init__(self, call: TracedCall, cut: CutOf, batch: int) -> None:
        self.call, self.args, self.cut, self.batch = call, call.args, cut, batch
        self.name: str = call.func._opname
        self.results = listed(call.results)
        dims = call.argument("dims" if self.name == "flip" else "dim")
        self.dims: list[int] = [] if dims is None else listed(dims)

    def labelled(
        self,
        inputs: Iterable[tuple[TracedTensor | None, _Labels]],
        outputs: Sequence[_Labels],
        free: Iterable[Hashable],
        *,
        adds: bool = False,
    ) -> PartRule | None:
        """Return the rule of an operator whose dimensions have labels, of which some may be cut.

        A result without the label is the sum over it, where the operator adds.
        """
        given = [(tensor, [*labels]) for tensor, labels in inputs if tensor is not None]
        if {*self.call.inputs} - {tensor for tensor, _ in given}:
            return None
        places = [(labels[found.dim], found.entries) for tensor, labels in given if (found := self.cut(tensor))]
        label, entries = places[0]
        if label not in {*free} or any(each != (label, entries) for each in places):
            return None
        own: dict[TracedTensor, Cut | None] = {}
        for tensor, labels in given:
            dims = [dim for dim, each in enumerate(labels) if each == label and tensor.shape[dim] != 1]
            if len(dims) > 1 or (dims and tensor.shape[dims[0]] != entries * self.batch):
                return None
            found = Cut(dims[0], entries) if dims else None
            if own.setdefault(tensor, found) != found:  # it is given twice, in two senses
                return None
        cuts = {tensor: found for tensor, found in own.items() if found is not None}
        results: list[Result] = []
        for tensor, own_labels in zip(self.results, outputs, strict=False):
            at = [*own_labels].index(label) if label in own_labels else None
            results.append(None if tensor is None else SUM if at is None else Cut(at, entries))
        if not adds and SUM in results:
            return None
        return PartRule(cuts=cuts, results=tuple(results))


def _aligned(tensor: TracedTensor) -> range:
    """Return labels of dimensions that are broadcast: each by its distance from the last one."""
    return range(-len(tensor.shape), 0)


def _rule_of(call: TracedCall, name: str) -> Callable[[_Call], PartRule | None] | None:
    if name in _LOSSES or name.removesuffix("_backward") in _LOSSES:
        return _loss
    if name in _RULES:
        return _RULES[name]
    if name in _REDUCING:
        return _reducing
    if name.startswith(tuple(_FIRST)):
        return _first
    if name in _ALONG or name in _SIZES or name == "constant_pad_nd":
        return _along
    if name.startswith("_scaled_dot_product"):
        return _attention
    if torch.Tag.pointwise in call.func.tags or name in _ALIKE or name in ELEMENTWISE:
        return _pointwise
    return None


def _pointwise(call: _Call) -> PartRule | None:
    inputs = [(each, _aligned(each)) for each in call.call.inputs]
    if not all(isinstance(each, TracedTensor) for each in call.results):
        return None
    return call.labelled(inputs, [*map(_aligned, call.results)], _aligned(call.results[0]))


def _along(call: _Call) -> PartRule | None:
    inputs, rank = call.call.inputs, len(call.results[0].shape)
    if call.name == "constant_pad_nd":
        blocked = {rank - 1 - number // 2 for number, each in enumerate(call.args[1]) if each}
    elif call.name.startswith("new_"):
        if tuple(call.args[1]) != inputs[0].shape:
            return None
        blocked = set()
    else:
        blocked = {dim % (rank or 1) for dim in call.dims}
    labels = [dim for dim in range(rank) if call.name != "select_backward" or dim not in blocked]
    if any(len(each.shape) != len(labels) for each in inputs):
        return None
    return call.labelled([(each, labels) for each in inputs], [range(rank)], {*labels} - blocked)


def _reducing(call: _Call) -> PartRule | None:
    x = call.args[0]
    rank = len(x.shape)
    reduced = {dim % rank for dim in call.dims} if call.dims else {*range(rank)}
    kept = len(call.results[0].shape) == rank
    labels = [("one", dim) if dim in reduced else dim for dim in range(rank) if kept or dim not in reduced]
    adds = call.name in ("sum", "mean")
    free = range(rank) if adds else {*range(rank)} - reduced
    rule = call.labelled([(x, range(rank))], [labels] * len(call.results), free, adds=adds)
    if rule is None or call.name != "mean" or SUM not in rule.results:
        return rule
    overload = aten.sum.default if call.call.func is aten.mean.default else aten.sum.dim_IntList
    return replace(rule, func=overload, over=prod(x.shape[dim] for dim in reduced))


def _first(call: _Call) -> PartRule | None:
    forward, positions, backward = next(each for begin, each in _FIRST.items() if call.name.startswith(begin))
    is_backward = call.name.endswith("_backward")
    carriers = [call.args[each] for each in (positions if is_backward else (0,)) if len(call.args) > each]
    if call.name.startswith("pixel") and len(carriers[0].shape) < 4:  # its first dimension are channels
        return None
    inputs = [
        (each, [("n" if each in carriers and not dim else (each, dim)) for dim in range(len(each.shape))])
        for each in call.call.inputs
    ]
    outputs = [["n"] if kind == "n" else [] for kind in (backward if is_backward else forward)]
    return call.labelled(inputs, outputs, "n", adds=True)


def _product(call: _Call) -> PartRule | None:
    batched = "bmm" in call.name
    adds_to = call.name.startswith(("add", "badd"))
    left, right = ("bik", "bkj") if batched else ("ik", "kj")
    out = "bij" if batched else "ij"
    *added, a, b = call.args[: 3 if adds_to else 2]
    inputs = [(a, left), (b, right), *((each, out[len(out) - len(each.shape) :]) for each in added)]
    return call.labelled(inputs, [out], out if adds_to else out + "k", adds=not adds_to)


def _layer_norm(call: _Call) -> PartRule | None:
    is_backward = call.name.endswith("_backward")
    x, shape = call.args[is_backward], call.args[1 + is_backward]
    rank, normalized = len(x.shape), len(shape)
    leading, whole = range(rank - normalized), range(rank)
    inputs = []
    for each in call.call.inputs:
        is_like = len(each.shape) == rank and each.shape[: rank - normalized] == x.shape[: rank - normalized]
        inputs.append((each, whole if is_like else [("w", dim) for dim in range(len(each.shape))]))
    outputs = [whole, [], []] if is_backward else [whole] * 3
    return call.labelled(inputs, outputs[: len(call.results)], leading, adds=is_backward)


def _batch_norm(call: _Call) -> PartRule | None:
    """Batch norm along channels, each of which has statistics of its own, as instance norm has each sample's."""
    is_backward, argument = call.name.endswith("_backward"), call.call.argument
    trains = (call.name.startswith("cudnn") and is_backward) or argument("training") or argument("train")
    if trains and not is_backward and argument("running_mean") is not None:
        return None
    rank = len(argument("input").shape)
    inputs = [(each, range(rank) if len(each.shape) == rank else [1] if prod(each.shape) else [-1])
              for each in call.call.inputs]  # fmt: skip
    rule = call.labelled(
        inputs, [range(rank), *[[1]] * 3][: len(call.results)], [1] if trains else range(rank), adds=True
    )
    if rule is None:
        return None
    empty = [each is not None and not prod(each.shape) for each in call.results]
    results = tuple(OWN if none else kind for kind, none in zip(rule.results, empty, strict=True))
    return replace(rule, results=results) if is_backward or SUM not in results else None


def _embedding(call: _Call) -> PartRule | None:
    weight, indices, *rest = call.args
    if call.name == "embedding":
        labels = _aligned(indices)
        return call.labelled([(indices, labels), (weight, ["rows", "w"])], [[*labels, "w"]], labels)
    grad, labels = weight, _aligned(indices)
    if rest[-1]:  # gradients are scaled by how often an index occurs in the whole mini-batch
        return None
    return call.labelled([(grad, [*labels, "w"]), (indices, labels)], [["rows", "w"]], labels, adds=True)


_OF_SAMPLES = ("query", "key", "value", "out", "logsumexp", "grad_out")
_MASKS = ("attn_mask", "attn_bias")


def _attention(call: _Call) -> PartRule | None:
    """Attention, whose samples lie along the first dimension; what is left beside them is the state of a generator."""
    names = [each.name for each in call.call.func._schema.arguments]
    named = {each: name for name in names for each in tensors_in(call.call.argument(name))}
    inputs: list[tuple[TracedTensor | None, _Labels]] = []
    for each in call.call.inputs:
        carries = named[each].rstrip("_") in _OF_SAMPLES or (named[each] in _MASKS and len(each.shape) == 4)
        inputs.append((each, ["n" if carries and not dim else (each, dim) for dim in range(len(each.shape))]))
    results = [each for each in call.results if isinstance(each, TracedTensor)]
    carried = [bool(each.shape) and each.shape[0] == call.call.argument("query").shape[0] for each in results]
    rule = call.labelled(inputs, (), "n", adds=True)
    if rule is None or not all(each in rule.cuts for each, name in named.items() if name.rstrip("_") in _OF_SAMPLES):
        return None
    if call.name.endswith("_backward") and not all(carried):  # as the gradient of a mask that all samples share
        return None
    cut = Cut(0, rule.cuts[call.call.argument("query")].entries)
    kinds = dict(zip(results, (cut if each else OWN for each in carried), strict=True))
    return replace(rule, results=tuple(kinds.get(each) for each in call.results))


def _loss(call: _Call) -> PartRule | None:
    """Losses of single elements, which are added or averaged, and their gradients."""
    position = [each.name for each in call.call.func._schema.arguments].index("reduction")
    reduction = call.call.argument("reduction")
    is_backward = call.name.endswith("_backward")
    tensors = call.call.inputs
    whole = max((each.shape for each in tensors), key=len)
    labels = range(-len(whole), 0)
    inputs = [(each, _aligned(each)) for each in tensors]
    if is_backward or not reduction:
        rule = call.labelled(inputs, [_aligned(each) for each in call.results], labels)
    else:
        rule = call.labelled(inputs, [[]], labels, adds=True)
    if rule is None or reduction != _MEAN:
        return rule
    count = prod(torch.broadcast_shapes(*(each.shape for each in tensors)))
    constants = {position: _TOTAL}
    return replace(rule, constants=constants, **({"scaled": (0, count)} if is_backward else {"over": count}))


def _likelihood(call: _Call) -> PartRule | None:
    """Negative log-likelihood, whose mean is over the sum of the targets' weights in the whole mini-batch."""
    is_backward = call.name.endswith("_backward")
    x, target, weight, reduction = call.args[is_backward : 4 + is_backward]
    n = [] if len(x.shape) == 1 else ["n"]
    spatial = [*range(len(x.shape) - 2)]
    inputs: list[tuple[TracedTensor | None, _Labels]] = [(x, [*n, "c", *spatial]), (target, [*n, *spatial])]
    inputs.append((weight, ["c"]))
    if is_backward:
        grad, total = call.args[0], call.args[6]
        inputs += [(grad, [] if not grad.shape else [*n, *spatial]), (total, [("one", d) for d in total.shape])]
        return call.labelled(inputs, [[*n, "c", *spatial]], ["n", *spatial])
    each = [*n, *spatial] if reduction == 0 else []
    rule = call.labelled(inputs, [each, []], ["n", *spatial], adds=True)
    if rule is None or reduction != _MEAN:
        return rule
    return replace(rule, constants={3: _TOTAL}, over=0)


_RULES: dict[str, Callable[[_Call], PartRule | None]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("embedding", "embedding_dense_backward"), _embedding),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward"), _likelihood
    ),
    **{f"{name}{end}": _layer_norm for name in ("native_layer_norm", "_fused_rms_norm") for end in ("", "_backward")},
    **{f"{name}{end}": _batch_norm for name in ("native_batch_norm", "cudnn_batch_norm") for end in ("", "_backward")},
}
