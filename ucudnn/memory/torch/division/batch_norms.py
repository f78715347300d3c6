"""Batch norms in training mode as several calls, whose statistics are those of the whole mini-batch in any division.

    forward    mean and variance of each sample; of all samples, combined as by Chan et al. (1979); running statistics;
               then each sample is normalized by them
    backward   sums of grad and of grad * normalized over all samples; then the gradient of each sample's input

For slabs a row of the first spatial dimension stands for a sample, and so instance norms are split, too, which PyTorch
computes as batch norms of one sample. What is computed of all samples waits for all parts of a segment, so a norm takes
a pass of its own over the parts. Slices of gradients that are read long after the rest of them are copied here, too,
because both add calls to a step.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, final

import torch

from ucudnn.memory.step.graph import Role
from ucudnn.memory.torch.division.program_writer import ProgramWriter
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor
from ucudnn.memory.torch.tracing.assemble import writes

aten = torch.ops.aten
_FORWARD = ("native_batch_norm", "cudnn_batch_norm")
_BACKWARD = ("native_batch_norm_backward", "cudnn_batch_norm_backward")
_FAR = 4  # calls between a slice that is copied and the rest of it
_GAIN = 2  # times the bytes of the slice that the whole has at least
_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


class SplitNorms(NamedTuple):
    """The program of a step whose batch norms are several calls each.

    Attributes:
        origins: for each call that of the step as it is, and its share of that, as `ProgramWriter.origins`.
        norms: the calls of each batch norm, and of each one's backward.
        gathers: calls that combine what parts have made; they run whole.
        backward_of: for the forward of a norm, by its position in `norms`, that of its backward.
    """

    program: StepProgram
    origins: tuple[tuple[int, float], ...]
    norms: tuple[range, ...]
    gathers: frozenset[int]
    backward_of: dict[int, int]


def split_norms(program: StepProgram, *, slabs: bool = False) -> SplitNorms:
    """Return a program with its batch norms as several calls each, where these compute the same."""
    writer, positions, slices = _Writer(program, slabs), list[int](), defaultdict[int, list[Any]](list)
    for before, part, readers in _late_slices(program):
        if not any(writer.splits(program.calls[each]) for each in readers):
            slices[before + 1].append((part, readers))
    norms, saved, backward_of = list[range](), dict[int, int](), dict[int, int]()
    for index, call in enumerate(program.calls):
        for part, readers in slices[index]:
            writer.keep(index - 1, part, readers)
        begin = len(writer.calls)
        positions.append(begin)
        if not writer.splits(call):
            writer.whole(index)
            continue
        if call.func._opname in _FORWARD:
            writer.forward(index, call)
            saved[call.results[1].storage] = len(norms)
        else:
            writer.backward(index, call)
            backward_of[saved.get(call.argument("save_mean").storage, -1)] = len(norms)
        norms.append(range(begin, len(writer.calls)))
    written = writer.program([*positions, len(writer.calls)])
    return SplitNorms(written, tuple(writer.origins), tuple(norms), frozenset(writer.gathers), backward_of)


def _late_slices(program: StepProgram) -> Iterator[tuple[int, TracedTensor, list[int]]]:
    """Yield slices that are read long after the rest, each with the call behind which it is copied, and its readers.

    The gradient of a concatenation is one tensor, of which the skip of a U-Net reads its channels at the end of
    backward. With a copy of these the rest can go.
    """
    graph, calls = program.graph, program.calls
    ends = (*program.outputs, *program.grad_outputs, *program.gradients)
    others = {each.storage for each in ends if each is not None}
    others |= {each.storage for _, call in program.uncounted for each in (*call.inputs, *call.outputs)}
    for storage, readers in enumerate(graph.readers):
        if graph.storages[storage].role is not Role.ACTIVATION or storage in others or not readers:
            continue
        reads = [{each for each in calls[at].inputs if each.storage == storage} for at in readers]
        first = reads.index(reads[-1])
        late = readers[first:]
        before = max((each for each in graph.accesses[storage] if each < late[0]), default=-1)
        changed = {each.storage for at in late for each in (*writes(calls[at]), *calls[at].outputs)}
        is_far = graph.backward_begins <= before < late[0] - _FAR and late[-1] < graph.optimizer_begins
        if is_far and len(reads[-1]) == 1 and all(each == reads[-1] for each in reads[first:]):
            (part,) = reads[-1]
            is_small = 0 not in part.stride and part.bytes_touched * _GAIN <= program.sizes[storage]
            if part.is_plain and is_small and storage not in changed:
                yield before, part, [*late]


def _either(call: TracedCall, *names: str) -> Any:
    return next(filter(lambda each: each is not None, map(call.argument, names)))


@final
class _Writer(ProgramWriter):
    """Writes batch norms as several calls; `gathers` as in `SplitNorms`."""

    def __init__(self, of: StepProgram, slabs: bool) -> None:
        super().__init__(of)
        self.gathers, self._slabs = set[int](), slabs
        self._kept: dict[int, dict[TracedTensor, TracedTensor]] = defaultdict(dict)

    def splits(self, call: TracedCall) -> bool:
        """Whether a call is a batch norm over samples, or rows, that may be split.

        Its statistics must have the type in which they are added up, and results must lie as its input, because each
        step writes as it reads.
        """
        name, x, batch = call.func._opname, call.argument("input"), self.of.graph.batch
        if name not in (*_FORWARD, *_BACKWARD) or not x.is_dense:
            return False
        if (len(x.shape) < 4 or x.shape[2] < 2) if self._slabs else (batch < 2 or x.shape[0] % batch):
            return False
        if not (call.argument("training") or call.argument("train") or name == "cudnn_batch_norm_backward"):
            return False
        given = [*map(call.argument, _OF_CHANNELS), *call.results[1:3]]
        wide, result = torch.promote_types(x.dtype, torch.float32), call.results[0]
        like = result is None or (result.shape, result.stride) == (x.shape, x.stride)
        return like and all(each is None or each.dtype is wide for each in given)

    def keep(self, index: int, part: TracedTensor, readers: Iterable[int]) -> None:
        stride, step = [0] * len(part.shape), 1  # of the slice alone, with its dimensions in the same order
        for dim in sorted(range(len(part.shape)), key=lambda each: (part.stride[each], part.shape[each])):
            stride[dim] = step
            step *= part.shape[dim]
        storage = self.storage(part.storage, step * part.dtype.itemsize)
        own = replace(part, storage=storage, stride=tuple(stride), offset=0)
        self.add(index, aten.clone.default, (part,), own)
        for reader in readers:
            self._kept[reader][part] = own

    def whole(self, index: int) -> None:
        super().whole(index)
        kept = self._kept.get(index)
        if kept is None:
            return
        call, operation = self.calls[-1], self._operations[-1]
        storages = {part.storage: own.storage for part, own in kept.items()}
        self.calls[-1] = call.with_tensors(lambda tensor: kept.get(tensor, tensor))
        self._operations[-1] = replace(operation, reads=tuple(storages.get(each, each) for each in operation.reads))

    def forward(self, index: int, call: TracedCall) -> None:
        x, (y, mean, invstd, *_) = call.argument("input"), call.results
        wide, count = x, prod(x.shape) // x.shape[1]
        if x.dtype.itemsize == 2:
            wide = replace(x, storage=self.storage(x.storage, 4 * prod(x.shape)), offset=0, dtype=torch.float32)
            self.add(index, aten._to_copy.default, (x,), wide, dtype=torch.float32)
        rows, at, channels = self._rows(wide)
        inner = [dim for dim in range(len(rows.shape)) if dim not in (at, channels)]
        order = sorted((at, channels))
        variances, means = (self._like(mean, *(rows.shape[each] for each in order)) for _ in range(2))
        self.add(index, aten.var_mean.correction, (rows, inner), (variances, means), correction=0)
        between, variance, over = self._like(mean), self._like(mean), [order.index(at)]
        self.gathers |= {len(self.calls), len(self.calls) + 1}
        self.add(index, aten.var_mean.correction, (means, over), (between, mean), correction=0)
        self.add(index, aten.mean.dim, (variances, over), variance)
        self.add(index, aten.add_.Tensor, (variance, between), variance)
        momentum = _either(call, "momentum", "exponential_average_factor")
        if (running := call.argument("running_mean")) is not None:
            self.add(index, aten.lerp_.Scalar, (running, mean, momentum), running)
        if (running := call.argument("running_var")) is not None:
            unbiased = self._like(mean)
            self.add(index, aten.mul.Scalar, (variance, count / max(1, count - 1)), unbiased)
            self.add(index, aten.lerp_.Scalar, (running, unbiased, momentum), running)
        self.add(index, aten.add_.Scalar, (variance, _either(call, "eps", "epsilon")), variance)
        self.add(index, aten.rsqrt.default, (variance,), invstd)
        self._normalize(index, y, x, *map(call.argument, ("weight", "bias")), mean, variance)

    def backward(self, index: int, call: TracedCall) -> None:
        x, weight, mean = map(call.argument, ("input", "weight", "save_mean"))
        grad, invstd = _either(call, "grad_out", "grad_output"), _either(call, "save_invstd", "save_var")
        dx, count, dims = call.results[0], prod(x.shape) // x.shape[1], len(x.shape) - 2
        to_weight, to_bias = (each or self._like(mean) for each in call.results[1:])
        variance = self._like(mean)
        self.add(index, aten.pow.Tensor_Scalar, (invstd, -2.0), variance)
        # In evaluation mode backward returns both sums. Some devices read the mean of now there, others the running
        # one. The weight only tells the type of the sums.
        statistics = (invstd, mean, variance, mean, invstd, False, 0.0, [False, True, True])
        self.add(index, aten.native_batch_norm_backward.default, (grad, x, *statistics), (None, to_weight, to_bias))
        if dx is None:
            return
        scale, share, slope, shift = invstd, *(self._like(mean) for _ in range(3))
        if weight is not None:
            scale = self._like(mean)
            self.add(index, aten.mul.Tensor, (weight, invstd), scale)
        self.add(index, aten.mul.Scalar, (scale, -1.0 / count), share)
        self.add(index, aten.mul.Tensor, (share, to_weight), slope)
        self.add(index, aten.mul.Tensor, (share, to_bias), shift)
        self._normalize(index, dx, x, slope, shift, mean, variance)
        of_channels = replace(scale, shape=(*scale.shape, *[1] * dims), stride=(1, *[1] * dims))
        self.add(index, aten.addcmul_.default, (dx, grad, of_channels), dx)

    def _normalize(self, index: int, result: TracedTensor, *given: TracedTensor | None) -> None:
        """Write what normalizes an input by weight, bias, mean and variance, of which epsilon is a part."""
        self.add(index, aten.native_batch_norm.default, (*given, False, 0.0, 0.0), (result, None, None))

    def _rows(self, x: TracedTensor) -> tuple[TracedTensor, int, int]:
        """Return an input with a dimension for samples or rows, and where this and that of channels are.

        The outer one of both in memory comes first, because sums over the others lie in that order.
        """
        if not self._slabs:
            batch, rows = self.of.graph.batch, x.shape[0] // self.of.graph.batch
            shape, stride = (batch, rows, *x.shape[1:]), (rows * x.stride[0], *x.stride)
            return replace(x, shape=shape, stride=stride), 0, 2
        if x.stride[1] > x.stride[2]:
            return x, 2, 1
        shape, stride = ((each[0], each[2], each[1], *each[3:]) for each in (x.shape, x.stride))
        return replace(x, shape=shape, stride=stride), 1, 2

    def _like(self, statistic: TracedTensor, *shape: int) -> TracedTensor:
        shape = shape or statistic.shape
        storage = self.storage(statistic.storage, prod(shape) * statistic.dtype.itemsize)
        return TracedTensor(storage, shape, (shape[-1], 1)[-len(shape) :], 0, statistic.dtype)
