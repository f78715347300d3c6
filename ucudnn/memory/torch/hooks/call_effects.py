"""CallEffects: whether a call of a module leaves traces beside its output, which a second call would leave again.

What a call writes to small buffers, and which objects it makes attributes of its modules, is put back around a second
call (`RepeatedCall`), as are PyTorch's own generators. So these do not count. All else does: entries of lists, global
variables, elements of other tensors, clocks, and numbers that Python, NumPy or a generator of the program draws.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Number
from typing import Any, cast, final

from torch import Generator, Tensor, nn

from ucudnn.memory.torch.hooks.saved_tensors import storage_key
from ucudnn.memory.torch.subject.attribute_content import VALUES
from ucudnn.memory.torch.subject.traced_values import each_in, is_written
from ucudnn.memory.torch.tracing.provenance import Provenance
from ucudnn.memory.torch.tracing.step_effects import StepEffects
from ucudnn.memory.torch.tracing.step_reads import StepReads
from ucudnn.torch.device.compilation import EagerOperators

MOST_CLONED = 2**20
"""Bytes of a buffer that is put back around a second call; larger ones are masks and tables."""

_SET_ANEW = (*VALUES, Number, Tensor)


@final
class CallEffects:
    """Watches one call of a module.

    Args:
        module: the module.
        modules: it and those in it.
    """

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._kept = _Kept()
        self._reads = StepReads(module, None, cast("Any", self._kept))
        self._effects = StepEffects(
            Provenance(module),
            {id(each): name for name, each in module.named_parameters()},
            {*map(id, modules)},
            self._reads.called,
            lambda: None,
            seeks=False,
            settled=True,
        )
        self._effects.refuses = False
        self._writes = _Writes(modules)
        self._own = {id(vars(each)) for each in modules}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch what runs."""
        with self._kept.after:
            self._reads.begin()
            with self._writes, self._effects.entered():
                yield

    def found(self) -> bool:
        """Return whether what ran would be noticed if it ran once more."""
        if self._writes.found or self._effects.found():
            return True
        return any(
            id(each.owner) not in self._own or not isinstance(each.value(), _SET_ANEW) for each in self._reads.changed()
        )


@final
class _Kept:
    """Stands in the place of a snapshot: what is read is no trial, so nothing of it is put back."""

    def __init__(self) -> None:
        self.after = ExitStack()

    def note(self, *_: Any) -> None:
        """Note nothing."""

    def undo(self, undo: Callable[[], object]) -> None:
        """Call a function when the watch ends."""
        self.after.callback(undo)


@final
class _Writes(EagerOperators):
    """Sees whether operators write to what is no result of theirs, or draw from generators of the program."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.found = False
        buffers = [buffer for each in modules for buffer in each._buffers.values() if buffer is not None]
        self._made = _storages([each for each in buffers if each.nbytes <= MOST_CLONED])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            each
            for number, argument in enumerate(func._schema.arguments)
            if is_written(argument)
            for each in each_in(args[number] if number < len(args) else kwargs.get(argument.name), Tensor)
        ]
        self.found |= any(storage_key(each) not in self._made for each in written)
        self.found |= any(True for _ in each_in((args, kwargs), Generator))
        given = _storages((args, kwargs))
        found = func(*args, **kwargs)
        self._made |= _storages(found) - given
        return found


def _storages(values: Any) -> set[int | None]:
    return {storage_key(each) for each in each_in(values, Tensor)} - {None}
