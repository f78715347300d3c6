"""What a trace holds: tensors, storages and operator calls, without memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, TypeVar, final

import torch

from ucudnn.memory.step.graph import Phase

Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, bool, bool]
"""Shape, strides, offset and type of a tensor, and whether it is the conjugate or the negative of what is stored."""

_Kind = TypeVar("_Kind")
_RESIZING = ("resize", "_resize", "set_.default", "set_.source_Storage")


@final
@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor as an operator saw it: a storage and how it lies there.

    Attributes:
        conjugated: whether its elements are the conjugates of those in the storage (`torch.Tensor.is_conj`).
        negated: whether they are the negatives of those in the storage (`torch.Tensor.is_neg`).
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugated: bool = False
    negated: bool = False

    @property
    def geometry(self) -> Geometry:
        """How it lies in its storage."""
        return self.shape, self.stride, self.offset, self.dtype, self.conjugated, self.negated

    @property
    def is_plain(self) -> bool:
        """Whether its elements are those in the storage."""
        return not (self.conjugated or self.negated)

    @property
    def bytes_touched(self) -> int:
        """Bytes of its elements; an expanded dimension counts once."""
        elements = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            elements *= size if stride or not size else 1
        return elements * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether its elements fill the bytes between its first and its last one, and none of them lies there twice."""
        return _without_holes(sorted(zip(self.stride, self.shape, strict=True)))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other in the order of its dimensions."""
        return _without_holes(zip(reversed(self.stride), reversed(self.shape), strict=True))

    @property
    def extent(self) -> int:
        """Elements from its first to its last one in the storage."""
        return (
            0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        )

    def empty(self, device: torch.device | str = "meta") -> torch.Tensor:
        """Return a tensor of these strides on a device, whose values are not set; on 'meta' it has no memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def within(self, storage: torch.Tensor) -> torch.Tensor:
        """Return the tensor as it lies in the storage of another one."""
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        view = view.set_(storage.untyped_storage(), self.offset, self.shape, self.stride)
        view = torch._conj(view) if self.conjugated else view
        return torch._neg_view(view) if self.negated else view


def _without_holes(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether each stride is the number of elements of the dimensions before; strides and sizes are given."""
    expected = 1
    for stride, size in dimensions:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@final
@dataclass(slots=True)
class TracedStorage:
    """The bytes behind tensors of a trace.

    Attributes:
        born: index of the call that made it; -1 if it was there before.
        died: number of calls that had ended when PyTorch freed it; None while it lives.
    """

    size: int
    device: str
    born: int
    died: int | None = None


@final
@dataclass(frozen=True, slots=True)
class TracedCall:
    """One operator call.

    Attributes:
        args: its arguments, with a `TracedTensor` for each tensor.
        module: the module that called it; for backward the one that called its forward operation.
        node: number of the autograd node that backward evaluates; None in forward and in the optimizer.
        flops: floating-point operations of matrix products, convolutions and attention; 0 for other operators.
        index: its position among all calls that were traced.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any
    phase: Phase
    module: str
    source: str
    node: int | None
    flops: int
    index: int

    def argument(self, name: str) -> Any:
        """Return an argument by its name in the operator's schema, or its default; None where the schema has none."""
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                given = self.args[position] if position < len(self.args) else self.kwargs.get(name)
                return argument.default_value if given is None else given
        return None

    def with_storages(self, numbers: Mapping[int, int]) -> "TracedCall":
        """Return the same call with other indices of storages; those that are not in the table stay."""
        if not any(each.storage in numbers for each in (*self.inputs, *self.outputs)):
            return self

        def numbered(tensor: TracedTensor) -> TracedTensor:
            return replace(tensor, storage=numbers.get(tensor.storage, tensor.storage))

        return self.with_tensors(numbered)

    def with_tensors(self, change: Callable[[TracedTensor], TracedTensor]) -> "TracedCall":
        """Return the same call with other tensors in the place of its own."""
        parts = self.args, dict(self.kwargs), self.results
        args, kwargs, results = (mapped(each, TracedTensor, change) for each in parts)
        return replace(self, args=args, kwargs=kwargs, results=results)

    @property
    def computed(self) -> Any:
        """What it computes, to be compared with calls of another trace."""
        kwargs = {
            key: generator_id(each) if isinstance(each, torch.Generator) else each for key, each in self.kwargs.items()
        }
        return self.func, self.args, kwargs, self.results

    @property
    def turns(self) -> bool:
        """Whether it changes how its argument lies in memory, as `transpose_` does, but no bytes: it makes a view.

        `set_` makes one of another tensor.
        """
        _, _, name = str(self.func).partition(".")
        return torch.Tag.inplace_view in self.func.tags and not name.startswith(_RESIZING)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers; attention does so only where it drops some."""
        return torch.Tag.nondeterministic_seeded in self.func.tags and self.argument("dropout_p") != 0

    @property
    def inputs(self) -> list[TracedTensor]:
        """The tensors among its arguments, in order."""
        return [*tensors_in(self.args), *tensors_in(self.kwargs)]

    @property
    def outputs(self) -> list[TracedTensor]:
        """The tensors that it returned, in order."""
        return [*tensors_in(self.results)]


@final
@dataclass(slots=True)
class Trace:
    """What a tracer wrote down.

    Attributes:
        storages: what they touch, by index.
        turned: calls that turn a tensor that needs a gradient and is no view of another one (`TracedCall.turns`).
    """

    calls: list[TracedCall] = field(default_factory=list)
    storages: list[TracedStorage] = field(default_factory=list)
    turned: list[TracedCall] = field(default_factory=list)


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return what an operator is given or returns with other tensors, which are of some type; lists may hold them.

    PyTorch's own trees take ten times as long.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        made = [mapped(each, kind, change) for each in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: mapped(each, kind, change) for key, each in value.items()}
    return value


def listed(result: Any) -> list[Any]:
    """Return what an operator returns as a list."""
    return [*result] if isinstance(result, (tuple, list)) else [result]


def tensors_in(value: Any) -> Iterator[TracedTensor]:
    """Yield the tensors of a trace that an operator is given or returns."""
    return each_in(value, TracedTensor)


def each_in(value: Any, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yield what is of a type in what an operator is given or returns, as `mapped` finds it."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from each_in(each, kind)


def is_written(argument: Any) -> bool:
    """Whether an operator's schema says that it writes to an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def unused_name(name: str, used: set[str]) -> str:
    """Return a name that is not used yet, with a number behind it if need be, and note it as used."""
    names = chain([name], (f"{name}.{number}" for number in count(1)))
    found = next(each for each in names if each not in used)
    used.add(found)
    return found


def generator_id(generator: Any) -> int:
    """Return what all Python objects of one generator have in common: operators are given another one in each call."""
    return int(generator._cdata)
