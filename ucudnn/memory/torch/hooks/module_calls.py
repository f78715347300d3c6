"""ModuleCalls: follows the calls of modules, measures what each saves and how long it takes, and repeats some.

PyTorch's own hooks of all modules do not see keyword arguments before a call, and not Ctrl-C behind one. So while a
budget is entered, `nn.Module.__call__` is a function that asks what follows calls in its thread.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import graph
from torch.utils._pytree import tree_leaves

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.memory.torch.device.step_clock import keep_busy, mark
from ucudnn.memory.torch.hooks.module_choice import Call, ModuleUse, RepeatableModule, choose_modules, weights
from ucudnn.memory.torch.hooks.repeated_call import RepeatedCall, may_be_repeated
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory
from ucudnn.memory.torch.hooks.saved_tensors import SavedStorage, storage_key
from ucudnn.torch.device.compilation import never_compiled

_ALIKE = 2  # steps that need little, after which hooks see few tensors
_UNSEEN = 16  # calls without others inside, between which nobody looks
_LOOKED_AT, _MORE = 8, 12  # each so many calls; that part of the limit more than before shows another step
_COPIES = 2  # what leaves for the host is copied there and back
_MOST_BUSY_MS = 200  # for which a GPU is kept busy
_REPEAT_MS = 0.25  # of the host, to call a module again, beside the call itself
_plain: Any = nn.Module.__call__
_disable_hooks: Any = graph.disable_saved_tensors_hooks
_hooks: Any = torch._C._autograd
_lock = new_lock(LockLevel.INNERMOST)
_entered = 0


@final
class _Active(threading.local):
    """What follows the calls of a thread: the last one that it entered and has not left."""

    def __init__(self) -> None:
        self.entered: list[ModuleCalls] = []


_active = _Active()


@final
class ModuleCalls:
    """Follows the calls of modules in the threads that enter it, on one device.

    Attributes:
        names: names of modules.
        depth: how many calls run now, one in another.
        begin: is called before one that is in no other one.
        trying: whether modules were chosen that keep what they save in this step, and are called again to compare.
        target: the bytes for which modules were chosen last.
        queues: whether a GPU is kept busy until a call was issued, so that marks show what the call takes it.
        guarding_s: returns the seconds that the host has taken to guard operations so far.
        waits: marks around each wait of the device so far, in the step that is recorded.
    """

    def __init__(self, memory: SavedMemory) -> None:
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.depth = 0
        self.begin: Callable[[], None] = lambda: None
        self._memory, self._device = memory, memory.device
        self._uses: weakref.WeakKeyDictionary[nn.Module, ModuleUse] = weakref.WeakKeyDictionary()
        self._stack: list[Call] = []
        self._quiet, self._in_unseen, self.trying, self.target = 0, False, False, 0
        self.queues, self.guarding_s, self._following_s = False, lambda: 0.0, 0.0
        self.waits: list[tuple[Any, Any]] = []
        self._pack: Callable[[Tensor], Any] = lambda tensor: tensor
        self._hooks: tuple[Any, Any] = (None, None)
        # Steps that needed little since the hooks began to see all; calls without others inside in this step; and what
        # was alive at some of them in the step before the hooks began to see few, in bytes.
        self._alike, self._leaves, self._looked, self._levels = 0, 0, 0, list[int]()
        memory.added, memory.read = self._added, self._read

    @contextmanager
    def followed(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
        """Follow the calls of this thread for a block, with hooks of what it saves."""
        global _entered
        self._pack, self._hooks = never_compiled(pack), (never_compiled(self._packed), never_compiled(unpack))
        _hooks._push_saved_tensors_default_hooks(*self._hooks)
        with _lock:
            _entered += 1
            nn.Module.__call__ = _call  # type: ignore[method-assign]
            graph.disable_saved_tensors_hooks = _without_hooks
        _active.entered.append(self)
        try:
            yield
        finally:
            if _top_hooks() is not None:
                _hooks._pop_saved_tensors_default_hooks()
            _active.entered.remove(self)
            with _lock:
                _entered -= 1
                if not _entered:
                    graph.disable_saved_tensors_hooks = _disable_hooks
                    if nn.Module.__call__ is _call:  # somebody else may have put another function there
                        nn.Module.__call__ = _plain  # type: ignore[method-assign]

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module."""
        if self._quiet:
            return _plain(module, *args, **kwargs)
        memory, before, use = self._memory, self._memory.owner, self._uses.get(module) or self._met(module)
        self._leaves += not module._modules
        before_unseen, in_unseen = self._in_unseen, self._in_unseen and use.unseen
        hooked = False if in_unseen else self._hooked()
        if in_unseen or (hooked is False and self.depth and use.stays and not use.repeated):
            if use.unseen and not in_unseen:
                self._look()
            memory.owner, self._in_unseen = module, use.unseen
            try:
                return _plain(module, *args, **kwargs)
            finally:
                memory.owner, self._in_unseen = before, before_unseen
        if not self.depth:
            self.begin()
            self._compare_sizes(use, args, kwargs)
            if hooked is False:  # the program's hooks were before them when the last call ended
                self._turn_hooks(on=True)
                hooked = True
        if use.stays is hooked:
            self._turn_hooks(on=not use.stays)
        memory.owner = module
        self.depth += 1
        try:
            return self._called(use, module, args, kwargs)
        finally:
            self.depth -= 1
            memory.owner = before
            if hooked is not None and self._hooked() is (not hooked):
                self._turn_hooks(on=hooked)

    def _called(self, use: ModuleUse, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = self._memory
        if not module._modules or memory.pressure.convolution_bytes(module):
            if self._alike >= _ALIKE:
                self._look()
            begin = perf_counter() if memory.pressure.learning else 0.0
            memory.relieve()
            self._following_s += perf_counter() - begin if begin else 0.0
        if use.repeated:
            tried = self._tried if use.same_bits is None else None
            return RepeatedCall(memory, self._quietly, module, use.size, tried)(args, kwargs)
        if memory.pressure.learning:
            return self._recorded(use, module, args, kwargs)
        return _plain(module, *args, **kwargs)

    def end_step(self, *, needs_little: bool) -> None:
        """Note that a step has ended, and whether hardly anything had to leave, and nothing failed or was learned."""
        self._leaves = self._looked = 0
        self._alike += 1
        if not needs_little:
            self.hook_all()

    def begin_backward(self, least: int) -> None:
        """Let the hooks see no more than some bytes of what a step saves, because each of them takes the host time.

        They do so after steps that needed little. What they see is what the modules save that have the most, that need
        room for a convolution, or that are in no other one, of which backward reads first. A call with other sizes ends
        that, and one at which more is alive than in this step.

        Args:
            least: bytes that are to be seen, because steps differ.
        """
        if self._alike != _ALIKE or not self._levels:
            return
        seen, bytes_seen = self._memory.savers(least)
        for module, use in self._uses.items():
            needed = module in seen or use.sizes is not None or self._memory.pressure.convolves(module)
            use.stays = bytes_seen >= least and not needed
        for module, use in self._uses.items():
            within = [(each, self._uses.get(each)) for each in module.modules()]
            leaves = sum(not each._modules for each, _ in within)
            are_unseen = all(met is None or (met.stays and not met.repeated) for _, met in within)
            use.unseen = are_unseen and leaves <= _UNSEEN

    def hook_all(self) -> None:
        """Let the hooks see all that is saved from now on."""
        self._alike, self._levels = 0, []
        for use in self._uses.values():
            use.stays = False

    def _compare_sizes(self, use: ModuleUse, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the sizes that the program gives a module; let the hooks see all if they are not those of before."""
        sizes = [(each.shape, each.dtype) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if sizes != use.sizes:
            use.sizes = sizes
            self.hook_all()

    def _look(self) -> None:
        """Let the hooks see all if more is alive than at this call of the step before they began to see few."""
        at, pressure = self._leaves // _LOOKED_AT, self._memory.pressure
        if at == self._looked:
            return
        self._looked = at
        pressure.grew(pressure.limit)  # so that relief looks: what hooks do not see counts for nobody
        self._memory.relieve()
        if self._alike == _ALIKE:
            self._levels.append(pressure.level)
        elif pressure.level > max(self._levels[at - 1 : at + 1] or self._levels, default=0) + pressure.limit // _MORE:
            self.hook_all()

    def _hooked(self) -> bool | None:
        """Return whether the hooks of this thread are on; None where the program has put others before them."""
        top = _top_hooks()
        return False if top is None else (top == self._hooks or None)

    def _turn_hooks(self, *, on: bool) -> None:
        """Turn the hooks of this thread on that were off, or off that were on."""
        if on:
            _hooks._push_saved_tensors_default_hooks(*self._hooks)
            return
        _hooks._pop_saved_tensors_default_hooks()
        if _top_hooks() is not None:  # hooks around the block, which are not to see these tensors
            _hooks._push_saved_tensors_default_hooks(*self._hooks)

    def choose(self, most_ms_per_byte: float) -> None:
        """Choose more modules that are repeated, by the last step that was recorded.

        What counts is the time of the device or of the host, whichever takes longer for the calls of the program; both
        where they take as long. What is still too much leaves for the host as soon as it can.
        """
        pressure = self._memory.pressure
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        for use in self._uses.values():
            use.device_ms = sum(each.device_ms() for each in use.calls)
        self._least_host_ms()
        outer = [use for use in self._uses.values() if use.calls and use.sizes is not None]
        by_device, by_host = weights(sum(use.device_ms for use in outer), sum(use.host_ms for use in outer) * on_gpu)
        repeated = {module for module, use in self._uses.items() if use.repeated}
        within = {each for module in repeated for each in module.modules()}
        candidates = [
            RepeatableModule(
                module,
                use.calls,
                by_device * use.device_ms + by_host * (use.host_ms + _REPEAT_MS * len(use.calls)),
                {*module.modules()},
            )
            for module, use in self._uses.items()
            if use.calls
            and use.same_bits is not False
            and module not in within
            and repeated.isdisjoint(module.modules())
        ]
        found, self._memory.ahead_bytes = choose_modules(
            candidates, pressure.demand, pressure.target, _COPIES * most_ms_per_byte, may_be_repeated
        )
        self.target = pressure.target
        profile = [0, *pressure.demand]
        for each in found:
            self._uses[each.module].repeated = True
            self._uses[each.module].size = each.largest
            each.drop(profile, 1)
        pressure.demand[:] = profile[1:]
        self.trying = bool(found)

    def record(self, *, failed: bool = False) -> None:
        """Forget the step that was recorded, because this one is; nothing is learned of one that failed."""
        if not failed:
            self._least_host_ms()
        for use in self._uses.values():
            use.calls = []
        self._memory.pressure.demand.clear()
        self._stack.clear()

    def _packed(self, tensor: Tensor) -> Any:
        begin = perf_counter()
        found = self._pack(tensor)
        self._following_s += perf_counter() - begin
        return found

    def _least_host_ms(self) -> None:
        for use in self._uses.values():
            if use.calls:
                use.host_ms = min(use.host_ms, sum(each.host_ms for each in use.calls))

    def _met(self, module: nn.Module) -> ModuleUse:
        use = self._uses[module] = ModuleUse()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                self._memory.keep(tensor)
        if not self.depth:
            self._memory.pressure.alive.add([*module.parameters(), *module.buffers()])
            for name, each in module.named_modules():
                self.names.setdefault(each, name or type(module).__name__)
        return use

    def _recorded(self, use: ModuleUse, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        met, on_gpu = perf_counter(), self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        call = Call({_key(each) for each in tree_leaves((args, kwargs))}, mark(self._device))
        if on_gpu and self.queues and torch.cuda.current_stream(self._device).query():  # it would wait for the host
            keep_busy(self._device, min(use.passed_ms, _MOST_BUSY_MS) / 1e3)
            self.waits.append((call.begin, mark(self._device)))
            call.begin = self.waits[-1][1]
        depth, outer = len(self._stack), self._stack[-1] if self._stack else None
        self._stack.append(call)
        waited, begin, before = len(self.waits), perf_counter(), self._following_s + self.guarding_s()
        try:
            found = _plain(module, *args, **kwargs)
        finally:
            del self._stack[depth:]
        end = perf_counter()
        call.starves = on_gpu and bool(call.begin.query())
        call.waits, call.passed_ms = self.waits[waited:], (end - begin) * 1e3
        if not self.queues:
            use.passed_ms = call.passed_ms
        call.host_ms = max(0.0, call.passed_ms - (self._following_s + self.guarding_s() - before) * 1e3)
        for key in {_key(each) for each in tree_leaves(found)}:
            saved = self._memory.saved(key)
            if saved is not None and call in saved.calls:  # who is given the output holds it
                saved.calls.remove(call)
                call.size -= saved.size
        call.end, call.ended_at = mark(self._device), len(self._memory.pressure.demand)
        use.calls.append(call)
        if outer is not None:
            outer.inner.append(call)
        self._following_s += perf_counter() - end + begin - met
        return found

    def _added(self, key: int, saved: SavedStorage) -> None:
        saved.calls = [each for each in self._stack if key not in each.given]
        for each in saved.calls:
            each.size += saved.size

    def _read(self, saved: SavedStorage) -> None:
        for each in saved.calls:
            each.back_at = each.back_at or len(self._memory.pressure.demand) + 1
        saved.calls = []

    def _quietly(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._quiet += 1
        try:
            return _plain(module, *args, **kwargs)
        finally:
            self._quiet -= 1

    def _tried(self, module: nn.Module, same: bool) -> None:
        use = self._uses[module]
        use.same_bits = same and use.same_bits is not False
        use.repeated = use.same_bits


def _top_hooks() -> Any:
    return _hooks._top_saved_tensors_default_hooks(False)


def _key(value: Any) -> int | None:
    return storage_key(value) if isinstance(value, Tensor) else None


@never_compiled
def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module: what stands in the place of `nn.Module.__call__`."""
    calls = None if torch.compiler.is_compiling() or not _active.entered else _active.entered[-1]
    if calls is None or not torch.is_grad_enabled() or _is_transformed():
        return _plain(module, *args, **kwargs)
    return calls.call(module, args, kwargs)


def _is_transformed() -> bool:
    """Return whether a transform of torch.func runs, whose tensors have no storage, or hooks are disabled."""
    return peek_interpreter_stack() is not None or not _hooks._saved_tensors_hooks_is_enabled()


@contextmanager
def _without_hooks(error_message: str) -> Iterator[None]:
    """Let a transform of torch.func run, which raises that error where there are hooks of saved tensors.

    It stands in the place of `disable_saved_tensors_hooks`. Only the hooks of this package are left out meanwhile.
    """
    left_out = list[tuple[Any, Any]]()
    while (top := _top_hooks()) and (top[0].__module__ or "").startswith(__package__):
        left_out.append(top)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        with _disable_hooks(error_message):
            yield
    finally:
        for each in reversed(left_out):
            _hooks._push_saved_tensors_default_hooks(*each)
