"""A step's forward and backward as nodes of autograd.

As a rule they are one node, which returns all gradients when backward has ended. For DistributedDataParallel each part
of backward has a node. The node of the first part is that of forward, too. Autograd passes it the gradients of the
outputs. It passes a tensor without bytes to the node of the second part, and so on:

    outputs -> part 1 -> part 2 -> part 3
                 |         |         |
               grads     grads     grads

Autograd runs the node that was made last first, except that it accumulates gradients before all else. So what hangs on
`grads` of a part, DistributedDataParallel's hooks among it, runs before the next part.

DistributedDataParallel makes its buckets in the order of its first step. In that step there is one part. Between it and
`grads` each parameter has a node that does nothing, made after those of parameters whose gradients come later. Without
these nodes autograd would accumulate the gradients of one part in an order of its own.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ucudnn.errors import FittedStepError, LayoutError
from ucudnn.memory.torch.running.planned_run import PlannedRun
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.torch.device.compilation import never_compiled

_Gradients = tuple[Tensor | None, ...]
Used = frozenset[tuple[int, tuple[int, ...] | None]]
"""As in `StepSubject`."""
Again = Callable[[Used, LayoutError | None], tuple[PlannedRun, list[Any], int]]
"""Plans a step anew, for outputs that get gradients or after an error, and returns what its forward has left."""

_alias = torch.ops.aten.alias.default
_version = attrgetter("_version")


def replayed(
    run: PlannedRun,
    inputs: tuple[Tensor, ...],
    sources: Sequence[Tensor],
    parts: Sequence[Sequence[int]] | None,
    again: Again | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs of a plan's forward, which autograd knows.

    `sources` are the tensors that need gradients, in the program's order. `parts` are the sources whose gradients each
    part of backward hands over: the code's parts, or one part, whose gradients are accumulated in its order. None hands
    over all when it has ended, in any order. `again` runs forward under a plan that is right where backward finds out
    that this one is not; None raises the error.
    """
    if parts is None:
        turn = _Turn((tuple(range(len(sources))),), again)
        return _Replay.apply(run, turn, inputs, None, *sources)  # type: ignore[no-any-return]
    turn, token = _Turn(parts, again), None
    for number in range(len(parts) - 1, 0, -1):
        token = _Following.apply(run, turn, number, inputs, token, *(sources[source] for source in parts[number]))
    own = [sources[source] for source in parts[0]]
    if len(parts) == 1:
        own = [*reversed([_alias(source) for source in reversed(own)])]  # the first to come is made last
    return _Replay.apply(run, turn, inputs, token, *own)  # type: ignore[no-any-return]


@final
class PlanInTheModelsPlace(nn.Module):
    """Stands in a DistributedDataParallel in the place of the model for a call, and runs the plan.

    It has the model's parameters and buffers, because other processes' buffers are looked up in it.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the plan returns."""
        return self._run(*args, **kwargs)


@final
class _Turn:
    """What forward left for backward, and where backward is: shared by its nodes, of which each has some sources.

    If backward never ends, copies must end before their memory is reused. A later forward has waited for these copies
    before its own, and has the place on the host that they went to.
    """

    def __init__(self, parts: Sequence[Sequence[int]], again: Again | None) -> None:
        self._parts, self._again = parts, again
        self.run: PlannedRun
        self._persistent: tuple[Tensor, ...] = ()
        self._state: list[Any] = []
        self._number = self._next = 0
        self._taken = False  # the state may be empty where all that backward needs is on the host
        self._ended = True  # until forward has begun
        self._used: dict[int, Tensor] = {}
        self._part: Callable[[], _Gradients] | None = None
        self._left: list[tuple[int, ...]] = []
        self._found: dict[int, Tensor | None] = {}

    @never_compiled
    def __del__(self) -> None:
        if not self._ended and self.run.copying and self._number == self.run.forwards:
            self.run.transfers.abandon()

    def forward(self, run: PlannedRun, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        persistent = run.persistent
        outputs, self._state, self._number = run.forward(inputs)
        self.run, self._persistent, self._ended = run, persistent, False
        return outputs

    def begin(self, grad_outputs: Sequence[Tensor | None]) -> None:
        if self._taken:
            raise FittedStepError("backward of a fitted step runs once: it frees activations on its way")
        self._taken = True
        program = self.run.program
        given = ((index, grad_outputs[index]) for index in program.differentiable)
        self._used = {index: tensor for index, tensor in given if tensor is not None}
        pairs = zip(program.used, program.grad_outputs, strict=True)
        lie_so = all(_lies_so(self._used.get(each), grad_output) for each, grad_output in pairs)
        if lie_so and len(self._used) == len(program.used):
            self._start()
        else:
            self._run_again(None)

    def _start(self) -> None:
        run, program = self.run, self.run.program
        given = []
        for index, traced in zip(program.used, program.grad_outputs, strict=True):
            each = self._used[index]
            lies = each.stride(), each.storage_offset(), each.dtype, each.is_conj(), each.is_neg()
            lies_so = lies == (traced.stride, 0, traced.dtype, False, False)
            given.append(each if lies_so else traced.empty(each.device).copy_(each))
        self._part = run.backward(self._number, self._state, given, self._persistent)
        self._left = [*run.code.parts]

    def _run_again(self, error: LayoutError | None) -> None:
        self._state.clear()
        if self._again is None:
            raise error or FittedStepError(
                f"backward has gradients of the outputs {[*self._used]}, and the step was planned for those of"
                f" {[*self.run.program.used]}: fit the step again"
            )
        used = frozenset((index, _own_stride(each)) for index, each in self._used.items())
        self.run, self._state, self._number = self._again(used, error)
        self._persistent = self.run.persistent
        self._start()

    def gradients(self) -> _Gradients:
        wanted = self._parts[self._next]
        self._next += 1
        ends = self._next == len(self._parts)
        while self._left and (ends or not self._found.keys() >= {*wanted}):
            assert self._part is not None
            try:
                gradients = self._part()
            except LayoutError as error:
                self._run_again(error)
                continue
            self._found.update(zip(self._left.pop(0), gradients, strict=True))
        if ends:
            self._ended, self._part, self._again, self._used = True, None, None, {}
        return tuple(self._found.pop(source) for source in wanted)


def _own_stride(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a gradient that is no number for many elements."""
    return tuple(tensor.stride()) if tensor.numel() and 0 not in tensor.stride() else None


def _lies_so(tensor: Tensor | None, traced: TracedTensor) -> bool:
    """Whether an output gets a gradient, in the strides of the trace; expanded ones are copied into these."""
    if tensor is None or (own := _own_stride(tensor)) is None:
        return tensor is not None
    return all(size == 1 or a == b for size, a, b in zip(traced.shape, own, traced.stride, strict=True))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: PlannedRun, turn: _Turn, inputs: tuple[Tensor, ...], token: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the code of forward; `sources` are the tensors that need gradients, which autograd must see."""
        persistent = run.persistent
        outputs = turn.forward(run, inputs)
        ctx.turn, ctx.token = turn, token is not None
        ctx.set_materialize_grads(False)
        differentiable = {*run.program.differentiable}
        ctx.mark_non_differentiable(*(each for index, each in enumerate(outputs) if index not in differentiable))
        _guard(ctx, run.guarded[0], persistent, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_order(grad_outputs)
        _check(ctx)
        ctx.turn.begin(grad_outputs)
        return None, None, None, _token(ctx.turn.run) if ctx.token else None, *ctx.turn.gradients()


class _Following(torch.autograd.Function):
    """A part of backward behind the first. Its forward comes before that of the step, and only makes the node."""

    @staticmethod
    def forward(
        ctx: Any,
        run: PlannedRun,
        turn: _Turn,
        number: int,
        inputs: tuple[Tensor, ...],
        token: Tensor | None,
        *sources: Tensor,
    ) -> Tensor:
        """Return a tensor without bytes, whose gradient is the sign that this part may run."""
        ctx.turn, ctx.token = turn, token is not None
        ctx.set_materialize_grads(False)
        _guard(ctx, run.guarded[number], run.persistent, inputs, ())
        return _token(run)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        _check(ctx)
        return None, None, None, None, _token(ctx.turn.run) if ctx.token else None, *ctx.turn.gradients()


def _check_order(grad_outputs: Sequence[Tensor | None]) -> None:
    """Check that backward is asked for gradients of first order, one for each source.

    Autograd would take gradients without a graph for constants, and leave out what comes through them. It runs backward
    with gradients enabled where it shall make a graph, and only there. Forward's tensors stay after an error, so that
    backward can still run.
    """
    if torch.is_grad_enabled():
        raise FittedStepError(
            "backward of a fitted step runs with gradients enabled, as by create_graph=True, which gradient penalties,"
            " torch.autograd.functional.hessian, hvp and jvp use, and its plan makes no graph of gradients: call"
            " torch.autograd.grad(..., create_graph=True) within the step, in the model's forward or in the loss that"
            " fit is given, or call step.model instead of the step where such gradients are needed"
        )
    functions, given = torch._C._functorch, [each for each in grad_outputs if each is not None]
    if any(functions.is_functorch_wrapped_tensor(each) or functions.is_legacy_batchedtensor(each) for each in given):
        raise FittedStepError(
            "backward of a fitted step takes one gradient of each output, and not those of is_grads_batched=True,"
            " vectorize=True or torch.func: call step.model instead of the step"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in given):
        raise FittedStepError(
            "a fitted step has no derivatives forward, which a gradient of its outputs has"
            " (torch.autograd.forward_ad): call step.model instead of the step"
        )


def _guard(ctx: Any, guarded: Sequence[Sequence[int]], *groups: Sequence[Tensor]) -> None:
    """Let autograd check before a part of backward that nobody has changed tensors that it reads.

    The groups are persistent tensors, inputs and outputs, and none of the last where there are none yet; `guarded` has
    for each group the indices of tensors that the part reads.
    """
    persistent, inputs, outputs = (
        [group[index] for index in own] if group else [] for own, group in zip(guarded, groups, strict=True)
    )
    ctx.save_for_backward(*persistent, *inputs, *outputs)
    ctx.guarded = [*persistent, *inputs]
    ctx.versions = [*map(_version, ctx.guarded)]


def _check(ctx: Any) -> None:
    """Check that nobody has changed what a part of backward reads, nor modes of PyTorch's.

    Autograd checks what it has saved. It does not where hooks of saved tensors keep copies, and the code reads the
    tensors themselves.
    """
    ctx.turn.run.program.modes.check_backward()
    _ = ctx.saved_tensors
    guarded, versions = ctx.guarded, ctx.versions
    ctx.guarded, ctx.versions = [], []  # a loss that is kept after backward keeps none of them
    if [*map(_version, guarded)] != versions:
        raise FittedStepError(
            "a tensor that backward of the fitted step reads has been modified by an inplace operation since forward:"
            " hooks of saved tensors cannot help, because the plan reads the tensor itself; change it after backward"
        )


def _token(run: PlannedRun) -> Tensor:
    """Return a tensor without bytes; it lies on the step's device, because autograd chooses a node's thread by it."""
    return torch.empty(0, dtype=torch.float32, device=run.program.device)
