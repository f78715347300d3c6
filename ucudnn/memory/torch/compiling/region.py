"""FusedRegion: an operator of its own, which computes what a run of operators computes.

The calls are a graph of `torch.fx`. Run as it is, that computes what the calls compute, to the bit.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from math import prod
from operator import getitem
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ucudnn.memory.torch.compiling.fusible_calls import BATCH_NORM
from ucudnn.memory.torch.subject.traced_values import Geometry, TracedCall, TracedTensor, listed, mapped
from ucudnn.memory.torch.tracing.assemble import writes

aten = torch.ops.aten
_parsed: Any = torch._C.parse_schema


class RegionForm(NamedTuple):
    """What a region is given and returns.

    Attributes:
        arguments: a tensor for each storage that was there before, or several where no view leads to one from another.
        written: storages among the arguments that the region writes.
        results: a tensor for each storage that it makes and others read, in the order of storages.
    """

    arguments: tuple[TracedTensor, ...]
    written: frozenset[int]
    results: tuple[TracedTensor, ...]

    def numbered(self, calls: Sequence[TracedCall]) -> tuple["RegionForm", tuple[TracedCall, ...]]:
        """Return the form and the calls with storages in the order in which they appear, so that alike ones are equal.

        Where an argument begins in its storage does not count, because a region is given a tensor.
        """
        numbers: dict[int, int] = {}
        inside = (each for call in calls for each in (*call.inputs, *call.outputs))
        for tensor in (*self.arguments, *self.results, *inside):
            numbers.setdefault(tensor.storage, len(numbers))
        moved: dict[int, int] = {}
        for tensor in self.arguments:
            moved[tensor.storage] = min(tensor.offset, moved.get(tensor.storage, tensor.offset))

        def renamed(tensor: TracedTensor) -> TracedTensor:
            return replace(tensor, storage=numbers[tensor.storage], offset=tensor.offset - moved.get(tensor.storage, 0))

        form = RegionForm(
            tuple(map(renamed, self.arguments)),
            frozenset(numbers[each] for each in self.written),
            tuple(map(renamed, self.results)),
        )
        return form, tuple(call.with_tensors(renamed) for call in calls)


def region_form(calls: Sequence[TracedCall], inner: Collection[int]) -> RegionForm | None:
    """Return what a region of calls is given and returns; None where a view in it is not known.

    `inner` are storages that nobody else accesses, as are negative ones.
    """
    given: dict[int, dict[TracedTensor, None]] = {}
    made: dict[int, TracedTensor] = {}
    written = {each.storage for call in calls for each in writes(call)}
    for call in calls:
        for tensor in call.inputs:
            if tensor.storage not in made:
                given.setdefault(tensor.storage, {})[tensor] = None
            elif view_calls(made[tensor.storage], tensor) is None:
                return None
        for tensor in call.outputs:
            if tensor.storage not in given:
                made.setdefault(tensor.storage, tensor)
    arguments: list[TracedTensor] = []
    for storage, tensors in given.items():
        largest = sorted(tensors, key=lambda each: (not each.is_dense, -each.bytes_touched))
        own = largest[:1]
        own += [each for each in largest[1:] if all(view_calls(base, each) is None for base in own)]
        if len(own) > 1 and storage in written:
            return None
        arguments += own
    results = tuple(made[storage] for storage in sorted(made) if storage >= 0 and storage not in inner)
    return RegionForm(tuple(arguments), frozenset(written & given.keys()), results)


def region_graph(calls: Sequence[TracedCall], form: RegionForm, *, functional: bool = False) -> GraphModule:
    """Return the graph of a region's calls.

    In a functional one batch norms say which statistics they write, which PyTorch's compiler cannot know of the
    operators that eager PyTorch calls.
    """
    return _GraphWriter(form, functional=functional).module(calls)


@final
class _GraphWriter:
    def __init__(self, form: RegionForm, *, functional: bool) -> None:
        self._form, self._functional = form, functional
        self._graph = Graph()
        self._nodes: dict[int, dict[Geometry, Node]] = {}
        self._bases: dict[int, list[TracedTensor]] = {}
        for number, tensor in enumerate(form.arguments):
            self._know(tensor, self._graph.placeholder(f"a{number}"))

    def module(self, calls: Sequence[TracedCall]) -> GraphModule:
        for call in calls:
            self._call(call)
        self._graph.output(tuple(self._nodes[each.storage][each.geometry] for each in self._form.results))
        return GraphModule(torch.nn.Module(), self._graph)

    def _know(self, tensor: TracedTensor, node: Node) -> None:
        nodes = self._nodes.setdefault(tensor.storage, {})
        if tensor.geometry not in nodes:
            nodes[tensor.geometry] = node
            self._bases.setdefault(tensor.storage, []).append(tensor)

    def _node(self, tensor: TracedTensor) -> Node:
        """Return the node of a tensor, which is made as a view where there is none."""
        nodes = self._nodes[tensor.storage]
        if tensor.geometry not in nodes:
            for base in self._bases[tensor.storage]:
                steps = view_calls(base, tensor)
                if steps is not None:
                    node = nodes[base.geometry]
                    for function, args in steps:
                        node = self._graph.call_function(function, (node, *args))
                    nodes[tensor.geometry] = node
                    break
        return nodes[tensor.geometry]

    def _call(self, call: TracedCall) -> None:
        args, kwargs = (mapped(each, TracedTensor, self._node) for each in (call.args, dict(call.kwargs)))
        if self._functional and call.func is BATCH_NORM and call.argument("training"):
            self._batch_norm(call, args)
            return
        node = self._graph.call_function(call.func, args, kwargs)
        several = isinstance(call.results, (tuple, list))
        for number, tensor in enumerate(listed(call.results)):
            if isinstance(tensor, TracedTensor):
                self._know(tensor, self._graph.call_function(getitem, (node, number)) if several else node)

    def _batch_norm(self, call: TracedCall, args: tuple[Any, ...]) -> None:
        x, weight, bias, mean, variance = args[:5]
        momentum, epsilon = call.args[6:8]
        function: Any = aten._native_batch_norm_legit_functional.default
        given: tuple[Any, ...] = (x, weight, bias, mean, variance)
        if mean is None:
            function, given = aten._native_batch_norm_legit.no_stats, (x, weight, bias)
        node = self._graph.call_function(function, (*given, True, momentum, epsilon))
        for number, tensor in enumerate(call.results[:3]):
            if isinstance(tensor, TracedTensor):
                self._know(tensor, self._graph.call_function(getitem, (node, number)))
        for number, target in ((3, mean), (4, variance)):
            if target is not None:
                updated = self._graph.call_function(getitem, (node, number))
                self._graph.call_function(aten.copy_.default, (target, updated))


@final
class FusedRegion:
    """An operator for all regions of one kind; it stands in a `TracedCall` where those of PyTorch do.

    Attributes:
        calls: what it computes, with storages numbered as in `form`.
        form: what it is given and returns.
        function: computes it: the calls one after another, or their compiled code.
        scratch_bytes: bytes of temporaries inside, as found on a CPU.
        is_compiled: whether it runs compiled code.
        reason: why it does not, where that was tried; else ''.
        is_apart: whether its calls must be operations of their own, because they do not return what was traced.
    """

    namespace = "ucudnn"
    tags: tuple[Any, ...] = ()

    def __init__(self, key: str, calls: Sequence[TracedCall], form: RegionForm) -> None:
        self.calls, self.form = tuple(calls), form
        self._opname = f"region_{sha256(key.encode()).hexdigest()[:16]}"
        written = [f"(m{number}!)" * (each.storage in form.written) for number, each in enumerate(form.arguments)]
        given = ", ".join(f"Tensor{each} a{number}" for number, each in enumerate(written))
        returned = ", ".join(["Tensor"] * len(form.results))
        self._schema = _parsed(f"ucudnn::{self._opname}({given}) -> ({returned})")
        self._eager: Callable[..., Any] = region_graph(calls, form).forward
        self.function = self._eager
        self.scratch_bytes = 0
        self.is_compiled, self.is_apart, self.reason = False, False, ""

    def use(self, function: Callable[..., Sequence[Tensor]]) -> None:
        """Run compiled code from now on."""
        self.function, self.is_compiled, self.reason = function, True, ""

    def leave(self, reason: str) -> None:
        """Run the calls one after another from now on, because they cannot be compiled."""
        self.function, self.is_compiled, self.reason = self._eager, False, reason

    def __call__(self, *args: Tensor) -> Any:
        """Return what the region computes."""
        return self.function(*args)

    def __str__(self) -> str:
        return f"{self.namespace}.{self._opname}{'.compiled' if self.is_compiled else ''}"

    __repr__ = __str__


ViewCall = tuple[Any, tuple[Any, ...]]
"""An operator, and its arguments behind the tensor."""


def view_calls(base: TracedTensor, wanted: TracedTensor) -> list[ViewCall] | None:
    """Return the operators that lead from a tensor to another one in the same storage; None where none are known.

    A trace keeps how a tensor lies in its storage, and not which views led there. Inductor knows nothing of storages,
    and computes a tensor first where code takes `as_strided` of it.
    """
    if base.geometry == wanted.geometry:
        return []
    plain = base.is_plain and wanted.is_plain and base.dtype is wanted.dtype
    offset = wanted.offset - base.offset
    if not (plain and base.is_dense and offset >= 0) or 0 in base.shape or 0 in wanted.shape:
        return None
    sliced = _slices(base, wanted, offset)
    if sliced is None:
        return None
    order = sorted(range(len(base.shape)), key=lambda dim: (-base.stride[dim], base.shape[dim] == 1))
    found: list[ViewCall] = []
    if order != [*range(len(order))]:
        found.append((aten.permute.default, (order,)))
    shape, slices = sliced
    if shape != [base.shape[dim] for dim in order]:
        found.append((aten.view.default, (shape,)))
    for dim, (begin, count) in enumerate(slices):
        if count != shape[dim]:
            found.append((aten.slice.Tensor, (dim, begin, begin + count)))
    if len(shape) > len(_strided(wanted)):  # elements between those of the innermost dimension
        found.append((aten.squeeze.dim, (len(shape) - 1,)))
    return [*found, *_arranged(wanted)]


def _strided(tensor: TracedTensor) -> list[int]:
    """Return the dimensions by which elements are read, from the largest stride to the smallest."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride[dim]]
    return sorted(dims, key=lambda dim: -tensor.stride[dim])


def _slices(base: TracedTensor, wanted: TracedTensor, offset: int) -> tuple[list[int], list[tuple[int, int]]] | None:
    """Return a shape of all elements of a dense tensor, and begin and size of what another one shows of each dimension.

    The shape's dimensions have the other's strides. Behind them is one of the elements that it skips, if there are any.
    """
    elements = prod(base.shape)
    dims = _strided(wanted)
    strides = [wanted.stride[dim] for dim in dims]
    whole = [elements, *strides]
    if any(large % small for large, small in pairwise(whole)):
        return None
    shape = [large // small for large, small in pairwise(whole)]
    sizes = [wanted.shape[dim] for dim in dims]
    if not strides or strides[-1] > 1:
        shape.append(strides[-1] if strides else elements)
        sizes.append(1)
        strides.append(1)
    slices = []
    for stride, size, entries in zip(strides, sizes, shape, strict=True):
        begin, offset = divmod(offset, stride)
        if begin + size > entries:
            return None
        slices.append((begin, size))
    return shape, slices


def _arranged(wanted: TracedTensor) -> Iterator[ViewCall]:
    """Yield what brings strided dimensions into their order, and adds those of one entry and expanded ones."""
    dims: Sequence[int] = _strided(wanted)
    inner = sorted(dims)
    if [*dims] != inner:
        yield aten.permute.default, ([dims.index(dim) for dim in inner],)
    for dim in range(len(wanted.shape)):
        if dim not in dims:
            yield aten.unsqueeze.default, (dim,)
    if any(size > 1 and not stride for size, stride in zip(wanted.shape, wanted.stride, strict=True)):
        yield aten.expand.default, (list(wanted.shape),)
