"""How operators are computed for slabs: ranges of rows along the depth of volumes, or the height of images.

Most operators are computed for rows as for samples. Convolutions, pools and resizing read rows of other numbers. A sum,
as the gradient of a filter, takes each row once, so it reads no rows that slabs share.
"""

from dataclasses import replace
from math import prod
from typing import Any

from ucudnn.memory.torch.division.part_rules import SUM, Cut, CutOf, PartRule, part_rule
from ucudnn.memory.torch.division.windows import Window
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, listed
from ucudnn.memory.torch.tracing.assemble import writes

_ROW = Cut(2, 1)  # of tensors of samples, channels, rows and so on
_POOLS = tuple(f"{kind}_pool{rank}d{end}" for kind, end in (("max", "_with_indices"), ("avg", "")) for rank in (2, 3))
_RESIZING = (
    *("upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_bilinear2d", "upsample_trilinear3d"),
)


def slab_rule(call: TracedCall, cut: CutOf) -> PartRule | None:
    """Return how a call is computed for slabs; None if it cannot.

    `cut` returns where an argument is cut.
    """
    name = call.func._opname.removesuffix("_backward")
    kind = _convolution if name == "convolution" else _pool if name in _POOLS else _resizing
    if name == "convolution" or name in (*_POOLS, *_RESIZING):
        return None if call.func.namespace != "aten" or writes(call) else kind(call, cut, call.args)
    lengths = {found.rows(each) for each in call.inputs if (found := cut(each))}
    rule = part_rule(call, cut, *lengths) if len(lengths) == 1 else None
    is_mixed = rule is not None and SUM in rule.results and any(isinstance(each, Cut) for each in rule.results)
    return None if is_mixed else rule


def _rule(call: TracedCall, window: Window, fine: set[Any], cut: CutOf, **others: Any) -> PartRule | None:
    """Return the rule of an operator that has rows in all of its tensors but filters, if each lies along these."""
    results = listed(call.results)
    carriers = [each for each in call.inputs if each is not call.argument("weight")]
    carriers = [each for each in carriers if each is not call.argument("bias")]
    if any(cut(each) != _ROW for each in carriers) or window.padding > window.reach or window.fine < 2:
        return None
    is_square = window.fine == window.coarse
    if is_square and not window.is_padded and (window.stride > 1 or window.tail):
        return None
    kinds = tuple(None if each is None else SUM if window.is_padded else _ROW for each in results)
    fine &= {*call.inputs, *(each for each in results if isinstance(each, TracedTensor))}
    return PartRule(cuts=dict.fromkeys(carriers, _ROW), results=kinds, window=window, fine=frozenset(fine), **others)


def _convolution(call: TracedCall, cut: CutOf, args: tuple[Any, ...]) -> PartRule | None:
    is_backward = call.func._opname.endswith("_backward")
    x, weight = args[is_backward : is_backward + 2]
    y = args[0] if is_backward else call.results
    stride, padding, dilation, more = (call.argument(each)[0] for each in _PARAMETERS)
    reach, is_transposed = (weight.shape[2] - 1) * dilation, call.argument("transposed")
    if len(x.shape) < 4:
        return None
    coarse, fine = (x, y) if is_transposed else (y, x)
    tail = reach + 1 - 2 * padding - stride + more if is_transposed else reach - 2 * padding
    window = Window(fine=fine.shape[2], coarse=coarse.shape[2], stride=stride, padding=padding, reach=reach, tail=tail)
    if not is_backward or args[-1][0]:
        if is_backward and any(args[-1][1:]):
            return None
        return _rule(call, window, {fine, *(call.results[:1] if is_backward and not is_transposed else ())}, cut)
    if is_transposed and args[-1][2] and (padding or reach + 1 != stride or more):
        return None  # a bias's gradient would add rows that slabs share
    constants = {5: [0, *args[5][1:]], 8: [0, *args[8][1:]]}
    return _rule(call, replace(window, is_padded=True), {fine}, cut, constants=constants)


_PARAMETERS = "stride", "padding", "dilation", "output_padding"


def _pool(call: TracedCall, cut: CutOf, args: tuple[Any, ...]) -> PartRule | None:
    """Pools without padding, of which a part would average over other numbers of entries, or find none."""
    is_backward = call.func._opname.endswith("_backward")
    x, y = args[is_backward], args[0] if is_backward else listed(call.results)[0]
    kernel, stride = call.argument("kernel_size")[0], (call.argument("stride") or call.argument("kernel_size"))[0]
    padding, dilation = (([each] if isinstance(each, int) else each or [fill])[0] for each, fill in
                         ((call.argument("padding"), 0), (call.argument("dilation"), 1)))  # fmt: skip
    if padding or len(x.shape) != (5 if "3d" in call.func._opname else 4):
        return None
    reach = (kernel - 1) * dilation
    window = Window(fine=x.shape[2], coarse=y.shape[2], stride=stride, padding=0, reach=reach, tail=reach + 1 - stride)
    places = prod(x.shape[3:]) if call.func._opname.startswith("max") else 0
    return _rule(call, window, {x, *(listed(call.results) if is_backward else [])}, cut, places=places)


def _resizing(call: TracedCall, cut: CutOf, args: tuple[Any, ...]) -> PartRule | None:
    """Resizing by a power of two, whose rows have the same weights in each slab."""
    is_backward = call.func._opname.endswith("_backward")
    small, large = (call.results, args[0]) if is_backward else (args[0], call.results)
    factor, rest = divmod(large.shape[2], small.shape[2])
    scale = call.argument("scales_d" if "3d" in call.func._opname else "scales_h")
    if rest or factor & (factor - 1) or call.argument("align_corners") or scale not in (None, factor):
        return None
    is_linear = "linear" in call.func._opname
    padding, reach = ((factor + 1) // 2, 2 * factor - 1) if is_linear else (0, factor - 1)
    window = Window(fine=large.shape[2], coarse=small.shape[2], stride=factor, padding=padding, reach=reach, tail=0)
    sizes = ((1, 0, 1, True), (2, 2, 1, False)) if is_backward else ((1, 0, 1, True),)
    return _rule(call, window, {large}, cut, sizes=sizes)
