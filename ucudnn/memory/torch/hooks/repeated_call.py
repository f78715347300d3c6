"""RepeatedCall: drops what a call of a module saves for backward, and makes it again by calling the module again.

The call is repeated as it was: with the same arguments, attributes, states of generators, autocast and gradient mode.
What the module writes meanwhile, its buffers and attributes, is put back. Whether that gives the same bits is tried
first: what the call saved is kept once, and compared with what it saves again. A call that leaves other traces is never
repeated (`CallEffects`).
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from ucudnn.errors import FittedStepError
from ucudnn.memory.torch.device.storages import is_plain
from ucudnn.memory.torch.hooks.call_effects import MOST_CLONED, CallEffects
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory
from ucudnn.memory.torch.hooks.saved_tensors import KeptTensor, Packed, VersionCheck, storage_key
from ucudnn.torch.device.compilation import never_compiled

_STAYING_PART = 8  # of the limit, which stays of what a call saves again, because backward reads it next
_MOST_ENTRIES = 64  # of a container, whose entries are to be those of the call
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_OF_ALL = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
_OTHERS = {"OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "SyncBatchNorm", "ScriptModule"}
_NOT_REPEATED = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "_compiled_call_impl",
)


def may_be_repeated(module: nn.Module) -> bool:
    """Return whether nothing that is known of a module and those in it forbids to call it twice."""
    return not any(
        any(getattr(each, name, None) for name in _NOT_REPEATED)
        or _OTHERS & {base.__name__ for base in type(each).__mro__}
        or any(vars(base).get("__slots__") for base in type(each).__mro__)  # attributes that nothing puts back
        for each in module.modules()
    )


@final
class _Complete(Exception):  # noqa: N818  # it is no error: all that was wanted has been saved again
    pass


@final
class DroppedTensor(VersionCheck):
    """Stands for a tensor that the call of a module saved. It lives as long as backward may ask for it.

    `packed` is the tensor as it was saved in a trial, or again.
    """

    __slots__ = ("__weakref__", "call", "packed")

    def __init__(self, call: "RepeatedCall", tensor: Tensor, packed: Packed | None) -> None:
        super().__init__(tensor)
        self.call, self.packed = call, packed


@final
class RepeatedCall:
    """A call of a module that can be repeated.

    Args:
        memory: where its arguments and what it saves again are.
        run: calls the module.
        module: the module.
        size: about how many bytes are dropped.
        tried: is told whether the call gave the same bits again, for which what it saves is kept and compared; None
            drops it.
    """

    def __init__(
        self,
        memory: SavedMemory,
        run: Callable[..., Any],
        module: nn.Module,
        size: int,
        tried: Callable[[nn.Module, bool], None] | None,
    ) -> None:
        self._memory, self._run, self._module = memory, run, module
        self._size, self._tried, self._ended = size, tried, False
        self._tensors: list[weakref.ref[DroppedTensor]] = []
        self._arguments, self._own = set[int | None](), set[int | None]()
        self._form: Any = None
        self._stayed = 0  # bytes of what was saved again so far that stays

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and drop what it saves."""
        module, memory = self._module, self._memory
        leaves: Sequence[Any] = args
        if kwargs or not _are_plain(args):
            leaves, self._form = tree_flatten((args, kwargs))
            if not _are_plain(leaves):
                self._end_trial(same=False)
                return self._run(module, *args, **kwargs)
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        self._arguments = {storage_key(each.data) for each in tensors}
        self._wanted = [each.requires_grad for each in tensors]
        self._leaves = [memory.pack(each.detach()) if isinstance(each, Tensor) else each for each in leaves]
        self._random, self._autocasts = random_state(memory.device), _autocasts(memory.device)
        modules = [*module.modules()]
        self._attributes = [(each, vars(each).copy(), each._buffers.copy()) for each in modules]
        own = [(name, each) for inside in modules for name, each in _tensors_of(inside)]
        self._own = {storage_key(each.data) for _, each in own}
        # Batch normalization counts in each call, and no result depends on that.
        self._versions = [
            (each, each._version, storage_key(each.data)) for name, each in own if name != "num_batches_tracked"
        ]
        given = [(each, each._version) for each in tensors]
        containers = _containers(modules)
        lengths = [(place, len(each)) for place, each in containers]
        self._held = [
            (each, _entries(each))
            for (_, name), each in containers
            if name != "_buffers" and len(each) <= _MOST_ENTRIES
        ]
        effects = None if self._tried is None else CallEffects(module, modules)
        del leaves, tensors
        with saved_tensors_hooks(self._pack, self._unpack), nullcontext() if effects is None else effects.watched():
            found = self._run(module, *args, **kwargs)
        written = any(each._version != version for each, version in given) or self._is_written()
        written = written or lengths != [(place, len(each)) for place, each in _containers(modules)]
        if written or self._holds_others() or (effects is not None and effects.found()):
            if self._tried is None:
                raise self._differs("changes arguments, parameters, buffers or lists")
            self._end_trial(same=False)
        return found

    @never_compiled
    def _pack(self, tensor: Tensor) -> Packed | DroppedTensor:
        key = storage_key(tensor)
        if key is not None and key in self._own:
            return KeptTensor(tensor)
        if key is not None and key in self._arguments:
            return self._memory.pack(tensor)
        dropped = DroppedTensor(self, tensor, None if self._tried is None else self._memory.pack(tensor))
        self._tensors.append(weakref.ref(dropped))
        return dropped

    @never_compiled
    def _unpack(self, packed: Packed | DroppedTensor) -> Tensor:
        """Return a tensor that was saved; all of the call are recomputed with the first one."""
        if not isinstance(packed, DroppedTensor):
            return self._memory.unpack(packed)
        packed.check()
        if self._tried is not None:
            if not self._ended:
                self._try()
            assert packed.packed is not None
            return self._memory.unpack(packed.packed)
        if packed.packed is None:
            self._stayed = 0
            self._repeat(self._save_again)
            self._memory.recomputed[self._module] += self._size
        found, packed.packed = packed.packed, None  # what is asked for again is recomputed
        if found is None:
            raise self._differs("saves fewer tensors")
        return self._memory.unpack(found)

    def _save_again(self, dropped: DroppedTensor, tensor: Tensor) -> None:
        if (tensor.dtype, tensor.shape) != dropped.form:
            raise self._differs(f"saves {tensor.dtype} {[*tensor.shape]} in the place of {dropped.form}")
        memory = self._memory
        size = tensor.untyped_storage().nbytes() if is_plain(tensor) else memory.pressure.limit
        if (self._stayed + size) * _STAYING_PART > memory.pressure.limit:
            dropped.packed = memory.pack(tensor)
            return
        dropped.packed = KeptTensor(tensor)
        self._stayed += size
        if memory.pressure.grew(size):
            memory.relieve()

    def _end_trial(self, *, same: bool) -> None:
        self._ended = True
        if self._tried is not None:
            self._tried(self._module, same)

    def _try(self) -> None:
        same: list[bool] = []

        def compare(dropped: DroppedTensor, tensor: Tensor) -> None:
            assert dropped.packed is not None
            same.append(_same_bits(tensor, self._memory.unpack(dropped.packed)))

        self._ended = True
        try:
            self._repeat(compare)
        except Exception:  # noqa: BLE001  # whatever the module raises, its own tensors are there
            same.append(False)
        # Forward ends early then, and may take entries away later.
        same.append(not self._holds_others())
        self._end_trial(same=all(same))

    def _repeat(self, save: Callable[[DroppedTensor, Tensor], None]) -> None:
        """Call the module again, and hand over each tensor that it saves with the one that it saved first."""
        memory, wanted, count = self._memory, iter(self._wanted), 0
        self._check()
        inputs = [
            memory.unpack(each).detach().requires_grad_(next(wanted)) if isinstance(each, Packed) else each
            for each in self._leaves
        ]
        own = self._own.union(storage_key(each) for each in inputs if isinstance(each, Tensor))

        @never_compiled
        def pack(tensor: Tensor) -> None:
            nonlocal count
            key = storage_key(tensor)
            if key is not None and key in own:
                return
            dropped = self._tensors[count]() if count < len(self._tensors) else None
            if dropped is not None:
                save(dropped, tensor)
            count += 1
            if count == len(self._tensors):
                raise _Complete

        args, kwargs = (inputs, {}) if self._form is None else tree_unflatten(inputs, self._form)
        with ExitStack() as stack:
            stack.enter_context(_as_before(self._attributes, own))
            stack.callback(set_random_state, memory.device, random_state(memory.device))
            set_random_state(memory.device, self._random)
            for autocast, now in zip(self._autocasts, _autocasts(memory.device), strict=True):
                if autocast != now:
                    stack.enter_context(torch.autocast(*autocast))
            stack.callback(_put_back_modes, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, _never))
            try:
                self._run(self._module, *args, **kwargs)
            except _Complete:
                return
        if count != len(self._tensors):
            raise self._differs(f"saves {count} tensors in the place of {len(self._tensors)}")

    def _check(self) -> None:
        """Raise an error if what forward depends on was changed by the program since."""
        if self._is_written():
            raise self._differs(
                "has a parameter or buffer that was modified by an inplace operation since forward, so it differs"
            )
        if self._holds_others():
            raise self._differs("has a list or dict that was changed since forward, so it differs")

    def _is_written(self) -> bool:
        """Return whether parameters or buffers have changed since forward began, or lie elsewhere."""
        return any(each._version != version or storage_key(each.data) != key for each, version, key in self._versions)

    def _holds_others(self) -> bool:
        """Return whether containers that were attributes when forward began have other entries now."""
        return any(
            len(now := _entries(each)) != len(before) or not all(map(is_, now, before)) for each, before in self._held
        )

    def _differs(self, how: str) -> FittedStepError:
        return FittedStepError(
            f"{type(self._module).__name__} {how} when backward calls it again, and did not in the steps before:"
            " make what its forward depends on an argument, buffer or parameter of it"
        )


@never_compiled
def _never(_: Any) -> Tensor:
    raise AssertionError("backward runs through a call that was repeated")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    first, second = (each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def _put_back_modes(dtype: torch.dtype, deterministic: bool) -> None:
    """Undo what a call has turned on that ended early."""
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


def _generators(device: torch.device) -> list[torch.Generator]:
    return [torch.default_generator, *([] if device.index is None else [torch.cuda.default_generators[device.index]])]


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators of the CPU and of a device."""
    return [each.get_state() for each in _generators(device)]


def set_random_state(device: torch.device, states: Sequence[Tensor]) -> None:
    """Give the generators states that `random_state` returned."""
    for each, state in zip(_generators(device), states, strict=True):
        each.set_state(state)


def _are_plain(values: Sequence[Any]) -> bool:
    return all(type(each) in (Tensor, nn.Parameter) or isinstance(each, _PLAIN) for each in values)


def _autocasts(device: torch.device) -> list[tuple[Any, ...]]:
    """Return the arguments of the autocasts that are on."""
    cached = torch.is_autocast_cache_enabled()
    kinds = dict.fromkeys(("cpu", device.type))
    return [(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each), cached) for each in kinds]


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _containers(modules: list[nn.Module]) -> list[tuple[tuple[int, str], Collection[Any]]]:
    """Return the lists, dicts and sets that are attributes of modules, and where they are."""
    return [
        ((at, name), value)
        for at, each in enumerate(modules)
        for name, value in vars(each).items()
        if isinstance(value, (list, dict, set)) and name not in _OF_ALL
    ]


def _entries(values: Collection[Any]) -> list[Any]:
    return [*values, *values.values()] if isinstance(values, dict) else [*values]


@contextmanager
def _as_before(
    attributes: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]], own: set[int | None]
) -> Iterator[None]:
    """Give modules the attributes of a call and clones of its buffers for a block; both are as now behind it.

    Kernels change statistics of a batch normalization without a new version, so nothing tells which buffers are
    written. The clones are added to `own`, storages that stay.
    """
    found = [(each, vars(each).copy(), each._buffers.copy()) for each, *_ in attributes]
    clones = list[Tensor]()  # they live as long as their storages stay
    try:
        for each, before, buffers in attributes:
            _put_back(vars(each), before)
            _put_back(each._buffers, buffers)
            for name, buffer in buffers.items():
                if buffer is not None and buffer.nbytes <= MOST_CLONED:
                    each._buffers[name] = clone = buffer.detach().clone()
                    clones.append(clone)
                    own.add(storage_key(clone))
        yield
    finally:
        for each, attributes_now, buffers in found:
            _put_back(vars(each), attributes_now)
            _put_back(each._buffers, buffers)


def _put_back(values: dict[str, Any], before: dict[str, Any]) -> None:
    if [*values] != [*before] or not all(map(is_, values.values(), before.values())):
        values.clear()
        values.update(before)
