"""Values that are the same in each step: what is made of constants, shapes, numbers, and buffers that no step writes.

A trace computes nothing. But code may read such values, and they are known: the operators that make them run beside
the trace, on the device of the step. Of what depends on arguments, trained parameters, random numbers or on what the
step writes nothing is known. A step compares the tensors behind values that were read before it runs.

A value that is not known may decide whether an error is raised, and nothing else. Then the trace supposes that none is,
and the step looks whether that was right.
"""

from collections.abc import Iterable
from dis import Instruction, get_instructions
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ucudnn.memory.torch.subject.traced_values import TracedStorage, TracedTensor, listed, mapped, tensors_in

_MOST_BYTES = 1 << 20
_ENDS = "RETURN", "FOR_", "SEND", "YIELD", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF"
COLLECTIVE = ("c10d", "_c10d_functional", "ucudnn_ranks")
"""Namespaces of operators that wait for other ranks, which do not run beside a trace or by themselves."""
UNKNOWN = object()
"""Stands for what is not known, because None may be a value."""


class _Value(NamedTuple):
    """The bytes of a storage, and the storages before the step that they were made of."""

    bytes: Tensor
    origins: frozenset[int]


@final
class KnownValues:
    """Knows bytes of storages of a trace.

    Attributes:
        read: storages before the step whose values code has read, directly or by what was made of them, and where.
    """

    def __init__(self, storages: list[TracedStorage]) -> None:
        self._storages = storages
        self._before: dict[int, Tensor] = {}
        self._known: dict[int, _Value] = {}
        self._written = set[int]()
        self.read: dict[int, str] = {}

    def meet(self, storage: int, tensor: Tensor, *, changes: bool) -> None:
        """Note a tensor that is there before the step, and whether training changes it."""
        if changes:
            self._written.add(storage)
        else:
            self._before[storage] = tensor

    def computed(self, func: Any, args: Any, kwargs: Any, out: Any = UNKNOWN) -> Any:
        """Return what an operator returns of values that are known, or `UNKNOWN`; arguments are those of a trace.

        What it returned in the trace is `out`, whose bytes are known from now on.
        """
        given = [*tensors_in((args, kwargs))]
        if not self._is_known(func, given):
            return UNKNOWN
        there = {each.storage for each in given}
        fresh = [] if out is UNKNOWN else [each for each in tensors_in(out) if each.storage not in there]
        viewed = out is not UNKNOWN and not fresh and not func._schema.is_mutable
        if viewed or sum(self._storages[each.storage].size for each in fresh) > _MOST_BYTES:
            return UNKNOWN

        def real(tensor: TracedTensor) -> Tensor:
            value = self._value(tensor.storage)
            if value is not None:
                return tensor.within(value.bytes)
            return tensor.empty(self._storages[tensor.storage].device)

        try:
            with no_dispatch():
                own, named = (mapped(each, TracedTensor, real) for each in (args, kwargs))
                result = func(*own, **named)
                if out is not UNKNOWN:
                    self._note(out, result, given)
        except Exception:  # noqa: BLE001  # the trace raises it, or the step
            return UNKNOWN
        return result

    def use(self, tensors: Iterable[TracedTensor], place: str) -> None:
        """Note that code reads the values of tensors at a place."""
        for tensor in tensors:
            value = self._value(tensor.storage)
            if value is not None:
                self.read.update(dict.fromkeys(value.origins, place))

    def write(self, written: Iterable[TracedTensor], *, computed: bool) -> str | None:
        """Forget what an operator has written that is not known, and what was there before the step.

        Returns:
            Where code has read a value that the step writes, which is another one in the next step; None for nowhere.
        """
        for tensor in written:
            if tensor.storage in self._before or not computed:
                self._known.pop(tensor.storage, None)
                self._written.add(tensor.storage)
        return next((place for storage, place in self.read.items() if storage in self._written), None)

    def copies(self, persistent: Iterable[tuple[Tensor, TracedTensor]]) -> tuple[tuple[int, Tensor], ...]:
        """Return the indices of tensors before the step whose values code has read, each with a copy."""
        pairs = enumerate(persistent)
        return tuple((index, real.detach().clone()) for index, (real, each) in pairs if each.storage in self.read)

    def died(self, storage: int) -> None:
        """Forget a storage that has died."""
        self._known.pop(storage, None)

    def _is_known(self, func: Any, given: list[TracedTensor]) -> bool:
        name = func._opname
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in name or "resize" in name or name == "set_":
            return False
        if func.namespace in COLLECTIVE:
            return False
        given = given[1:] if name.endswith("_like") or name.startswith("new_") else given  # they read no bytes
        return all(self._value(each.storage) is not None for each in given)

    def _value(self, storage: int) -> _Value | None:
        """Return what is known of a storage; None if it is not."""
        found = self._known.get(storage)
        if found is None and storage in self._before and storage not in self._written:
            tensor = self._before[storage]
            if self._storages[storage].size <= _MOST_BYTES and tensor.layout is torch.strided:
                with no_dispatch():
                    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                    found = self._known[storage] = _Value(whole.clone(), frozenset((storage,)))
        return found if found is not None and not found.origins & self._written else None

    def _note(self, out: Any, result: Any, given: Iterable[TracedTensor]) -> None:
        values = [self._value(each.storage) for each in given]
        origins = frozenset[int]().union(*(each.origins for each in values if each is not None))
        there = {each.storage for each in given}
        for traced, real in zip(listed(out), listed(result), strict=True):
            if isinstance(traced, TracedTensor) and traced.storage not in there:
                bytes_ = torch.zeros(self._storages[traced.storage].size, dtype=torch.uint8, device=real.device)
                traced.within(bytes_).copy_(real)
                self._known[traced.storage] = _Value(bytes_, origins)
            elif isinstance(traced, TracedTensor):
                self._known[traced.storage] = self._known[traced.storage]._replace(origins=origins)


def without_error(frame: FrameType) -> bool | None:
    """Return the value of the condition that code looks at whose other value only raises an error; None for others."""
    code = [*get_instructions(frame.f_code)]
    places = {each.offset: at for at, each in enumerate(code)}
    at = places.get(frame.f_lasti, -1)
    negated = False
    while at >= 0 and code[at].opname in ("TO_BOOL", "UNARY_NOT"):
        negated ^= code[at].opname == "UNARY_NOT"
        at += 1
    if at < 0 or not code[at].opname.endswith(("_IF_TRUE", "_IF_FALSE")):
        return None
    jumps, goes_on = (_raises(code, places, each) for each in (places[code[at].argval], at + 1))
    if jumps == goes_on:
        return None
    return (code[at].opname.endswith("_IF_TRUE") is goes_on) ^ negated


def _raises(code: list[Instruction], places: dict[int, int], at: int) -> bool:
    """Whether code from an instruction on does nothing but raise an error."""
    for _ in code:
        each = code[at]
        if each.opname in ("RAISE_VARARGS", "JUMP_FORWARD"):
            if each.opname == "RAISE_VARARGS":
                return True
            at = places[each.argval] - 1
        elif "JUMP" in each.opname or each.opname.startswith(_ENDS):
            return False
        at += 1
    return False
