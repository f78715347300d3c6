"""ModelState: the parameters and buffers of a model that code was made for, checked before the code runs again."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.subject.argument_form import signature
from ucudnn.memory.torch.subject.module_attributes import ModuleAttributes


@final
class ModelState:
    """Knows whether a model is still the one that was traced.

    Behind its parameters and buffers there may be other tensors that nothing can replace. `values` are indices of
    tensors whose values the code depends on, each with a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[Tensor],
        attributes: ModuleAttributes,
        values: Sequence[tuple[int, Tensor]] = (),
    ) -> None:
        self._values = values
        self._tensors = tuple(tensors)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._modules = [(name, module, module.training) for name, module in model.named_modules()]
        self._children = [module._modules for _, module, _ in self._modules if module._modules]
        self._hooks = [hooks for _, module, _ in self._modules for hooks in hooks_of(module)] + hooks_of_all()
        self._inside = _values(self._children), _values(self._hooks)
        self._hook_counts = [*map(len, self._hooks)]
        self._attributes = attributes
        self._places: list[tuple[dict[str, Any], str, int, str]] = []
        for name, module, _ in self._modules:
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        label = f"{name}.{key}" if name else key
                        self._places.append((table, key, numbers[id(tensor)], label))
        self._signatures = [_signature(tensor) for tensor in tensors]
        self._types = [(tensor.requires_grad, tensor.dtype) for tensor in tensors]
        self._forms = _forms_of(tensors)
        self._sharing = [each for each in _by_memory(self._tensors) if len(each) > 1]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors; those that were replaced by others of the same kind are the new ones.

        Raises:
            InvalidValueError: if a tensor, or the mode, the hooks, the modules or an attribute of a module are others
                than before; the message names it.
        """
        for name, module, training in self._modules:
            if module.training is not training:
                mode = "training" if training else "evaluation"
                raise InvalidValueError(f"module {name!r} was in {mode} mode when the step was fitted: fit it again")
        children, hooks = self._inside
        if _values(self._children) != children:
            raise InvalidValueError("the model has other modules than when the step was fitted: fit it again")
        if [*map(len, self._hooks)] != self._hook_counts or (hooks and _values(self._hooks) != hooks):
            raise InvalidValueError("the model has other hooks than when the step was fitted: fit it again")
        self._attributes.check()
        if any(table.get(key) is not self._tensors[number] for table, key, number, _ in self._places):
            self._replace()
        for tensor, expected in zip(self._tensors, self._types, strict=True):
            if (tensor.requires_grad, tensor.dtype) != expected:
                raise self._changed(tensor, expected)
        if _forms_of(self._tensors) != self._forms:
            raise self._reformed()
        self._check_sharing()
        self._check_values()
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
        label = self._label(tensor)
        needed, dtype = expected
        if tensor.dtype != dtype:
            change = f"is {tensor.dtype} now, and was {dtype}"
        else:
            change = "needs no gradient now, and did" if needed else "needs a gradient now, and did not"
        return InvalidValueError(f"{label} {change} when the step was fitted: fit it again")

    def _label(self, tensor: Tensor) -> str:
        return next((label for table, key, _, label in self._places if table.get(key) is tensor), "a constant")

    def _check_values(self) -> None:
        for number, value in self._values:
            if not torch.equal(self._tensors[number], value):
                raise InvalidValueError(
                    f"{self._label(self._tensors[number])} has another value than when the step was fitted, and the"
                    " step's operations depend on it: fit it again"
                )

    def _check_sharing(self) -> None:
        for numbers in self._sharing:
            if len(_by_memory([self._tensors[number] for number in numbers])) > 1:
                labels = dict.fromkeys(label for _, _, number, label in self._places if number in numbers)
                raise InvalidValueError(
                    f"{' and '.join(labels) or 'constants'} shared memory when the step was fitted, and do not any"
                    " more: fit it again"
                )

    def _reformed(self) -> InvalidValueError:
        at = next(
            at
            for at, forms in enumerate(zip(*map(zip, self._forms, _forms_of(self._tensors)), strict=True))
            if any(before != now for before, now in forms)
        )
        tensor = self._tensors[at]
        label = self._label(tensor)
        now = f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        strides, _, _, offset = (form[at] for form in self._forms)
        return InvalidValueError(
            f"{label} is {now}, from element {tensor.storage_offset()} of its storage on, and had strides {strides}"
            f" from element {offset} on, or another size or device, when the step was fitted: fit it again"
        )


def modules_of(model: nn.Module, loss: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, and of a loss that is one, by name."""
    yield from model.named_modules()
    if isinstance(loss, nn.Module):
        yield from loss.named_modules(prefix="loss")


def hooks_of(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """Yield the tables of hooks of a module."""
    yield from (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)


def hooks_of_all() -> list[dict[Any, Any]]:
    """Return the tables of hooks that PyTorch calls for all modules."""
    return [each for name, each in vars(torch_module).items() if name.startswith("_global_") and isinstance(each, dict)]


def _values(dictionaries: Sequence[dict[Any, Any]]) -> list[Any]:
    """Return all values of dictionaries: modules or hooks, which a step does not call, but was traced with.

    Like `_forms_of`, this runs before every step, so that no line of Python runs for each of them.
    """
    return [*chain.from_iterable(map(dict.values, dictionaries))]


def _forms_of(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return what else may change in tensors that stay the same objects, as by `Module.to`, and code is made for."""
    asked = Tensor.stride, Tensor.numel, Tensor.get_device, Tensor.storage_offset
    return tuple([*map(each, tensors)] for each in asked)


def _by_memory(tensors: Sequence[Tensor]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault(tensor.untyped_storage()._cdata, []).append(number)
    return [*found.values()]


def _signature(tensor: Tensor) -> Any:
    return signature(tensor), isinstance(tensor, nn.Parameter)
