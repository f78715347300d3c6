"""Tracer: writes down every operator that PyTorch dispatches in a training step, and the storages that it touches.

The tracer stands below autograd. So it sees a step as the device does: forward, backward with the gradients that
autograd adds up, and the optimizer, one operator at a time in the order of launch. It holds no tensor, because autograd
decides by reference counts which memory it takes over.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils import flop_counter
from torch.utils._mode_utils import no_dispatch

from ucudnn.errors import StepGraphError
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.subject.traced_values import Trace, TracedCall, TracedStorage, TracedTensor, mapped, tensors_in
from ucudnn.memory.torch.tracing.assemble import writes
from ucudnn.memory.torch.tracing.known_values import COLLECTIVE, UNKNOWN, KnownValues, without_error
from ucudnn.memory.torch.tracing.provenance import Provenance, told
from ucudnn.memory.torch.tracing.real_geometry import as_computed, computed_whole
from ucudnn.torch.device.compilation import EagerOperators

aten = torch.ops.aten
IGNORED = ("profiler", "prim")
"""Namespaces of operators that touch no memory."""

_LIFTS = {"lift", "lift_fresh", "lift_fresh_copy"}
_DEVICE = torch.ops.prim.device.default
_ITEM, _INDEX, _SELECT = aten._local_scalar_dense.default, aten.index.Tensor, aten.masked_select.default
_CTC = aten._ctc_loss.Tensor
_WITHOUT_MEMORY, _WITH_MEMORY = torch.ops.aten._efficientzerotensor.default, torch.ops.aten.zeros.default
"""An operator that returns no memory, which code could neither view nor copy, and the one in its place."""


class _Watched(weakref.ref[Any]):
    __slots__ = ("index",)
    index: int


@final
class Tracer(EagerOperators):
    """Writes down operator calls while it is entered.

    `unknown` is called with each tensor that an operator reads and whose storage nobody has met, a constant of the
    program, and the index of that storage. `stand_in` returns what is written in the place of a tensor; without it
    operators write the tensor itself.

    Attributes:
        place: the module and the line of the last operator.
        effects: watches the code between operators; None watches nothing.
        any_value: whether values that code reads are mere factors, for which 1 stands, as in PyTorch's optimizers.
        values: what is known of the values of tensors.
        sampled: likewise, and what is known where the arguments are those of the sample.
        supposed: conditions of which one value only raises an error, or that the sample tells, each with its version,
            the value that is supposed, where that is, and whether there is another step for the other one.
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
        self.values = KnownValues(self._trace.storages)
        self.sampled = KnownValues(self._trace.storages)
        self.supposed: list[tuple[torch.Tensor, int, bool, str, bool]] = []
        self._meets_real = False
        self.phase = Phase.FORWARD
        self.place = "", ""
        self.any_value = False
        self.effects: Any = None  # a `StepEffects`
        self._provenance = provenance
        outer = torch._C._current_autograd_node()  # a backward, in which a step is planned anew
        self._outer = None if outer is None else outer._sequence_nr()
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

    def meet_values(self, tensor: torch.Tensor, real: torch.Tensor, *, changes: bool) -> None:
        """Note which values a tensor has before the step, and whether training changes them."""
        for each in (self.values, self.sampled):
            each.meet(self.meet(tensor), real, changes=changes)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the index of a tensor's storage, or None where the trace has not met it."""
        storage = tensor.untyped_storage()
        watched = self._known.get(storage._cdata)  # another one may have died at its address
        return watched.index if watched is not None and watched() is storage else None

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

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """Run operators as the trace does, and write none of them down."""
        with Tracer(self._provenance) as tracer, tracer.during(Phase.OPTIMIZER):
            tracer.any_value = self.any_value
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the most frequent one by far, with this answer
            return args[0].fake_device
        kwargs = kwargs or {}
        func = _WITH_MEMORY if func is _WITHOUT_MEMORY else func
        if func.namespace in IGNORED:
            return func(*args, **kwargs)
        watched = self.effects is not None and self.effects.pause()
        try:
            node: Any = torch._C._current_autograd_node()
            number: int | None = None if node is None else node._sequence_nr()
            if number == self._outer:
                node = number = None
            self.place = self._provenance.place(node, number)
            name = "" if node is None else node.name()
            # Before PyTorch 2.13, those of running products are computed otherwise from tensors without memory.
            if name.startswith("ProdBackward") or (name.startswith("Cumprod") and func._opname == "prod"):
                raise StepGraphError(
                    f"{told(self.place)} computes the gradient of a product, for which PyTorch has another formula if"
                    " an element is zero: a plan cannot hold it; use torch.log and torch.sum, or leave it to the loop"
                )
            del node
            return self._written(func, args, kwargs, number)
        finally:
            if watched:
                self.effects.resume()

    def _written(self, func: Any, args: Any, kwargs: Any, number: int | None) -> Any:
        place = self.place
        self._meets_real = False
        given, named = (mapped(each, torch.Tensor, self._read) for each in (args, kwargs))
        if (
            self._stand_in is not None and self._meets_real and func._opname not in _LIFTS
        ):  # these return a tensor of their own
            stand_ins = [mapped(each, torch.Tensor, self._stand_in) for each in (args, kwargs)]
            args, kwargs = stand_ins if func._schema.is_mutable else (args, kwargs)
        if func is _ITEM and self.any_value and getattr(args[0], "constant", None) is None:
            return 1.0 if args[0].is_floating_point() else 1
        on_fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        is_known = self.phase is not Phase.OPTIMIZER and on_fakes
        if is_known and torch.Tag.data_dependent_output in func.tags:
            value = self._answered(func, args, given, named)
            if value is not UNKNOWN:
                return value
        result, is_shaped = self._run(func, args, kwargs, given, named) if is_known else (func(*args, **kwargs), False)
        flops = _flops(func, args, kwargs, result)
        if is_known and not is_shaped:
            result = as_computed(func, given, named, result, self._device_of, heavy=flops > 0)
        result = _wanted(func, args, result)
        call = TracedCall(
            func=func,
            args=given,
            kwargs=named,
            results=mapped(result, torch.Tensor, partial(self.describe, made=True)),
            phase=self.phase,
            module=place[0],
            source=place[1],
            node=number,
            flops=flops,
            index=len(self._trace.calls),
        )
        self._note_died()
        self._trace.calls.append(call)
        if is_known:
            sampled, computed = (
                each.computed(func, given, named, call.results) is not UNKNOWN for each in (self.sampled, self.values)
            )
            self.sampled.write(writes(call), computed=sampled)
            if read := self.values.write(writes(call), computed=computed):
                raise StepGraphError(
                    f"{read} reads the value of a tensor that the step writes, so it changes from step to step: a plan"
                    " cannot hold it; compute with the tensor, or read it in the loop"
                )
        if call.turns and args[0].requires_grad and not args[0]._is_view():
            self._trace.turned.append(call)
        return result

    def _answered(self, func: Any, args: Any, given: Any, named: Any) -> Any:
        """Return the value of tensors that code reads, if it is known, or supposed, because others raise an error."""
        with suppress(LookupError):
            return self._value(func, given, named)
        if func is not _ITEM or self.phase is not Phase.FORWARD:
            return UNKNOWN
        supposed = without_error(sys._getframe(3))
        is_branch = supposed is None
        if is_branch:
            supposed = self.sampled.computed(func, given, named)
        if not isinstance(supposed, bool):
            return UNKNOWN
        self.supposed.append((args[0], args[0]._version, supposed, told(self.place), is_branch))
        return supposed

    def _run(self, func: Any, args: Any, kwargs: Any, given: Any, named: Any) -> tuple[Any, bool]:
        """Run an operator on fakes, and return its result, and whether its shape depends on values, which are known.

        Where the fake refuses what the operator computes, zeros tell what it returns.
        """
        try:
            return func(*args, **kwargs), False
        except DataDependentOutputException:
            raise
        except DynamicOutputShapeException:
            with suppress(LookupError):
                return self._shaped(func, args, given, named), True
            raise
        except Exception:
            found = None if func.namespace in COLLECTIVE else computed_whole(func, given, named, self._device_of)
            if found is None:
                raise
            return found, True

    def _value(self, func: Any, given: Any, named: Any) -> Any:
        """Return what an operator returns of known values, as code reads it; a LookupError says that one is not."""
        found = self.values.computed(func, given, named)
        if found is UNKNOWN:
            raise LookupError
        self.values.use(tensors_in((given, named)), told(self.place))
        return found

    def _shaped(self, func: Any, args: Any, given: Any, named: Any) -> Any:
        """Return the fake result of an operator whose shape depends on values; errors as in `_value`."""
        if func is _INDEX:
            indices: list[Any] = []
            for traced, fake in zip(given[1], args[1], strict=True):
                if fake is None or fake.dtype not in (torch.bool, torch.uint8):
                    indices.append(fake)
                    continue
                found = self._value(aten.nonzero.default, (traced,), {})
                indices += [fake.new_empty(len(found), dtype=torch.long) for _ in range(fake.dim())]
            return func(args[0], indices)
        if func is _SELECT:
            mask = self._value(aten.clone.default, given[1:], {})
            with no_dispatch():
                count = int(mask.expand(torch.broadcast_shapes(args[0].shape, mask.shape)).sum())
            return args[0].new_empty(count)
        if func is _CTC:
            _, lengths = (self._value(aten.clone.default, (each,), {}) for each in given[2:4])
            with no_dispatch():
                most = int(lengths.max())
            steps, batch = args[0].shape[:2]
            return args[0].new_empty(batch), args[0].new_empty(batch, steps, 2 * most + 1)
        return mapped(
            self._value(func, given, named),
            torch.Tensor,
            lambda real: args[0].new_empty_strided(real.shape, real.stride(), dtype=real.dtype),
        )

    def _device_of(self, tensor: TracedTensor) -> str:
        return self._trace.storages[tensor.storage].device

    def describe(self, tensor: torch.Tensor, *, made: bool = False) -> TracedTensor:
        """Return a tensor as operators see it; its storage is met if it was not, or is made by the next call."""
        index, offset = self._index(tensor, made=made), int(tensor.storage_offset())
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return TracedTensor(index, shape, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def _read(self, tensor: torch.Tensor) -> TracedTensor:
        if self._unknown is not None and self.find(tensor) is None:
            self._unknown(tensor, self._index(tensor, made=False))
        self._meets_real |= not isinstance(tensor, FakeTensor)
        return self.describe(tensor)

    def _index(self, tensor: torch.Tensor, *, made: bool) -> int:
        if tensor.is_nested:
            raise StepGraphError(
                f"{told(self.place)} makes a nested tensor, which has no shape that a plan could hold: use padded ones"
            )
        if tensor.layout is not torch.strided:  # a fake may have a storage all the same
            is_sparse = "sparse" in str(tensor.layout)
            instead = "use dense ones, as with Embedding(sparse=False)" if is_sparse else "leave it to the loop"
            raise StepGraphError(
                f"{told(self.place)} makes a {'sparse' if is_sparse else tensor.layout} tensor, which has no storage"
                f" that a plan could hold: {instead}"
            )
        storage = tensor.untyped_storage()
        storages, size = self._trace.storages, storage.nbytes()
        index = self.find(tensor)
        if index is None:
            index = len(storages)
            storages.append(TracedStorage(size, tensor.device.type, len(self._trace.calls) if made else -1))
            self._watch(storage, index)
        storages[index].size = max(storages[index].size, size)  # operators with out= may enlarge what they write
        return index

    def _watch(self, storage: Any, index: int) -> None:
        # What Python calls when an object dies must raise no error, because nobody would see it. A function of C raises
        # none, not even Ctrl-C.
        self._known[storage._cdata] = watched = _Watched(storage, self._died.append)
        watched.index = index

    def _note_died(self) -> None:
        while self._died:
            index = self._died.popleft().index
            self._trace.storages[index].died = len(self._trace.calls)
            self.values.died(index)
            self.sampled.died(index)


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
