"""cuDNN's graph API: engine configurations of one convolution, their workspaces, notes and plans.

An engine with values of its knobs is an algorithm. Its name, such as 'eng67_k2=19_k13=0', has the engine's global
index, then types and values of knobs, in order of types.

The C backend API offers it, where alpha and beta are attributes of the operation (cudnnBackendExecute). Where a problem
adds a bias, the graph has a second operation. Its engines compute both in one kernel, and write the output once.
"""

import logging
import re
from collections import deque
from collections.abc import Iterator
from typing import final

from ucudnn.backends.base import Scaling
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor, Given, GraphParts
from ucudnn.backends.cudnn.api.enums import (
    CROSS_CORRELATION,
    DATA_TYPES,
    POINTWISE_ADD,
    RUNTIME_COMPILATION,
    Attribute,
    DescriptorType,
    HeuristicMode,
    NumericalNote,
    Type,
)
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.api.tensor_shapes import Dimensions, TensorShapes, shapes_of
from ucudnn.errors import CudnnError, UnsupportedProblemError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm

# Two faults of cuDNN 9.19, seen on an H200 whatever the types, strides and mini-batch sizes were. Both concern padding
# that differs before and after x, as it does for slabs at the ends of a volume.
_ONE_PADDING = "eng50"
"""Computes gradients of the input as if x were padded after its end as before its begin; with knobs it does not."""


def ends_process(mode: HeuristicMode, problem: ConvolutionProblem) -> bool:
    """Return whether asking a heuristic about a problem ends the process (SIGSEGV).

    For a gradient of the filters, mode B takes the padding before x for the padding after it too, and fails if x is
    then smaller than the filter.
    """
    return (
        mode is HeuristicMode.B
        and problem.operation is Operation.BACKWARD_FILTER
        and any(
            size + 2 * before < (taps - 1) * dilation + 1
            for size, before, taps, dilation in zip(
                problem.spatial, problem.padding, problem.kernel, problem.dilation, strict=True
            )
        )
    )


def computes_wrong(name: str, problem: ConvolutionProblem) -> bool:
    """Return whether an engine configuration computes something else than the problem, or writes only a part of it."""
    return name == _ONE_PADDING and problem.operation is Operation.BACKWARD_DATA and bool(problem.post_padding)


X, W, Y, BIAS = 1, 2, 3, 4
"""Unique ids of the tensors in operation graphs and variant packs."""

_SUM_BEFORE_BIAS = 5
"""Unique id of a tensor that has no memory."""

WORKSPACE_UNIT = 256
"""Workspaces are stated in multiples of this many bytes, so that the segments of an arena are aligned to them. Some
engines of cuDNN 9.19 leave NaN in the output if their workspace is aligned to 16 bytes only."""

_LOG = logging.getLogger(__name__)
_KNOB = re.compile(r"_k\d+=-?\d+")
_NAME = re.compile(rf"eng(\d+)((?:{_KNOB.pattern})*)")
_MOST_NOTES = 32
_MOST_KNOBS = 44  # CUDNN_KNOB_TYPE_COUNTS


def allowed(engine: Algorithm, problem: ConvolutionProblem) -> bool:
    """Return whether an engine computes a problem within its math mode and determinism, in a workspace that is known.

    Tensor cores multiply float32 as TF32. Parts of a sum may be rounded to 16 bits if the sum has 16 bits, as in
    cuDNN's legacy API and in PyTorch. The error of such a result is checked at every size that is measured.
    """
    notes = {NumericalNote[name] for name in engine.notes}
    reduced = NumericalNote.REDUCED_PRECISION_REDUCTION in notes and not problem.w_dtype.has_16_bits
    if reduced or engine.workspace_bytes < 0 or computes_wrong(engine.name, problem):
        return False
    if problem.deterministic and NumericalNote.NONDETERMINISTIC in notes:
        return False
    if problem.dtype is DataType.FLOAT32 and problem.math is MathMode.FMA:
        return not notes & {NumericalNote.TENSOR_CORE, NumericalNote.DOWN_CONVERT_INPUTS}
    return True


@final
class OperationGraph:
    """A graph of one operation, the convolution, or of two: the convolution and the addition of a bias.

    Raises:
        UnsupportedProblemError: if a bias is to be added to what the output holds, too.
    """

    def __init__(
        self,
        library: Library,
        handle: int,
        problem: ConvolutionProblem,
        scaling: Scaling,
        parts: GraphParts | None = None,
    ) -> None:
        self._library = library
        self._handle = handle
        self.problem = problem
        self._parts = parts or GraphParts(library)
        self._graph = self._describe(scaling)
        self._knobs: list[BackendDescriptor] = []
        self._offered: list[BackendDescriptor] | None = None
        self._unread: deque[BackendDescriptor] | None = None
        self._leading: dict[str, Algorithm] = {}
        self._algorithms: list[Algorithm] | None = None
        self._known: dict[str, BackendDescriptor] = {}
        self._engines: dict[int, BackendDescriptor] = {}
        self._facts: dict[int, tuple[tuple[str, ...], bool]] = {}

    def ask(self) -> None:
        """Ask the heuristics in modes A, B and FALLBACK; nearly all of the time is spent in cuDNN, not in Python."""
        self._offered = [
            configuration
            for mode in HeuristicMode
            if not ends_process(mode, self.problem)
            for configuration in self._heuristics(mode)
        ]

    def leading(self, most: int) -> list[Algorithm]:
        """Return the first configurations, at most some, that mode A offers and `algorithms` lists first.

        Mode A is asked once, and each configuration that it offers is read once. The first plan of a configuration is
        built from the descriptor that was offered.
        """
        if self._unread is None:
            self._unread = deque(self._heuristics(HeuristicMode.A))
        while self._unread and len(self._leading) < most:
            configuration = self._unread.popleft()
            each = self._described(configuration)
            if each is not None and each.name not in self._leading and allowed(each, self.problem):
                self._leading[each.name] = each
                self._known.setdefault(each.name, configuration)
        return list(self._leading.values())[:most]

    def algorithms(self) -> list[Algorithm]:
        """Return the offered configurations that compute the problem within its math mode and determinism."""
        if self._algorithms is None:
            if self._offered is None:
                self.ask()
            described = map(self._described, self._offered or ())
            found = {each.name: each for each in described if each is not None}  # each of them once
            self._offered = None
            self._algorithms = [each for each in found.values() if allowed(each, self.problem)]
        return self._algorithms

    def _described(self, offered: BackendDescriptor) -> Algorithm | None:
        """Return what an offered configuration is; None if that cannot be read."""
        # cuDNN does not tell the number of knob choices, unlike that of other attributes, before they are read.
        self._knobs = self._knobs or [self._new(DescriptorType.KNOB_CHOICE) for _ in range(_MOST_KNOBS)]
        try:
            return self._read(offered)
        except CudnnError as error:
            _LOG.debug("an engine configuration of %s cannot be read: %s", self.problem, error)
            return None

    def named(self, name: str) -> Algorithm:
        """Return a configuration by its name, whether or not heuristics offer it for this problem."""
        if name not in self._known:
            self._known[name] = self._make_configuration(name)
        return _algorithm(name, self._known[name], *self._facts[_parse(name)[0]])

    def plan(self, name: str) -> BackendDescriptor:
        """Build the execution plan of a configuration."""
        # A descriptor serves one plan, because cuDNN 9.19 builds no second one from it if the engine is compiled.
        configuration = self._known.pop(name, None) or self._make_configuration(name)
        plan = self._new(DescriptorType.EXECUTION_PLAN).set(Attribute.EXECUTION_PLAN_HANDLE, Type.HANDLE, self._handle)
        plan.set(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, Type.DESCRIPTOR, configuration).finalize()
        configuration.forget_parts()  # plans of cudnn-frontend keep the configuration, but no engine and no graph
        return plan

    def _make_configuration(self, name: str) -> BackendDescriptor:
        index, knobs = _parse(name)
        choices = [
            self._parts.part(
                DescriptorType.KNOB_CHOICE,
                (Attribute.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE, kind),
                (Attribute.KNOB_CHOICE_KNOB_VALUE, Type.INT64, value),
            )
            for kind, value in knobs
        ]
        configuration = self._new(DescriptorType.ENGINECFG)
        configuration.set(Attribute.ENGINECFG_ENGINE, Type.DESCRIPTOR, self._engine(index))
        if choices:
            configuration.set(Attribute.ENGINECFG_KNOB_CHOICES, Type.DESCRIPTOR, choices)
        return configuration.finalize()

    def _engine(self, index: int) -> BackendDescriptor:
        """Return an engine; configurations share it unless it is compiled."""
        engine = self._engines.get(index)
        if engine is None:
            engine = self._new(DescriptorType.ENGINE).set(
                Attribute.ENGINE_OPERATION_GRAPH, Type.DESCRIPTOR, self._graph
            )
            engine.set(Attribute.ENGINE_GLOBAL_INDEX, Type.INT64, index).finalize()
            _, compiles = self._facts_of(index, engine)
            if not compiles:
                self._engines[index] = engine
        return engine

    def _new(self, kind: DescriptorType) -> BackendDescriptor:
        return BackendDescriptor(self._library, kind)

    def _describe(self, scaling: Scaling) -> BackendDescriptor:
        problem = self.problem
        shapes = shapes_of(problem)
        convolution = self._parts.part(
            DescriptorType.CONVOLUTION,
            (Attribute.CONVOLUTION_COMP_TYPE, Type.DATA_TYPE, DATA_TYPES[_sum_type(problem)]),
            (Attribute.CONVOLUTION_CONV_MODE, Type.CONVOLUTION_MODE, CROSS_CORRELATION),
            (Attribute.CONVOLUTION_SPATIAL_DIMS, Type.INT64, len(shapes.padding)),
            (Attribute.CONVOLUTION_PRE_PADDINGS, Type.INT64, shapes.padding),
            (Attribute.CONVOLUTION_POST_PADDINGS, Type.INT64, shapes.post_padding),
            (Attribute.CONVOLUTION_FILTER_STRIDES, Type.INT64, shapes.stride),
            (Attribute.CONVOLUTION_DILATIONS, Type.INT64, shapes.dilation),
        )
        x = self._tensor(X, shapes.x)
        w = self._tensor(W, shapes.w, sums=problem.float32_sum)
        y = self._tensor(Y, shapes.y)
        written = y
        if problem.biased:  # the output of the convolution has no memory, because the addition reads it at once
            if scaling.beta:
                raise UnsupportedProblemError(f"a graph with a bias does not add to what the output holds: {problem}")
            written = self._tensor(_SUM_BEFORE_BIAS, shapes.y, sums=True, virtual=True)
        # The numbers of an operation's six attributes follow each other: alpha, beta, convolution, w, x, y.
        kind, first = {
            Operation.FORWARD: (DescriptorType.FORWARD, Attribute.FORWARD_ALPHA),
            Operation.BACKWARD_DATA: (DescriptorType.BACKWARD_DATA, Attribute.BACKWARD_DATA_ALPHA),
            Operation.BACKWARD_FILTER: (DescriptorType.BACKWARD_FILTER, Attribute.BACKWARD_FILTER_ALPHA),
        }[problem.operation]
        scalar = Type.DOUBLE if problem.dtype is DataType.FLOAT64 else Type.FLOAT
        operation = self._new(kind).set(first, scalar, scaling.alpha).set(first + 1, scalar, scaling.beta)
        for offset, part in enumerate((convolution, w, x, written), start=2):
            operation.set(first + offset, Type.DESCRIPTOR, part)
        operations = [operation.finalize()]
        if problem.biased:
            operations.append(self._addition(shapes, written, y))
        graph = self._new(DescriptorType.OPERATIONGRAPH)
        graph.set(Attribute.OPERATIONGRAPH_OPS, Type.DESCRIPTOR, operations)
        return graph.set(Attribute.OPERATIONGRAPH_HANDLE, Type.HANDLE, self._handle).finalize()

    def _addition(self, shapes: TensorShapes, total: BackendDescriptor, y: BackendDescriptor) -> BackendDescriptor:
        what = self._parts.part(
            DescriptorType.POINTWISE,
            (Attribute.POINTWISE_MODE, Type.POINTWISE_MODE, POINTWISE_ADD),
            (Attribute.POINTWISE_MATH_PREC, Type.DATA_TYPE, DATA_TYPES[_sum_type(self.problem)]),
        )
        bias = self._tensor(BIAS, shapes.bias)
        return (
            self._new(DescriptorType.OPERATION_POINTWISE)
            .set(Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR, Type.DESCRIPTOR, what)
            .set(Attribute.OPERATION_POINTWISE_XDESC, Type.DESCRIPTOR, total)
            .set(Attribute.OPERATION_POINTWISE_BDESC, Type.DESCRIPTOR, bias)
            .set(Attribute.OPERATION_POINTWISE_YDESC, Type.DESCRIPTOR, y)
            .finalize()
        )

    def _tensor(
        self,
        identity: int,
        dimensions: Dimensions,
        *,
        sums: bool = False,
        virtual: bool = False,
    ) -> BackendDescriptor:
        dtype = _sum_type(self.problem) if sums else self.problem.dtype
        sizes, strides = dimensions
        given: tuple[Given, ...] = (
            (Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE, DATA_TYPES[dtype]),
            (Attribute.TENSOR_DIMENSIONS, Type.INT64, sizes),
            (Attribute.TENSOR_STRIDES, Type.INT64, strides),
            (Attribute.TENSOR_UNIQUE_ID, Type.INT64, identity),
            (Attribute.TENSOR_BYTE_ALIGNMENT, Type.INT64, MOST_ALIGNMENT if sums else self.problem.alignment),
        )
        if virtual:  # without memory, because another operation of the graph reads it at once
            given += ((Attribute.TENSOR_IS_VIRTUAL, Type.BOOLEAN, True),)
        return self._parts.part(DescriptorType.TENSOR, *given)

    def _heuristics(self, mode: HeuristicMode) -> Iterator[BackendDescriptor]:
        try:
            heuristics = (
                self._new(DescriptorType.ENGINEHEUR)
                .set(Attribute.ENGINEHEUR_OPERATION_GRAPH, Type.DESCRIPTOR, self._graph)
                .set(Attribute.ENGINEHEUR_MODE, Type.HEUR_MODE, mode)
                .finalize()
            )
            count = heuristics.count(Attribute.ENGINEHEUR_RESULTS)
            yield from heuristics.receive(
                Attribute.ENGINEHEUR_RESULTS, [self._new(DescriptorType.ENGINECFG) for _ in range(count)]
            )
        except CudnnError as error:
            # Mode B fails for 3-D, grouped and dilated convolutions, for example.
            _LOG.debug("heuristic mode %s has nothing for %s: %s", mode.name, self.problem, error)

    def _read(self, configuration: BackendDescriptor) -> Algorithm:
        (engine,) = configuration.receive(Attribute.ENGINECFG_ENGINE, [self._new(DescriptorType.ENGINE)])
        index = engine.number(Attribute.ENGINE_GLOBAL_INDEX, Type.INT64)
        knobs = sorted(
            (
                choice.number(Attribute.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE),
                choice.number(Attribute.KNOB_CHOICE_KNOB_VALUE, Type.INT64),
            )
            for choice in configuration.receive(Attribute.ENGINECFG_KNOB_CHOICES, self._knobs)
        )
        name = f"eng{index}" + "".join(f"_k{kind}={value}" for kind, value in knobs)
        return _algorithm(name, configuration, *self._facts_of(index, engine))

    def _facts_of(self, index: int, engine: BackendDescriptor) -> tuple[tuple[str, ...], bool]:
        """Return an engine's numerical notes and whether it is compiled; both are the same for all values of knobs."""
        if index not in self._facts:
            notes = engine.numbers(Attribute.ENGINE_NUMERICAL_NOTE, Type.NUMERICAL_NOTE, _MOST_NOTES)
            behavior = engine.numbers(Attribute.ENGINE_BEHAVIOR_NOTE, Type.BEHAVIOR_NOTE, _MOST_NOTES)
            known = tuple(note.name for note in NumericalNote if note in notes)
            self._facts[index] = known, RUNTIME_COMPILATION in behavior
        return self._facts[index]


def _algorithm(name: str, configuration: BackendDescriptor, notes: tuple[str, ...], compiles: bool) -> Algorithm:
    size = configuration.number(Attribute.ENGINECFG_WORKSPACE_SIZE, Type.INT64)  # below 0 if cuDNN does not know it
    workspace_bytes = round_up(size) if size > 0 else size
    return Algorithm(name=name, workspace_bytes=workspace_bytes, api="graph", notes=notes, compiles=compiles)


def _sum_type(problem: ConvolutionProblem) -> DataType:
    return DataType.FLOAT64 if problem.dtype is DataType.FLOAT64 else DataType.FLOAT32


def _parse(name: str) -> tuple[int, list[tuple[int, int]]]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UnsupportedProblemError(f"{name} is not an engine configuration: their names are like eng67_k2=19_k13=0")
    knobs = (knob.partition("=") for knob in match[2].split("_k")[1:])
    return int(match[1]), [(int(kind), int(value)) for kind, _, value in knobs]


def is_engine(name: str) -> bool:
    """Return whether this is the name of an engine configuration."""
    return _NAME.fullmatch(name) is not None


def without_knobs(name: str) -> str:
    """Return the name of an algorithm without the values of its engine's knobs."""
    return _KNOB.sub("", name)


def round_up(size_bytes: int) -> int:
    """Return a workspace rounded up to a multiple of WORKSPACE_UNIT, as algorithms state it."""
    return -(-size_bytes // WORKSPACE_UNIT) * WORKSPACE_UNIT
