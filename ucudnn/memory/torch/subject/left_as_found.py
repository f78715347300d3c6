"""Snapshot: what a fit may touch as it was before, and how it is put back whatever happens meanwhile."""

import gc
import logging
import pickle
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device, _python_dispatch

from ucudnn.memory.torch.subject.attribute_content import ABSENT, AttributeContent, entries_of, is_plain
from ucudnn.memory.torch.subject.call_modes import autocast_depth
from ucudnn.memory.torch.subject.model_state import hooks_of_all
from ucudnn.memory.torch.subject.module_attributes import read_now

_MOST_ENTRIES = 100_000  # of what hangs on a model besides its modules; each takes about a microsecond
_SWITCHES = ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled", "nnpack_enabled")
_Result = TypeVar("_Result")
_Undo = Callable[[], object]


def left_as_found(work: "Callable[[Snapshot], _Result]", *roots: Any) -> _Result:
    """Return what a function returns, and leave everything as it was if an error ends it, Ctrl-C included.

    No context manager does this: Ctrl-C at the begin of its `__exit__` would leave things as they are. A second Ctrl-C
    while things are put back can still do so. The function is called with the snapshot of the roots, which it restores
    itself where it ends well.
    """
    snapshot = Snapshot(*roots)
    try:
        return work(snapshot)
    except BaseException:
        try:
            snapshot.restore_all()
        except BaseException:
            snapshot.restore_all()
            raise
        raise


@contextmanager
def only_new_collected(snapshot: "Snapshot") -> Iterator[None]:
    """Let collections look only at objects that are made inside the block; the snapshot releases the others on Ctrl-C.

    A process with PyTorch has some hundred thousand objects that stay. Tracing and planning make so many new ones that
    collections walk through all of them again and again, which took a quarter of the time. What is garbage before is
    collected first, because it may hold memory of a device. Nothing happens where a program has frozen objects itself,
    because only all of them together can be released.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    snapshot.undo_after_errors(gc.unfreeze)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@final
class Snapshot:
    """A training setup, random number generators and modes of this thread and of PyTorch, as they are now.

    Entries of modules, optimizers, containers and plain objects are noted, and the gradients, the hooks and the memory
    of tensors. Elements of tensors are not copied: nothing that a trace runs can write them. What nobody has changed is
    not written when things are put back. Roots are modules, optimizers, functions, tensors, and containers of them.
    """

    def __init__(self, *roots: Any) -> None:
        self._seen: dict[int, Any] = {}
        self._after_errors: list[_Undo] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._tables: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = []
        self._places: list[tuple[Any, str, Any]] = []
        generators = [torch.default_generator, *torch.cuda.default_generators, random._inst]
        generators += [] if _numpy_random() is None else [_numpy_random().mtrand._rand]
        self._undos: list[_Undo] = [*_of_this_thread(), *_of_process(), *filter(None, map(_of_generator, generators))]
        self._contents: list[_Undo] = []
        left = [*roots, hooks_of_all()]
        while left:
            value = left.pop()
            if id(value) in self._seen or isinstance(value, (str, bytes, int, float, type(None), type)):
                continue
            self._seen[id(value)] = value  # so that its number stays its own
            left += self._noted(value)

    def note(self, owner: Any, key: str, value: Any, generators: Iterable[Any]) -> None:
        """Note a value that hangs on no root, as `read_now` finds it, while a trace runs: no tensor is looked at."""
        self._places.append((owner, key, value))
        for each in generators:
            if not isinstance(each, torch.Generator):  # on tensors without memory nothing draws from these
                self._undos.insert(0, _of_generator(each) or list)
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, dict):
                self._tables.append((value, [*value.items()]))
            elif isinstance(value, (list, set, deque)):
                self._lists.append((value, entries_of(value)))

    def undo(self, undo: _Undo) -> None:
        """Let a function be called, too, when things are put back: once or several times."""
        self._undos.insert(0, undo)

    def undo_after_errors(self, undo: _Undo) -> None:
        """Let a function be called when an error ends the work."""
        self._after_errors.insert(0, undo)

    def restore_modes(self) -> None:
        """Put modes and random number generators back; what forward writes beside tensors stays, as in the loop."""
        for undo in self._undos:
            undo()

    def restore(self) -> None:
        """Put everything back."""
        self.restore_modes()
        self.restore_tensors()
        for undo in self._contents:
            undo()

    def restore_tensors(self) -> None:
        """Put back what holds tensors of a trace now, so that the step can be traced once more on what it has left."""
        for table, entries in self._tables:
            before = dict(entries)
            for key, value in [*table.items()]:
                if value is not before.get(key, table) and AttributeContent(value).is_fake:
                    if key in before:
                        table[key] = before[key]
                    else:
                        del table[key]
        for value, entries in self._lists:
            if AttributeContent(value).is_fake:
                _put_back_entries(value, entries)
        for owner, key, value in self._places:
            now = read_now(owner, key)
            if now is not value and AttributeContent(now).is_fake and not AttributeContent(value).is_fake:
                if value is ABSENT:
                    del owner[key]
                else:
                    owner.__setitem__(key, value) if type(owner) is dict else setattr(owner, key, value)

    def restore_all(self) -> None:
        """Put things back after an error, those included that otherwise stay."""
        self.restore()
        for undo in self._after_errors:
            undo()

    def _noted(self, value: Any) -> Sequence[Any]:
        if isinstance(value, Tensor):
            return self._noted_tensor(value)
        if (generator := _of_generator(value)) is not None:
            self._undos.append(generator)
            return ()
        if isinstance(value, nn.Module):
            self._contents.append(partial(object.__setattr__, value, "__class__", type(value)))
            return self._noted_table(vars(value))
        if isinstance(value, MethodType):
            return (value.__self__,)
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        if isinstance(value, dict):
            return self._noted_table(value)
        if isinstance(value, (list, set, deque, tuple, frozenset)):
            entries = entries_of(value)
            if not isinstance(value, (tuple, frozenset)):
                self._lists.append((value, entries))
                self._contents.append(partial(_put_back_entries, value, entries))
            return self._bounded(entries)
        if isinstance(value, torch.optim.Optimizer) or (hasattr(value, "__dict__") and is_plain(value, _HELD)):
            return self._noted_table(vars(value))
        return ()

    def _noted_table(self, table: dict[Any, Any]) -> Sequence[Any]:
        entries = [*table.items()]
        self._tables.append((table, entries))
        self._contents.append(partial(_put_back_table, table, entries))
        return self._bounded([value for _, value in entries])

    def _noted_tensor(self, tensor: Tensor) -> Sequence[Any]:
        if isinstance(tensor, fake_tensor.FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return ()
        gradient = tensor.grad if tensor.is_leaf else None
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        self._contents.append(partial(_put_back_tensor, tensor, tensor.detach(), tensor.requires_grad, gradient, hooks))
        return [vars(tensor), gradient, *hooks]

    def _bounded(self, entries: list[Any]) -> list[Any]:
        return entries if len(self._seen) + len(entries) < _MOST_ENTRIES else []


_HELD = (Tensor, nn.Module, torch.Generator, random.Random)


def _put_back_table(table: dict[Any, Any], entries: list[tuple[Any, Any]]) -> None:
    now = [*table.items()]
    if len(now) == len(entries) and all(a is c and b is d for (a, b), (c, d) in zip(now, entries, strict=True)):
        return
    table.clear()
    table.update(entries)


def _put_back_entries(value: Any, entries: list[Any]) -> None:
    if len(value) == len(entries) and all(now is before for now, before in zip(value, entries, strict=True)):
        return
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(entries)


def _put_back_tensor(tensor: Tensor, was: Tensor, needed: bool, gradient: Tensor | None, hooks: Any) -> None:
    """Give a tensor its memory, its gradient, its hooks and whether it needs one; `was` lies in its memory."""
    if _form(tensor) != _form(was):
        tensor.data = was
    if tensor.is_leaf:
        if tensor.requires_grad is not needed:
            tensor.requires_grad_(needed)
        if tensor.grad is not gradient:
            tensor.grad = gradient
    for name, before in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks, strict=True):
        if before is None and getattr(tensor, name):
            getattr(tensor, name).clear()


def _form(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return None
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _of_generator(value: Any) -> _Undo | None:
    """Return what gives a random number generator its state; None for what is none."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if (numbers := _numpy_random()) is not None and isinstance(value, numbers.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if numbers is not None and isinstance(value, numbers.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def drawn_state() -> tuple[Any, bytes]:
    """Return the state of Python's and of NumPy's global generator; no profile sees functions of the latter."""
    numpy = _numpy_random()
    return random.getstate(), b"" if numpy is None else pickle.dumps(numpy.get_state())


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _of_process() -> Iterator[_Undo]:
    """Yield what puts back filters of warnings, the logger of fake tensors, the garbage collector and switches."""
    filters: Any = warnings.filters
    yield partial(_put_back_warnings, filters, [*filters], warnings.showwarning)
    logger = logging.getLogger(fake_tensor.__name__)
    yield partial(_put_back_entries, logger.filters, [*logger.filters])
    yield partial(setattr, logger, "disabled", logger.disabled)
    yield gc.enable if gc.isenabled() else gc.disable
    yield partial(gc.set_threshold, *gc.get_threshold())
    yield partial(torch.set_default_dtype, torch.get_default_dtype())
    yield partial(_put_back_threads, torch.get_num_threads())
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    enabled = torch.are_deterministic_algorithms_enabled()
    yield partial(torch._C._set_deterministic_algorithms, enabled, warn_only=warn_only)
    for name in (*_SWITCHES, "deterministic_fill_uninitialized_memory"):
        get, put = (getattr(torch._C, f"_{each}_{name}", None) for each in ("get", "set"))
        if get is not None and put is not None:
            yield partial(put, get())


def _put_back_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _put_back_warnings(filters: list[Any], entries: list[Any], show: Any) -> None:
    warnings.filters, warnings.showwarning = filters, show
    if filters != entries:
        filters[:] = entries
        getattr(warnings, "_filters_mutated", list)()  # Python 3.14 has none


def _of_this_thread() -> Iterator[_Undo]:
    stacks = _python_dispatch._get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    yield partial(_put_back_modes, *stacks)
    flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    yield partial(vars(_python_dispatch).update, flags)
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    yield partial(setattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", device)
    yield partial(setattr, _device, "CURRENT_DEVICE", _device.CURRENT_DEVICE)
    yield partial(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
    yield partial(setattr, forward_ad, "_current_level", forward_ad._current_level)
    yield partial(torch._C._set_grad_enabled, torch.is_grad_enabled())
    yield partial(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    for kind in ("cpu", "cuda"):
        yield partial(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
        yield partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
    yield partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    yield partial(_put_back_nesting, autocast_depth())
    yield partial(_put_back_saving_hooks, torch._C._autograd._top_saved_tensors_default_hooks(True))
    if torch.cuda.is_initialized():
        yield partial(torch.cuda.set_stream, torch.cuda.current_stream())
        yield partial(torch.cuda.set_device, torch.cuda.current_device())


def _put_back_modes(dispatch: list[Any], function: list[Any]) -> None:
    now = _python_dispatch._get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    pops: tuple[_Undo, _Undo] = partial(torch._C._pop_torch_dispatch_stack, None), torch._C._pop_torch_function_stack
    pushes = torch._C._push_on_torch_dispatch_stack, torch._C._push_on_torch_function_stack
    for present, modes, pop, push in zip(now, (dispatch, function), pops, pushes, strict=True):
        if present != modes:
            for _ in present:
                pop()
            for mode in modes:
                push(mode)


def _put_back_nesting(depth: int) -> None:
    for _ in range(autocast_depth(), depth):
        torch.autocast_increment_nesting()
    while autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    if not depth:
        torch.clear_autocast_cache()  # weights without memory, cast


def _put_back_saving_hooks(top: Any) -> None:
    while (now := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None and now != top:
        torch._C._autograd._pop_saved_tensors_default_hooks()
