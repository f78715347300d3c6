"""How what an operator returns lies in memory, and its type: seen where the operator runs, on small data.

PyTorch makes fakes of many operators by others that compute the same. Where arguments are transposed, in channels_last
or of several types, the layout of such a fake can differ from that of the real result. Therefore each kind of call runs
once on a few zeros whose layout is that of its arguments. The result at full size gets the same order of dimensions.
Where the small result does not tell that order, the call runs at full size.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from ucudnn.memory.torch.subject.traced_values import TracedTensor, listed, mapped, tensors_in

aten = torch.ops.aten

_LEAST = 8  # sizes up to it stay: groups, kernels and heads are such
_MOST_ELEMENTS, _MOST_AT_FULL_SIZE = 1 << 20, 1 << 24
_SEEDED = {
    aten._scaled_dot_product_efficient_attention.default,
    aten._efficient_attention_forward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._cudnn_attention_forward.default,
}  # the seed and the offset of their dropout lie on the host, where backward reads them, but in a captured CUDA graph


_WHOLE, _OPAQUE = "mkldnn_rnn_layer", {"mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward"}
"""What runs at full size alone, and what reads memory of a form of its own, in which zeros are no sense."""


class TensorLayout(NamedTuple):
    """How a tensor lies in a storage of its own, whose bytes are given."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int
    dtype: torch.dtype
    device: str


_Layouts = tuple[TensorLayout | None, ...] | None
_RUN: dict[Any, _Layouts] = {}
"""What operators returned, by operator and layouts of arguments; None where they did not run."""
_MET: dict[Any, dict[int, TensorLayout]] = {}
"""How results lay in a step that found them otherwise than its trace, likewise, by position."""


def note_layout(func: Any, args: Any, kwargs: Any, position: int, found: TensorLayout) -> None:
    """Note how a result of a call lay in a step, for the next trace."""
    _MET.setdefault(_key(func, args, kwargs), {})[position] = found


def noted_layouts(func: Any, args: Any, kwargs: Any) -> dict[int, TensorLayout]:
    """Return how results of a call lay in a step that found them otherwise than its trace, by position."""
    return _MET.get(_key(func, args, kwargs), {}) if _MET else {}


def as_computed(
    func: Any, args: Any, kwargs: Any, result: Any, device: Callable[[TracedTensor], str], *, heavy: bool
) -> Any:
    """Return what an operator returns; fake results of the type and the layout of the real ones.

    Arguments are those of the trace. Whatever is no new fake comes back unchanged. A heavy operator computes much, so
    that its fake is believed unless a step has shown otherwise.
    """
    found = listed(result)
    written = any(each.alias_info is not None for each in func._schema.returns)  # or a view
    if func is aten.view.default and isinstance(result, FakeTensor) and 1 in result.shape:
        with no_dispatch():  # strides of the fake differ from the real ones in dimensions of one entry
            stride = args[0].empty().view(args[1]).stride()
        return result if result.stride() == stride else result.as_strided(result.shape, stride)
    if written or not found or not isinstance(found[0], FakeTensor):
        return result
    given = [*tensors_in((args, kwargs))]
    if func in _SEEDED:
        for at, each in enumerate(found):
            if isinstance(each, Tensor) and not (each.dim() or each.is_floating_point()):
                found[at] = each.new_empty((), device="cpu")
    elif not (heavy or func._opname in _OPAQUE or func.namespace != "aten" or _is_plain(func, given)):
        devices = [*map(device, given)]
        key = _key(func, args, kwargs), *devices, "laid"
        if key not in _RUN:
            _RUN[key] = _layouts(func, args, kwargs, found, devices)
        layouts = _RUN[key]
        found = [*map(_laid, found, layouts)] if layouts is not None and len(layouts) == len(found) else found
    for position, layout in noted_layouts(func, args, kwargs).items():
        found[position] = _laid(found[position], layout)
    return (found if type(result) is list else tuple(found)) if isinstance(result, (tuple, list)) else found[0]


def computed_whole(func: Any, args: Any, kwargs: Any, device: Callable[[TracedTensor], str]) -> Any:
    """Return fakes of what an operator returns at full size, where its own fake refuses; None where it does not run."""
    found = _known(func, args, kwargs, [*map(device, tensors_in((args, kwargs)))], _MOST_AT_FULL_SIZE)
    if found is None:
        return None
    fakes = [None if each is None else _fake(each) for each in found]
    return fakes[0] if len(func._schema.returns) == 1 else tuple(fakes)


def _is_plain(func: Any, given: Sequence[TracedTensor]) -> bool:
    """Whether nothing can lie otherwise: no tensor is given, or all lie alike, and each element is computed alone."""
    if not given:
        return not func._opname.endswith("_window")  # of which more is made than returned
    first = given[0]
    if 0 in first.shape:
        return True
    return torch.Tag.pointwise in func.tags and all(
        (each.stride, each.dtype, each.shape) == (make_contiguous_strides_for(first.shape), first.dtype, first.shape)
        for each in given
    )


def _layouts(func: Any, args: Any, kwargs: Any, fakes: Sequence[Any], devices: list[str]) -> _Layouts:
    if any(isinstance(each, torch.Generator) for each in kwargs.values()):
        return None
    most = _MOST_ELEMENTS
    given = [*tensors_in((args, kwargs))]
    for sizes in _smaller(given) if given and func._opname != _WHOLE else ():
        small = _known(func, _reduced(args, sizes), _reduced(kwargs, sizes), devices, _MOST_ELEMENTS, is_whole=False)
        if small is not None and len(small) == len(fakes):
            full = [*map(_enlarged, small, fakes)]
            if None not in full:
                return tuple(None if each is True else each for each in full)  # type: ignore[misc]
            most = _MOST_AT_FULL_SIZE
    return _known(func, args, kwargs, devices, most)


def _known(func: Any, args: Any, kwargs: Any, devices: list[str], most: int, *, is_whole: bool = True) -> _Layouts:
    """Return how results lie; smaller arguments must make sense to the fake, because not all operators look at them."""
    key = _key(func, args, kwargs), *devices
    if key not in _RUN:
        _RUN[key] = None
        with suppress(Exception):  # whatever the fake raises of sizes that do not go together
            if not is_whole:
                with no_dispatch():
                    own, named = (mapped(each, TracedTensor, TracedTensor.empty) for each in (args, kwargs))
                    func(*own, **named)
            _RUN[key] = _run(func, args, kwargs, devices, most)
    return _RUN[key]


def _smaller(given: Sequence[TracedTensor]) -> Iterator[dict[int, int]]:
    """Yield tables of smaller sizes: of all that are large, and of the mini-batch alone."""
    large = sorted({size for each in given for size in each.shape if size > _LEAST})
    table = {size: _LEAST + 2 + 2 * number for number, size in enumerate(large)}
    first = given[0].shape
    yield table
    if first and first[0] in table and first[0] not in first[1:]:
        yield {first[0]: table[first[0]]}


def _reduced(value: Any, sizes: dict[int, int]) -> Any:
    """Return arguments with other sizes, where whole numbers that are a size become the other one, too."""
    if isinstance(value, TracedTensor):
        shape = tuple(sizes.get(size, size) for size in value.shape)
        stride = relaid(value.shape, value.stride, shape)
        return (
            None if stride is None else TracedTensor(0, shape, stride, 0, value.dtype, value.conjugated, value.negated)
        )
    if isinstance(value, (tuple, list)):
        return type(value)(_reduced(each, sizes) for each in value)
    if isinstance(value, dict):
        return {key: _reduced(each, sizes) for key, each in value.items()}
    return sizes.get(value, value) if type(value) is int else value


def relaid(shape: Sequence[int], stride: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return strides of another shape in the same order; None where elements lie twice and no dimension is expanded."""
    found = [0] * len(shape)
    old = now = 1
    known = {1: 1}
    for step, size, at in sorted(zip(stride, shape, range(len(shape)), strict=True)):
        if size == 1:
            found[at] = known.get(step, now)
        elif step:
            if step < old:
                return None
            now *= max(1, -(-step // old))  # holes
            found[at] = now
            old, now = step * max(1, size), now * max(1, wanted[at])  # of which may be none
            known[old] = now
    return tuple(found)


def _enlarged(small: TensorLayout | None, fake: Any) -> TensorLayout | bool | None:
    """Return how a result lies at full size: True for none, and None where its small one does not tell."""
    if small is None or fake is None:
        return True
    shape = tuple(fake.shape)
    extent = TracedTensor(0, small.shape, small.stride, 0, small.dtype).extent
    told = len(shape) == len(small.shape) and not small.offset and small.size == extent * small.dtype.itemsize
    if not told or any(min(a, 2) != min(b, 2) for a, b in zip(shape, small.shape, strict=True)):
        return None
    stride = relaid(small.shape, small.stride, shape)
    if stride is None or extent != prod(small.shape):
        return None
    return TensorLayout(shape, stride, 0, prod(shape) * small.dtype.itemsize, small.dtype, small.device)


def _laid(fake: Any, layout: TensorLayout | None) -> Any:
    """Return a fake that lies as a layout says: itself if it does.

    Strides of dimensions of one entry count, too. By them PyTorch tells channels last, for which it has other kernels.
    """
    if layout is None or fake is None:
        return None
    alike = tuple(fake.shape) == layout.shape and tuple(fake.stride()) == layout.stride
    lies_so = alike and fake.dtype is layout.dtype and fake.device.type == layout.device
    return fake if lies_so and fake.untyped_storage().nbytes() == layout.size else _fake(layout, fake.device)


def _fake(layout: TensorLayout, near: torch.device | None = None) -> Tensor:
    device = near if near is not None and near.type == layout.device else torch.device(layout.device)
    base = torch.empty(layout.size // layout.dtype.itemsize, dtype=layout.dtype, device=device)
    return base.as_strided(layout.shape, layout.stride, layout.offset)


def _run(func: Any, args: Any, kwargs: Any, devices: list[str], most: int) -> _Layouts:
    """Run an operator on zeros, and return how its results lie; None if it fails."""
    given = [*tensors_in((args, kwargs))]
    extents = [each.extent for each in given]
    if len(given) != len(devices) or sum(extents) > most or ("cuda" in devices and not torch.cuda.is_available()):
        return None
    places = iter(zip(extents, devices, strict=True))

    storages = set[int]()

    def zeros(tensor: TracedTensor) -> Tensor:
        extent, where = next(places)
        made = torch.zeros(extent, dtype=tensor.dtype, device=where)
        storages.add(made.untyped_storage()._cdata)
        return replace(tensor, offset=0).within(made)

    try:
        with no_dispatch(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own, named = (mapped(each, TracedTensor, zeros) for each in (args, kwargs))
            result = func(*own, **named)
    except Exception:  # noqa: BLE001  # whatever an operator raises of zeros
        return None
    results = listed(result)
    made = [each for each in results if each is not None]
    if any(
        not isinstance(each, Tensor)
        or each.layout is not torch.strided
        or each.is_nested
        or each.is_conj()
        or each.is_neg()
        for each in made
    ):
        return None
    own_storages = {each.untyped_storage()._cdata for each in made}
    # Views of one tensor, or of an argument, as `_unsafe_view` returns them, are known by the fake.
    if own_storages & storages or len(own_storages) < len(made):
        return None
    return tuple(None if each is None else layout_of(each) for each in results)


def layout_of(tensor: Tensor) -> TensorLayout:
    """Return how a tensor lies in its storage."""
    size = tensor.untyped_storage().nbytes()
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    return TensorLayout(shape, stride, int(tensor.storage_offset()), size, tensor.dtype, tensor.device.type)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    return func, _hashable((args, kwargs))


def _hashable(value: Any) -> Any:
    """Return arguments without their storages, as a key of a table; 1, 1.0 and True differ."""
    kind = type(value)
    if kind is TracedTensor:
        return value.shape, value.stride, value.dtype, value.conjugated, value.negated
    if kind is tuple or kind is list:
        return kind, *map(_hashable, value)
    if kind is dict:
        return tuple((key, _hashable(each)) for key, each in value.items())
    return kind, value
