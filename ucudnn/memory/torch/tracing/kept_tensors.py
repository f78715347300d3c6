"""What forward leaves in its modules for the next call: buffers that it sets anew, and tensors in attributes."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.subject.attribute_content import AttributeContent
from ucudnn.memory.torch.subject.model_state import modules_of
from ucudnn.memory.torch.subject.module_attributes import AttributeRead
from ucudnn.memory.torch.subject.traced_values import TracedCall
from ucudnn.memory.torch.tracing.assemble import writes


@final
class BufferTables:
    """The buffers of a model's modules, and of a loss's, in whose place a trace may leave tensors without memory."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self._tables = [(name, each._buffers, {**each._buffers}) for name, each in modules_of(model, loss)]
        self._written: list[str] = []

    def write_back(self, result: Any) -> Any:
        """Let buffers that forward set anew be written into the old ones, which are those that code can know.

        The new ones may be made of old ones, as where a history moves on. So those are copied that would be written
        before they are read.

        Returns:
            The same, with copies of the old buffers that it holds.

        Raises:
            StepGraphError: if one has another shape, type or device than the old one, or only one of them is a tensor,
                or another buffer shares the old one's memory and is not set anew.
        """
        changed = [*self._changed()]
        for label, old, new in changed:
            if _form(old) != _form(new):
                raise StepGraphError(
                    f"forward sets buffer {label} to {_form(new)}, and it was {_form(old)}: a plan writes into the old"
                    " one, so give it the form that it keeps before the fit, as by calling the model once"
                )
            if (other := self._sharing(old)) is not None:
                raise StepGraphError(
                    f"forward sets buffer {label} anew, and buffer {other} has the same memory, which a plan would"
                    " write: give one of them a clone of it before the fit"
                )
        written = [old for _, old, _ in changed]

        def own(tensor: Any) -> Any:
            return tensor.clone() if any(map(partial(_share, tensor), written)) else tensor

        result = tree_map(own, result)
        with torch.no_grad():
            values = [own(new) for _, _, new in changed]
            for old, value in zip(written, values, strict=True):
                old.copy_(value)
        self._written += [label for label, _, _ in changed]
        return result

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what to do where backward reads a buffer that was written back.

        Raises:
            StepGraphError: in the place of PyTorch's error.
        """
        try:
            yield
        except RuntimeError as error:
            if not self._written or "modified by an inplace operation" not in str(error):
                raise
            raise StepGraphError(
                f"backward reads a buffer that forward sets anew, among {', '.join(self._written)}, and a plan writes"
                " the new value into the old buffer: let forward compute with a clone of it, as x * self.scale.clone()"
            ) from error

    def _changed(self) -> Iterator[tuple[str, Any, Any]]:
        for name, table, before in self._tables:
            for key in dict.fromkeys((*before, *table)):
                if table.get(key) is not before.get(key):
                    yield f"{name}.{key}" if name else key, before.get(key), table.get(key)

    def _sharing(self, old: Any) -> str | None:
        """Return the name of a buffer that shares the memory of another one and was not set anew; None if none does."""
        for name, table, before in self._tables:
            for key, value in table.items():
                if value is before.get(key) and _share(value, old):
                    return f"{name}.{key}" if name else key
        return None


def check_kept(
    kept: Sequence[tuple[AttributeRead, Sequence[Tensor], int]],
    calls: Iterable[TracedCall],
    roots: Iterable[int],
    find: Callable[[Tensor], int | None],
) -> set[str]:
    """Check that tensors that forward keeps in attributes are the same in each step: made of constants only, and once.

    Such is a mask or a table of positions. The code of a plan makes it in each step.

    Args:
        kept: attributes that forward read first and that hold tensors of the trace when it has ended: each as it was,
            with these tensors, and how often it was set.
        calls: the calls of forward.
        roots: storages of arguments and parameters.
        find: returns the storage of a tensor, None for one that the trace has not met.

    Returns:
        The labels of containers whose entries depend on these or on random numbers, and not on what they were before:
        forward may have written them before it reads them, which its next call tells.

    Raises:
        StepGraphError: if another one depends on such, or on what it was before.
    """
    tainted = {*roots, *(find(tensor) for before, *_ in kept for tensor in before.content.tensors)}
    for call in calls:
        formed = call.func._opname.endswith("_like") or call.func._opname.startswith("new_")  # they read no bytes
        drawn = torch.Tag.nondeterministic_seeded in call.func.tags
        if drawn or (not formed and any(each.storage in tainted for each in call.inputs)):
            tainted.update(each.storage for each in (*call.outputs, *writes(call)))
    written = set[str]()
    for before, now, number in kept:
        if number > 1 or any(isinstance(each, FakeTensor) and find(each) in tainted for each in now):
            was = before.content
            if not was.views or any(find(each) is not None for each in was.tensors):
                raise kept_error(before.label)
            written.add(before.label)
    return written


def check_stays(
    kept: Sequence[tuple[AttributeRead, Sequence[Tensor], int]],
    written: Container[str],
    find: Callable[[Tensor], int | None],
    *,
    alike: bool,
) -> None:
    """Check what a second forward has left in attributes, by the storages that it has read.

    Containers of written labels may have other entries, if it has not read those of the first one, and called alike
    operators. It raises a StepGraphError if it has read or changed others.
    """
    for read, before, _ in kept:
        now = read.value()
        if read.label in written:
            stays = alike and all(find(each) is None for each in before)
        else:  # `_changed` tells of lists
            stays = isinstance(now, list) or [*map(id, AttributeContent(now).tensors)] == [*map(id, before)]
        if not stays:
            raise kept_error(read.label)


def kept_error(label: str) -> StepGraphError:
    """Return the error of an attribute in which forward keeps a tensor."""
    return StepGraphError(
        f"forward keeps a tensor in {label} for its next call, as a recurrent layer does with its state, and the code"
        " of a plan sets no attribute: make it a buffer, or an argument and an output"
    )


def _share(tensor: Any, other: Any) -> bool:
    both = isinstance(tensor, Tensor) and isinstance(other, Tensor)
    return both and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def _form(buffer: Any) -> str:
    if not isinstance(buffer, Tensor):
        return str(buffer)
    return f"{tuple(buffer.shape)} of {str(buffer.dtype).removeprefix('torch.')} on {buffer.device}"
