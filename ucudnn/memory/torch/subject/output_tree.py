"""OutputTree: what a step returns, taken apart into tensors and put together again from others."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ucudnn.errors import StepGraphError


@final
@dataclass(frozen=True, slots=True)
class _Holder:
    """A dataclass or a mapping of a kind of its own that holds tensors.

    Attributes:
        empty: the object with None in the place of all values.
        keys: the names of its values.
    """

    empty: Any
    keys: tuple[Any, ...]
    values: "OutputTree"

    def build(self, outputs: Sequence[Any]) -> Any:
        made = copy.copy(self.empty)
        for key, value in zip(self.keys, self.values.build(outputs), strict=True):
            _set(made, key, value)
        return made


@final
@dataclass(frozen=True, slots=True)
class OutputTree:
    """The structure of what a step returns: PyTorch's trees, dataclasses and mappings.

    Attributes:
        leaves: for each leaf (True, index of a tensor) or (False, a value).
    """

    structure: TreeSpec
    leaves: tuple[tuple[bool, Any], ...]

    @classmethod
    def of(cls, result: Any) -> "tuple[OutputTree, list[Tensor]]":
        """Return the structure of a result, and its different tensors.

        Raises:
            StepGraphError: if the result has an object that holds tensors in a way that is not known.
        """
        tensors: list[Tensor] = []
        return cls._of(result, tensors), tensors

    @classmethod
    def _of(cls, result: Any, tensors: list[Tensor]) -> "OutputTree":
        leaves, structure = tree_flatten(result)
        return cls(structure, tuple(cls._leaf(leaf, tensors) for leaf in leaves))

    @classmethod
    def _leaf(cls, leaf: Any, tensors: list[Tensor]) -> tuple[bool, Any]:
        if isinstance(leaf, Tensor):
            index = next((index for index, each in enumerate(tensors) if each is leaf), len(tensors))
            tensors += [leaf] if index == len(tensors) else []
            return True, index
        values = _values(leaf)
        if not any(isinstance(each, Tensor) for each in tree_flatten([*values.values()])[0]):
            return False, leaf
        if not (is_dataclass(leaf) or isinstance(leaf, Mapping)):
            raise StepGraphError(
                f"the step returns a {type(leaf).__name__}, which holds tensors in a way that a plan does not know:"
                " return tuples, lists, dictionaries or dataclasses"
            )
        empty = copy.copy(leaf)
        for key in values:
            _set(empty, key, None)
        return False, _Holder(empty, tuple(values), cls._of([*values.values()], tensors))

    def build(self, outputs: Sequence[Any]) -> Any:
        """Return the result with other tensors in the place of its different ones."""
        found = [
            outputs[value] if is_tensor else value.build(outputs) if isinstance(value, _Holder) else value
            for is_tensor, value in self.leaves
        ]
        return tree_unflatten(found, self.structure)


def _values(leaf: Any) -> Mapping[Any, Any]:
    if isinstance(leaf, Mapping):
        return {**leaf}
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    return {} if isinstance(leaf, type) else getattr(leaf, "__dict__", {})


def _set(target: Any, key: Any, value: Any) -> None:
    if isinstance(target, Mapping):
        target[key] = value  # type: ignore[index]
    else:
        object.__setattr__(target, key, value)  # a frozen dataclass, too
