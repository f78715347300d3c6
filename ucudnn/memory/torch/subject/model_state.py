"""ModelState: the parameters and buffers of a model that code was made for, checked before the code runs again."""

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn

from ucudnn.errors import InvalidValueError


@final
class ModelState:
    """Knows whether a model is still the one that was traced.

    Args:
        model: the model.
        tensors: its parameters and buffers, and perhaps other tensors that nothing can replace.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._modules = [(name, module, module.training) for name, module in model.named_modules()]
        self._places: list[tuple[dict[str, Any], str, int, str]] = []
        for name, module, _ in self._modules:
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        label = f"{name}.{key}" if name else key
                        self._places.append((table, key, numbers[id(tensor)], label))
        self._signatures = [_signature(tensor) for tensor in tensors]
        self._types = [(tensor.requires_grad, tensor.dtype) for tensor in tensors]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors; those that were replaced by others of the same kind are the new ones.

        Raises:
            InvalidValueError: if a tensor or the mode of a module is another one than before; the message names it.
        """
        for name, module, training in self._modules:
            if module.training is not training:
                mode = "training" if training else "evaluation"
                raise InvalidValueError(f"module {name!r} was in {mode} mode when the step was fitted: fit it again")
        if any(table.get(key) is not self._tensors[number] for table, key, number, _ in self._places):
            self._replace()
        for tensor, expected in zip(self._tensors, self._types, strict=True):
            if (tensor.requires_grad, tensor.dtype) != expected:
                raise self._changed(tensor, expected)
        return self._tensors

    def _replace(self) -> None:
        found = [*self._tensors]
        for table, key, number, label in self._places:
            tensor = table.get(key)
            if tensor is None or _signature(tensor) != self._signatures[number]:
                raise InvalidValueError(f"{label} is another tensor than when the step was fitted: fit it again")
            found[number] = tensor
        if any(table[key] is not found[number] for table, key, number, _ in self._places):
            raise InvalidValueError("parameters that were one when the step was fitted are two now: fit it again")
        self._tensors = tuple(found)

    def _changed(self, tensor: Tensor, expected: tuple[bool, Any]) -> InvalidValueError:
        label = next((label for table, key, _, label in self._places if table.get(key) is tensor), "a constant")
        needed, dtype = expected
        if tensor.dtype != dtype:
            change = f"is {tensor.dtype} now, and was {dtype}"
        else:
            change = "needs no gradient now, and did" if needed else "needs a gradient now, and did not"
        return InvalidValueError(f"{label} {change} when the step was fitted: fit it again")


def _signature(tensor: Tensor) -> Any:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        isinstance(tensor, nn.Parameter),
    )
