"""GatheredModel: a model whose modules read whole parameters, of which each rank holds some rows.

A parameter is gathered where it is read first in a forward, and once, because the gradient of a tied weight is one sum.
What is gathered is an activation of the step: backward reads it, and a plan may drop it and gather it again.
"""

import copy
from collections import defaultdict
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
from ucudnn.memory.torch.sharding.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ucudnn.memory.torch.sharding.shards import ParameterShard
from ucudnn.memory.torch.subject.update_parts import at_once


class GatheredModel(nn.Module):
    """Runs a model on whole parameters. Its modules must have shards as a plan sees them meanwhile.

    Args:
        model: the model.
        shards: its parameters.
        group: the ranks.
        precision: in which types parameters are gathered and gradients averaged, and what is cast to them.
        accumulates: whether backward leaves whole gradients in `accumulated`, which no rank has averaged.

    Attributes:
        accumulated: for each trained parameter one without memory, whose gradient is the whole gradient.
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
        self.accumulated = nn.ParameterList(_without_memory(each, precision) for each in trained)
        given = None if not precision.cast_forward_inputs else precision.param_dtype
        self._casts = partial(_cast, given), partial(_cast, precision.output_dtype)
        self._way = way = _Way(
            dist.get_world_size(group), group.group_name, precision.param_dtype, precision.reduce_dtype
        )

        @contextmanager
        def whole() -> Iterator[None]:
            tables = [(vars(each), each._parameters) for each in model.modules() if each._parameters]
            recurrent = [(vars(each), each._flat_weights) for each in model.modules() if isinstance(each, nn.RNNBase)]
            read = _Reader(shards, way, dict(zip(map(id, trained), self.accumulated, strict=True)))
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

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that no rank has averaged."""
        return any(each.grad is not None for each in self.accumulated)

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
    """The table of a module's parameters, which returns whole ones."""

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
    """Gathers what is read, once."""

    def __init__(self, shards: Sequence[ParameterShard], way: "_Way", accumulated: Mapping[int, Tensor]) -> None:
        # While a step is traced, tensors without memory are in the places of the shards.
        self._shards = {id(table[key]): each for each in shards for table, key in each.places}
        self._whole: dict[int, Tensor] = {}
        self._way, self._accumulated = way, accumulated

    def __call__(self, inside: Tensor | None) -> Tensor | None:
        shard = self._shards.get(id(inside))
        if inside is None or shard is None:
            return inside
        if id(inside) not in self._whole:
            rows = shard.outside.shape[0] if shard.is_split else None
            self._whole[id(inside)] = _Gathered.apply(inside, self._accumulated.get(id(shard)), rows, self._way)
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
    """A whole parameter of its shards; backward returns this rank's part of the mean of all ranks' gradients.

    Where gradients are accumulated, it returns this rank's whole gradient, as that of another tensor.
    """

    @staticmethod
    def forward(ctx: Any, inside: Tensor, accumulated: Tensor | None, rows: int | None, way: _Way) -> Tensor:
        ctx.rows, ctx.way, ctx.dtype, ctx.accumulates = rows, way, inside.dtype, accumulated is not None
        ctx.set_materialize_grads(False)
        part = _to(inside, way.dtype)
        if rows is None:
            return part.view_as(part)
        full: Tensor = ALL_GATHER(part, way.ranks, way.group)
        return full if full.shape[0] == rows else full[:rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        if ctx.accumulates:
            return None, _to(gradient, ctx.way.reduced), None, None
        return _averaged(gradient, ctx.rows, ctx.way, ctx.dtype), None, None, None


def _averaged(gradient: Tensor, rows: int | None, way: _Way, dtype: torch.dtype) -> Tensor:
    """Return this rank's rows of the mean of all ranks' gradients; no number of rows stands for all of it."""
    gradient = _to(gradient, way.reduced).contiguous()
    if rows is not None and rows % way.ranks:
        padded = gradient.new_zeros((-(-rows // way.ranks) * way.ranks, *gradient.shape[1:]))
        padded[:rows].copy_(gradient)
        gradient = padded
    mean = (ALL_REDUCE if rows is None else REDUCE_SCATTER)(gradient, way.ranks, way.group)
    return _to(mean, dtype)


def _without_memory(shard: ParameterShard, precision: MixedPrecisionPolicy) -> nn.Parameter:
    dtype = precision.reduce_dtype or precision.param_dtype or shard.inside.dtype
    return nn.Parameter(shard.inside.new_empty((), dtype=dtype).expand(shard.outside.shape))


def _to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _cast(dtype: torch.dtype | None, values: Any) -> Any:
    """Return values of which all tensors of real numbers have a type; None leaves them as they are."""
    return values if dtype is None else tree_map_only(Tensor, lambda each: _to(each, dtype), values)


def planned_optimizer(optimizer: torch.optim.Optimizer, shards: Sequence[ParameterShard]) -> torch.optim.Optimizer:
    """Return an optimizer of the shards inside, by which a trace counts state and temporaries; nobody calls it."""
    inside = {id(each.outside): each.inside for each in shards}
    found = copy.copy(optimizer)
    found.__dict__.pop("step", None)
    found.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        for index, each in enumerate(group["params"]):
            if id(each) not in inside:
                raise InvalidValueError(f"parameter {index} of the optimizer's group {number} is none of the model's")
        # Where nobody has chosen, PyTorch updates DTensors one by one.
        told = {"foreach": at_once(group)} if group.get("foreach", ...) is None else {}
        found.param_groups.append({**group, **told, "params": [inside[id(each)] for each in group["params"]]})
    found.state = defaultdict(dict)
    return found
