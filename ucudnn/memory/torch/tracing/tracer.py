"""Tracer: writes down every operator that PyTorch dispatches in a training step, and the storages that it touches.

The tracer stands below autograd. So it sees a step as the device does: forward, backward with the gradients that
autograd adds up, and the optimizer, one operator at a time in the order of launch. It holds no tensor, because autograd
decides by reference counts which memory it takes over.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.subject.traced_values import Trace, TracedCall, TracedStorage, TracedTensor, mapped
from ucudnn.memory.torch.tracing.fake_layouts import as_computed
from ucudnn.memory.torch.tracing.provenance import Provenance

IGNORED = ("profiler", "prim")
"""Namespaces of operators that touch no memory."""

_LIFTS = {"lift", "lift_fresh", "lift_fresh_copy"}
_DEVICE = torch.ops.prim.device.default
_WITHOUT_MEMORY, _WITH_MEMORY = torch.ops.aten._efficientzerotensor.default, torch.ops.aten.zeros.default
"""An operator that returns no memory, which code could neither view nor copy, and the one in its place."""


class _Watched(weakref.ref[Any]):
    """Refers to a storage and has its index."""

    __slots__ = ("index",)
    index: int


@final
class Tracer(TorchDispatchMode):
    """Writes down operator calls while it is entered.

    Args:
        provenance: tells which module and line an operator comes from.
        unknown: is called with each tensor that an operator reads and whose storage nobody has met, and the index of
            that storage: constants of the program.
        stand_in: returns what is written in the place of a tensor; None lets operators write the tensor itself.

    Attributes:
        phase: the part of the step that runs.
        place: the module and the line of the last operator.
        effects: watches the code between operators; None watches nothing.
    """

    def __init__(
        self,
        provenance: Provenance,
        unknown: Callable[[torch.Tensor, int], None] | None = None,
        stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._unknown, self._stand_in = unknown, stand_in
        self._trace = Trace()
        self._meets_real = False
        self.phase = Phase.FORWARD
        self.place = "", ""
        self.effects: Any = None  # a `StepEffects`
        self._provenance = provenance
        self._known: dict[int, _Watched] = {}  # by the address of the storage
        self._died: deque[_Watched] = deque()  # since the last operator

    @property
    def trace(self) -> Trace:
        """What was written down."""
        self._note_died()
        return self._trace

    def meet(self, tensor: torch.Tensor) -> int:
        """Return the index of the storage of a tensor that is there before the step."""
        return self._index(tensor, made=False)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the index of a tensor's storage, or None where the trace has not met it."""
        return self._found(tensor.untyped_storage())

    def know(self, tensor: torch.Tensor, index: int) -> None:
        """Know the storage of a tensor, which lives as long as the trace, as one that was met."""
        self._watch(tensor.untyped_storage(), index)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count what runs inside to another part of the step."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and write it down."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the most frequent one by far, with this answer
            return args[0].fake_device
        kwargs = kwargs or {}
        func = _WITH_MEMORY if func is _WITHOUT_MEMORY else func
        if func.namespace in IGNORED:
            return func(*args, **kwargs)
        watched = self.effects is not None and self.effects.pause()
        try:
            node = torch._C._current_autograd_node()
            number = None if node is None else node._sequence_nr()
            self.place = self._provenance.place(node, number)
            del node
            return self._written(func, args, kwargs, number)
        finally:
            if watched:
                self.effects.resume()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a step is traced. PyTorch would import its compiler, and go through it in each call.
        return False

    def _written(self, func: Any, args: Any, kwargs: Any, number: int | None) -> Any:
        """Run an operator, write it down, and return its result."""
        place = self.place
        self._meets_real = False
        traced = [mapped(each, torch.Tensor, self._read) for each in (args, kwargs)]
        if (
            self._stand_in is not None and self._meets_real and func._opname not in _LIFTS
        ):  # these return a tensor of their own
            stand_ins = [mapped(each, torch.Tensor, self._stand_in) for each in (args, kwargs)]
            args, kwargs = stand_ins if func._schema.is_mutable else (args, kwargs)
        result = _wanted(func, args, as_computed(func, args, func(*args, **kwargs)))
        call = TracedCall(
            func=func,
            args=traced[0],
            kwargs=traced[1],
            results=mapped(result, torch.Tensor, self._made),
            phase=self.phase,
            module=place[0],
            source=place[1],
            node=number,
            flops=_flops(func, args, kwargs, result),
            index=len(self._trace.calls),
        )
        self._note_died()
        self._trace.calls.append(call)
        if call.turns and args[0].requires_grad and not args[0]._is_view():
            self._trace.turned.append(call)
        return result

    def describe(self, tensor: torch.Tensor) -> TracedTensor:
        """Return a tensor as operators see it; its storage is met if it was not."""
        return _traced(tensor, self._index(tensor, made=False))

    def _read(self, tensor: torch.Tensor) -> TracedTensor:
        if self._unknown is not None and self.find(tensor) is None:
            self._unknown(tensor, self._index(tensor, made=False))
        self._meets_real |= not isinstance(tensor, FakeTensor)
        return self.describe(tensor)

    def _made(self, tensor: torch.Tensor) -> TracedTensor:
        return _traced(tensor, self._index(tensor, made=True))

    def _index(self, tensor: torch.Tensor, *, made: bool) -> int:
        storage = tensor.untyped_storage()
        storages, size = self._trace.storages, storage.nbytes()
        index = self._found(storage)
        if index is None:
            index = len(storages)
            storages.append(TracedStorage(size, tensor.device.type, len(self._trace.calls) if made else -1))
            self._watch(storage, index)
        storages[index].size = max(storages[index].size, size)  # operators with out= may enlarge what they write
        return index

    def _found(self, storage: Any) -> int | None:
        """Return the index of a storage: another one may have died at its address."""
        watched = self._known.get(storage._cdata)
        return watched.index if watched is not None and watched() is storage else None

    def _watch(self, storage: Any, index: int) -> None:
        # What Python calls when an object dies must raise no error, because nobody would see it. A function of C raises
        # none, not even Ctrl-C.
        self._known[storage._cdata] = watched = _Watched(storage, self._died.append)
        watched.index = index

    def _note_died(self) -> None:
        """Note which storages have died since the last call was written down."""
        while self._died:
            self._trace.storages[self._died.popleft().index].died = len(self._trace.calls)


def _wanted(func: Any, args: Any, result: Any) -> Any:
    """Return the results of an operator without gradients that nobody wants, which only its fake makes.

    So batch normalization of an input that needs no gradient makes two gradients, and its fake makes three.
    """
    if not isinstance(result, tuple | list):
        return result
    names = [argument.name for argument in func._schema.arguments]
    if "output_mask" not in names:
        return result
    return tuple(each if wish else None for each, wish in zip(result, args[names.index("output_mask")], strict=True))


def _traced(tensor: torch.Tensor, storage: int) -> TracedTensor:
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    offset = int(tensor.storage_offset())
    return TracedTensor(storage, shape, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return floating-point operations, counted without PyTorch where its counter is wrong.

    It multiplies the gradient of a grouped convolution's filter by the groups, does not know attention on CPUs, and in
    older releases refuses queries with more heads than keys.
    """
    if func is torch.ops.aten.convolution_backward.default:
        grad, x, weight, *_, mask = args
        transposed = args[7]
        return int(2 * x.shape[0] * prod((x if transposed else grad).shape[2:]) * weight.numel() * sum(mask[:2]))
    if func.namespace == "aten" and func._opname.startswith("_scaled_dot_product"):
        backward = func._opname.endswith("_backward")
        query, key, value = args[backward : backward + 3]
        # Backward computes the scores again, then gradients of query and key, and of scores and value.
        query_products, value_products = (3, 2) if backward else (1, 1)
        width = query_products * query.shape[-1] + value_products * value.shape[-1]
        return int(2 * prod(query.shape[:-1]) * key.shape[-2] * width)
    count: Any = flop_counter.flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0
