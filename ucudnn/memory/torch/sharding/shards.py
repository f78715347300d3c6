"""Shards: what each rank holds of parameters, as a plan knows it and as a training loop knows it.

Inside, a shard is a plain tensor of the same size on all ranks, padded where rows do not divide, so that all ranks have
one graph. Outside, the parameter is a DTensor, as in FSDP2, whose rows lie in the same memory. So optimizers,
`clip_grad_norm_` and torch.distributed.checkpoint do what they do there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.device.weak_hook import weakly


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ParameterShard:
    """A parameter of which this rank holds some rows.

    Attributes:
        name: its first name in the model.
        outside: the parameter that the training loop sees.
        inside: the same memory as a plan sees it, with as many rows on each rank; the last ones may be padding. What
            has no rows is whole on each rank.
        places: the tables of modules that have it, each with its key.
    """

    name: str
    outside: nn.Parameter
    inside: nn.Parameter
    places: list[tuple[dict[str, Any], str]] = field(repr=False)

    @property
    def is_split(self) -> bool:
        """Whether each rank has some of its rows; a scalar, or what has no rows, is whole on each rank."""
        return _is_split(self.outside.shape)

    def hand_over(self, inside: Tensor) -> None:
        """Give the parameter outside the gradient that the one inside has got, and call its hooks, as FSDP2 does."""
        if inside.grad is None:
            return
        with torch.no_grad():
            spec: Any = self.outside.data
            local = inside.grad[: spec.to_local().shape[0]] if self.is_split else inside.grad
            gradient, inside.grad = _distributed(local, spec.device_mesh, spec), None
            if self.outside.grad is None:
                self.outside.grad = gradient
            else:
                self.outside.grad += gradient
        for hook in [*(self.outside._post_accumulate_grad_hooks or {}).values()]:
            hook(self.outside)


def shard_parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh
) -> tuple[ParameterShard, ...]:
    """Leave each rank its rows of all parameters of a model; optimizers follow, with what state they have.

    Parameters are plain, as large as they are, or DTensors of the same one-dimensional mesh, split by their rows.

    Raises:
        InvalidValueError: if a parameter is distributed in another way, or is not contiguous.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module._parameters, key))
    named = [*model.named_parameters()]
    for name, parameter in named:
        _check(name, parameter, mesh)
    found, outside = [], dict[int, nn.Parameter]()
    for name, parameter in named:
        shard = _sharded(name, parameter, mesh, places[id(parameter)])
        outside[id(parameter)] = shard.outside
        found.append(shard)
        if parameter.requires_grad:
            shard.inside.register_post_accumulate_grad_hook(weakly(shard.hand_over))
    _replace(optimizers, outside, _split_like)
    place(found, inside=False)
    return tuple(found)


def earlier_parameters(model: nn.Module) -> list[tuple[Callable[[], nn.Parameter | None], bool]]:
    """Return what returns each parameter of a model as long as somebody has it, and whether it is a DTensor.

    Those with hooks or a gradient are held, because these would be gone with them.
    """

    def holds(parameter: nn.Parameter) -> bool:
        hooks: Any = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        return bool(hooks) or parameter.grad is not None

    every = [*model.parameters()]
    return [(repeat(each).__next__ if holds(each) else ref(each), isinstance(each, DTensor)) for each in every]


def unshard(
    shards: Sequence[ParameterShard],
    earlier: Sequence[tuple[Callable[[], nn.Parameter | None], bool]],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Give modules and optimizers the parameters that they had before they were sharded; all ranks do so together.

    What nobody has any more is gathered.
    """
    whole = dict[int, nn.Parameter]()
    for shard, (find, was_distributed) in zip(shards, earlier, strict=True):
        spec: Any = shard.outside.data
        gathered = None if was_distributed else spec.full_tensor()  # by all ranks, though some may need none
        parameter = find()
        if parameter is None and gathered is not None:
            parameter = nn.Parameter(gathered, requires_grad=shard.outside.requires_grad)
            vars(parameter).update(vars(shard.outside))
        whole[id(shard.outside)] = parameter = shard.outside if parameter is None else parameter
        for table, key in shard.places:
            table[key] = parameter
    _replace(optimizers, whole, _whole_like)


def place(shards: Sequence[ParameterShard], *, inside: bool) -> None:
    """Put parameters into their modules as a plan sees them, or as the training loop does."""
    for shard in shards:
        parameter = shard.inside if inside else shard.outside
        for table, key in shard.places:
            table[key] = parameter


@contextmanager
def placed_inside(shards: Sequence[ParameterShard]) -> Iterator[None]:
    """Let modules have parameters as a plan sees them.

    Raises:
        InvalidValueError: if somebody has replaced parameters since they were sharded.
    """
    for shard in shards:
        table, key = shard.places[0]
        if table.get(key) is not shard.outside:
            raise InvalidValueError(f"{shard.name} is another tensor than when the step was fitted: fit it again")
        if shard.outside.requires_grad is not shard.inside.requires_grad:
            raise InvalidValueError(f"{shard.name} was frozen or unfrozen since the step was fitted: fit it again")
    place(shards, inside=True)
    try:
        yield
    finally:
        place(shards, inside=False)


def _check(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    if isinstance(parameter, DTensor):
        wanted = (Shard(0) if _is_split(parameter.shape) else Replicate(),)
        if parameter.device_mesh != mesh or parameter.placements != wanted:
            raise InvalidValueError(
                f"parameter {name} is distributed as {parameter.placements} on {parameter.device_mesh}, and fit shards"
                f" rows on {mesh}: give fit plain parameters, or the same mesh"
            )
    elif not parameter.is_contiguous():
        raise InvalidValueError(
            f"parameter {name} of {tuple(parameter.shape)} has strides {parameter.stride()}, so its rows do not lie"
            " one behind the other: make it contiguous before fit, as FSDP2 wants it, too"
        )


def _sharded(
    name: str, parameter: nn.Parameter, mesh: DeviceMesh, places: list[tuple[dict[str, Any], str]]
) -> ParameterShard:
    with torch.no_grad():
        own = _own_rows(parameter.data, parameter.shape, mesh)
        inside = own.new_zeros((_rows(parameter.shape, mesh), *own.shape[1:])) if own.dim() else own.clone()
        local = inside[: own.shape[0]] if own.dim() else inside
        local.copy_(own)
        outside = nn.Parameter(_distributed(local, mesh, parameter), requires_grad=parameter.requires_grad)
    vars(outside).update(vars(parameter))
    shard = nn.Parameter(inside, requires_grad=parameter.requires_grad)
    return ParameterShard(name=name, outside=outside, inside=shard, places=places)


def _is_split(shape: Sequence[int]) -> bool:
    return len(shape) > 0 and shape[0] > 0


def _rows(shape: Sequence[int], mesh: DeviceMesh) -> int:
    """Return the rows of the first rank, of which no rank has more."""
    return -(-shape[0] // mesh.size())


def _own_rows(tensor: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Return what this rank has of a plain or a distributed tensor, divided as `torch.chunk` divides."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if not _is_split(shape):
        return tensor
    rows, rank = _rows(shape, mesh), mesh.get_local_rank()
    return tensor[min(rank * rows, shape[0]) : (rank + 1) * rows]


def _distributed(local: Tensor, mesh: DeviceMesh, whole: Tensor) -> Tensor:
    placements = [Shard(0) if _is_split(whole.shape) else Replicate()]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _replace(
    optimizers: Sequence[torch.optim.Optimizer],
    others: Mapping[int, nn.Parameter],
    changed: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """Give optimizers other parameters, by the ids of those that they have, and the state of each, changed."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [others.get(id(each), each) for each in group["params"]]
        states = [(others.get(id(each), each), each, state) for each, state in optimizer.state.items()]
        optimizer.state.clear()
        for now, before, state in states:
            optimizer.state[now] = {
                key: changed(now, before, value) if isinstance(value, Tensor) else value for key, value in state.items()
            }


def _whole_like(parameter: Tensor, _: Tensor, value: Tensor) -> Tensor:
    is_split: Any = isinstance(value, DTensor) and not isinstance(parameter, DTensor)
    return value.full_tensor() if is_split else value  # type: ignore[attr-defined]


def _split_like(parameter: Tensor, before: Tensor, value: Tensor) -> Tensor:
    if isinstance(value, DTensor) or value.shape != before.shape or not isinstance(parameter, DTensor):
        return value
    if not value.dim() and not value.is_floating_point():
        return value
    mesh = parameter.device_mesh
    return _distributed(_own_rows(value, value.shape, mesh).clone(), mesh, value)
