"""ArgumentForm: the arguments that a step was fitted to, and how others differ from them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.subject.model_checks import is_numpy_array

if TYPE_CHECKING:
    from ucudnn.memory.torch.subject.step_program import StepSubject


class _Signature(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "a scalar"
        needs = ", with a gradient" if self.requires_grad else ""
        begin = f", from element {self.offset} of its storage on" if self.offset else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{size} of {dtype} on {self.device}, strides {tuple(self.stride)}{begin}{needs}"


class _Value(NamedTuple):
    """What a plan depends on in any other argument. NaN is equal to itself here, and -0.0 is not equal to 0.0."""

    kind: type
    value: Any

    def __str__(self) -> str:
        return f"the value {float.fromhex(self.value) if issubclass(self.kind, float) else self.value!r}"


@final
class ArgumentForm:
    """The form of a sample's arguments; it holds none of their tensors."""

    def __init__(self, subject: "StepSubject") -> None:
        leaves, self._structure = subject.leaves()
        self._signature = [signature(leaf) for leaf in leaves]
        self._sharing = _sharing(leaves)
        self._positional, self._names = len(subject.args), [*subject.kwargs]
        self._targets = subject.targets
        self._forward = None if subject.loss else inspect.signature(subject.model.forward)

    def match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the arguments as a flat list, or None if they differ from the sample."""
        leaves, structure = tree_flatten((args, kwargs))
        if structure != self._structure or [signature(leaf) for leaf in leaves] != self._signature:
            return None
        return leaves if _sharing(leaves) == self._sharing else None

    def lack_targets(self, args: tuple[Any, ...]) -> bool:
        """Whether arguments are those of the model alone, without the loss's."""
        return bool(self._targets) and len(args) == self._positional - self._targets

    def arranged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return arguments by position or by name, and names in the order, as the sample has them."""
        if self._forward is None:
            return args, kwargs
        try:
            bound = self._forward.bind(*args, **kwargs)
        except TypeError:
            return args, kwargs  # the difference is told
        if self._positional:
            return bound.args, bound.kwargs
        named = dict(kwargs)
        kinds = self._forward.parameters
        if any(kinds[name].kind is inspect.Parameter.VAR_POSITIONAL for name in bound.arguments):
            return args, kwargs
        named |= {name: bound.arguments[name] for name in [*bound.arguments][: len(args)]}
        if named.keys() != {*self._names}:
            return args, kwargs
        return (), {name: named[name] for name in self._names}

    def check_smaller(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check that arguments differ from the sample only in sizes, which are smaller, strides and needed gradients.

        Raises:
            InvalidValueError: if they differ in more.
        """
        leaves, structure = tree_flatten((args, kwargs))
        found = [signature(leaf) for leaf in leaves]
        if structure != self._structure or not all(map(_smaller, found, self._signature)):
            raise InvalidValueError(self.difference(args, kwargs))

    def difference(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return how arguments differ from the sample."""
        if len(args) != self._positional or [*kwargs] != self._names:
            return (
                f"the step was fitted to {_listed(self._positional, self._names)}, and is called with"
                f" {_listed(len(args), [*kwargs])}: fit it again with a sample like this"
            )
        leaves, structure = tree_flatten((args, kwargs))
        if structure != self._structure:
            return f"the step was fitted to arguments of the structure {self._structure}, not {structure}: fit it again"
        differing = [
            f"argument {number} is {found}, and the step was fitted to {expected}"
            for number, (found, expected) in enumerate(zip(map(signature, leaves), self._signature, strict=True))
            if found != expected
        ]
        if not differing:
            return (
                f"{_shared(_sharing(leaves))}, and when the step was fitted {_shared(self._sharing)}: fit it again for"
                " other arguments"
            )
        return f"{differing[0]}: fit it again for other arguments"


def _listed(count: int, names: Sequence[str]) -> str:
    positional = f"{count} arguments" if count != 1 else "1 argument"
    return f"{positional} and {', '.join(names)} by name" if names else positional


def signature(leaf: Any) -> Any:
    """Return what a plan depends on in an argument or a tensor of the model."""
    if isinstance(leaf, Tensor):
        return _Signature(
            leaf.shape, leaf.stride(), int(leaf.storage_offset()), leaf.dtype, leaf.device, leaf.requires_grad
        )
    if is_numpy_array(leaf):
        raise InvalidValueError("an argument of the step is a NumPy array: give torch.from_numpy of it")
    # 1, 1.0 and True are equal, and so are zeros of both signs, but a model may compute other numbers with each.
    return _Value(type(leaf), leaf.hex() if isinstance(leaf, float) else leaf)


def _sharing(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for each argument the first one that lies in the same storage: a plan takes these for one storage."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(leaf.untyped_storage()._cdata, number) if isinstance(leaf, Tensor) else number
        for number, leaf in enumerate(leaves)
    )


def _shared(sharing: Sequence[int]) -> str:
    pairs = [f"{first} and {number}" for number, first in enumerate(sharing) if first != number]
    return f"arguments {', '.join(pairs)} lie in one storage" if pairs else "all arguments lie in storages of their own"


def _smaller(found: Any, expected: Any) -> bool:
    """Whether a tensor is at most as large as the sample's and of its kind; other values must be equal."""
    if not isinstance(found, _Signature) or not isinstance(expected, _Signature):
        return bool(found == expected)
    kind = (found.dtype, found.device, len(found.shape)) == (expected.dtype, expected.device, len(expected.shape))
    return kind and found.shape.numel() <= expected.shape.numel()
