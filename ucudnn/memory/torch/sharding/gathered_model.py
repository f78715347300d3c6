"""GatheredModel: a model whose modules read whole parameters, of which each rank holds some rows.

A parameter is gathered where it is read first in a forward, and once, because the gradient of a tied weight is one sum.
What is gathered is an activation of the step: backward reads it, and a plan may drop it and gather it again. Small
parameters that follow each other are gathered together, and their gradients averaged so, because a collective of few
bytes takes as long as one of some MiB.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from ucudnn.errors import InvalidValueError
from ucudnn.memory.step.sharded import buckets
from ucudnn.memory.torch.sharding.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ucudnn.memory.torch.sharding.shards import ParameterShard

_SPLIT: Any = torch.split_with_sizes_copy


class GatheredModel(nn.Module):
    """Runs a model on whole parameters. Its modules must have shards as a plan sees them meanwhile.

    The precision says in which types parameters are gathered and gradients averaged, and what is cast to them. Where it
    accumulates, backward leaves whole gradients, which no rank has averaged.

    Attributes:
        accumulated: for each trained parameter one without memory, whose gradient is the whole gradient then.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Sequence[ParameterShard],
        group: Any,
        precision: MixedPrecisionPolicy,
        *,
        accumulates: bool = False,
    ) -> None:
        super().__init__()
        self.module = model
        trained = [each for each in shards if each.outside.requires_grad and accumulates]
        self.accumulated, reduced = nn.ParameterList(), precision.reduce_dtype
        for each in trained:
            own = precision.param_dtype or each.inside.dtype
            dtype = torch.promote_types(own, reduced or own)
            self.accumulated.append(nn.Parameter(each.inside.new_empty((), dtype=dtype).expand(each.outside.shape)))
            if reduced not in (None, dtype):  # FSDP2 rounds its sums so, and not what it adds
                self.accumulated[-1].register_post_accumulate_grad_hook(partial(_round, reduced))
        given = None if not precision.cast_forward_inputs else precision.param_dtype
        self._casts = partial(_cast, given), partial(_cast, precision.output_dtype)
        self._way = way = _Way(dist.get_world_size(group), group.group_name, precision.param_dtype, reduced)

        def kind(shard: ParameterShard) -> object:
            has_rows = shard.is_split and shard.outside.numel() > 0
            return (shard.inside.dtype, shard.outside.requires_grad) if has_rows else None

        together = buckets(shards, lambda each: each.outside.numel() * each.outside.element_size(), kind)

        @contextmanager
        def whole() -> Iterator[None]:
            tables = [(vars(each), each._parameters) for each in model.modules() if each._parameters]
            recurrent = [(vars(each), each._flat_weights) for each in model.modules() if isinstance(each, nn.RNNBase)]
            read = _Reader(together, way, dict(zip(map(id, trained), self.accumulated, strict=True)))
            try:
                for attributes, table in tables:
                    attributes["_parameters"] = _WholeParameters(table, read)
                for attributes, _ in recurrent:  # these layers have a list of their parameters, too
                    own = attributes["_parameters"]
                    attributes["_flat_weights"] = [own[each] for each in attributes["_flat_weights_names"]]
                yield
            finally:
                for attributes, table in tables:
                    attributes["_parameters"] = table
                for attributes, weights in recurrent:
                    attributes["_flat_weights"] = weights
                read.forget()

        self._whole, self._trained = whole, trained

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        cast, cast_output = self._casts
        with self._whole():
            args, kwargs = cast((args, kwargs))
            return cast_output(self.module(*args, **kwargs))

    def reduce(self) -> None:
        """Average the whole gradients that were accumulated, and leave each rank its rows of the means."""
        for shard, whole in zip(self._trained, self.accumulated, strict=True):
            if whole.grad is not None:
                rows = shard.outside.shape[0] if shard.is_split else None
                with torch.no_grad():
                    shard.inside.grad = _averaged(whole.grad, rows, self._way, shard.inside.dtype)
                whole.grad = None
                shard.hand_over(shard.inside)

    def reading(self, loss: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
        """Return a loss that reads whole parameters of the model, too, as one that adds their norms does.

        Raises:
            InvalidValueError: if it is a module that has parameters of its own.
        """
        if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
            raise InvalidValueError(
                f"the loss {type(loss).__name__} has parameters, which no rank would average: make it a module of the"
                " model"
            )
        if loss is None or isinstance(loss, nn.Module):
            return loss
        inner = loss

        @wraps(inner)
        def called(*args: Any, **kwargs: Any) -> Tensor:
            with self._whole():
                return inner(*args, **kwargs)

        return called


@final
class _WholeParameters(dict[str, Any]):
    def __init__(self, table: dict[str, Any], read: "_Reader") -> None:
        super().__init__(table)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        return self._read(super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._read(super().get(key, default))

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]


@final
class _Reader:
    def __init__(
        self, together: Sequence[Sequence[ParameterShard]], way: "_Way", accumulated: Mapping[int, Tensor]
    ) -> None:
        # While a step is traced, tensors without memory are in the places of the shards.
        self._buckets = {id(table[key]): bucket for bucket in together for each in bucket for table, key in each.places}
        self._whole: dict[int, Tensor] = {}
        self._way, self._accumulated, self._trains = way, accumulated, torch.is_grad_enabled()

    def __call__(self, inside: Tensor | None) -> Tensor | None:
        bucket = self._buckets.get(id(inside))
        if inside is None or bucket is None:
            return inside
        if id(inside) not in self._whole:
            insides = [dict.__getitem__(each.places[0][0], each.places[0][1]) for each in bucket]
            accumulated = [self._accumulated[id(each)] for each in bucket if id(each) in self._accumulated]
            rows = [each.outside.shape[0] if each.is_split else None for each in bucket]
            with torch.set_grad_enabled(self._trains):  # a module may read it within no_grad before it trains it
                found = _Gathered.apply(rows, self._way, *insides, *accumulated)
            self._whole.update(zip(map(id, insides), found, strict=True))
        return self._whole[id(inside)]

    def forget(self) -> None:
        """Hold nothing that was gathered: what a trace has recorded may hold the tables, and so this reader."""
        self._whole.clear()


class _Way(NamedTuple):
    """Among which ranks, and in which types, a parameter is gathered and its gradient averaged; None keeps the type."""

    ranks: int
    group: str
    dtype: torch.dtype | None
    reduced: torch.dtype | None


class _Gathered(torch.autograd.Function):
    """Whole parameters of their shards, by one collective each way.

    Backward returns this rank's part of the mean of all ranks' gradients.

    Where gradients are accumulated, it returns this rank's whole gradient, as that of another tensor.
    """

    @staticmethod
    def forward(ctx: Any, rows: Sequence[int | None], way: _Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        insides = tensors[: len(rows)]
        ctx.rows, ctx.way, ctx.shapes = rows, way, [each.shape for each in insides]
        ctx.dtype, ctx.accumulates = tensors[0].dtype, len(tensors) > len(rows)
        ctx.set_materialize_grads(False)
        if len(rows) > 1:
            part = _to(torch.cat([each.reshape(-1) for each in insides]), way.dtype)
            full: Tensor = ALL_GATHER(part, way.ranks, way.group)
            found = _SPLIT(full.view(way.ranks, -1), [each.numel() for each in insides], 1)
            parts = zip(found, ctx.shapes, rows, strict=True)
            return tuple(each.view(-1, *shape[1:])[:count] for each, shape, count in parts)
        part = _to(insides[0], way.dtype)
        if rows[0] is None:
            return (part.view_as(part),)
        full = ALL_GATHER(part, way.ranks, way.group)
        return (full if full.shape[0] == rows[0] else full[: rows[0]],)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        none, way = (None,) * len(gradients), ctx.way
        if ctx.accumulates:
            return None, None, *none, *(each if each is None else _widened(each, way.reduced) for each in gradients)
        if all(each is None for each in gradients):
            return None, None, *none
        if len(gradients) > 1:
            return None, None, *_averaged_together(gradients, ctx)
        (gradient,) = gradients
        assert gradient is not None
        return None, None, _averaged(gradient, ctx.rows[0], way, ctx.dtype)


def _averaged_together(gradients: Sequence[Tensor | None], ctx: Any) -> Iterator[Tensor | None]:
    """Yield this rank's rows of the means of all ranks' gradients, None for what has none."""
    way: _Way = ctx.way
    given = next(each for each in gradients if each is not None)
    every = [
        (given.new_zeros(way.ranks, shape.numel()) if each is None else _padded(each, way)).reshape(way.ranks, -1)
        for each, shape in zip(gradients, ctx.shapes, strict=True)
    ]
    whole = _to(torch.cat(every, 1), way.reduced).view(-1)
    mean = _to(REDUCE_SCATTER(whole, way.ranks, way.group), ctx.dtype)
    found = _SPLIT(mean, [each.numel() for each in ctx.shapes])
    for gradient, part, shape in zip(gradients, found, ctx.shapes, strict=True):
        yield None if gradient is None else part.view(shape)


def _padded(gradient: Tensor, way: _Way) -> Tensor:
    rows = gradient.shape[0]
    if not rows % way.ranks:
        return gradient
    padded = gradient.new_zeros((-(-rows // way.ranks) * way.ranks, *gradient.shape[1:]))
    padded[:rows].copy_(gradient)
    return padded


def _averaged(gradient: Tensor, rows: int | None, way: _Way, dtype: torch.dtype) -> Tensor:
    """Return this rank's rows of the mean of all ranks' gradients; no number of rows stands for all of it."""
    gradient = _to(gradient, way.reduced).contiguous()
    if rows is not None:
        gradient = _padded(gradient, way)
    return _to((ALL_REDUCE if rows is None else REDUCE_SCATTER)(gradient, way.ranks, way.group), dtype)


def _round(dtype: torch.dtype | None, whole: Any) -> None:
    whole.grad.copy_(whole.grad.to(dtype))


def _widened(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, dtype or tensor.dtype))


def _to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _cast(dtype: torch.dtype | None, values: Any) -> Any:
    """Return values of which all tensors of real numbers have a type; None leaves them as they are."""
    return values if dtype is None else tree_map_only(Tensor, lambda each: _to(each, dtype), values)
