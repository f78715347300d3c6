"""What a tuner makes of PyTorch's calls: it watches them, tries candidates on them, or replaces them."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch

from ucudnn.bounded import BoundedDict
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.calls.aten_kernels import Gradients
from ucudnn.torch.calls.call_cache import (
    Flags,
    asked_convolution,
    asked_gradients,
    backward_strides,
    bias_form,
    biased_problem,
    missing_format,
)
from ucudnn.torch.calls.problem import Geometry, OutputForm
from ucudnn.torch.device.gpu import Sizes, alias
from ucudnn.torch.device.timed_device import FreeBlocks
from ucudnn.torch.gate.call_gate import GateOutput, GateRule, signature_of
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.tuning.candidate_check import CandidateCheck, Operands, computed
from ucudnn.torch.tuning.tuner import Tuner

_MOST_CALLS = 1 << 14
_WGRAD, _DGRAD = 1, 0  # places in PyTorch's mask of gradients
_ONLY = {_DGRAD: [True, False, False], _WGRAD: [False, True, False]}
_MOST_SEEN = 256  # calls of one signature in a step, which is long if the program evaluates before the next one


Shapes = tuple[Any, Any]
"""Of x and the weight."""


@final
class _Output(NamedTuple):
    """One output of a call, computed by one kernel: what is known about that, and what makes tensors for it."""

    site: CallSite
    form: OutputForm


@final
@dataclass(eq=False)
class TunedCall:
    """What becomes of calls with one signature.

    Attributes:
        outputs: by their place in PyTorch's mask of gradients; the output of a forward call has place 0.
        reason: why PyTorch computes them for good; '' if it need not.
        path: what they do in this step; None if they are passed on.
        bypass: one number for the gate, which is 0 while they are passed on.
        copied: the memory format in which tensors are copied first, because one has another one; None if none has.
        shapes: shapes of x and the weight.
    """

    tuner: Tuner
    outputs: dict[int, _Output]
    reason: str = ""
    transposed: bool = False
    bias_as: tuple[Sizes, Sizes] = ((), ())
    copied: torch.memory_format | None = None
    shapes: Shapes = ((), ())
    path: "_Path | None" = None
    bypass: "array[int]" = field(default_factory=lambda: array("q", [0]))
    _free: dict[tuple[int, int], tuple[int, FreeBlocks]] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Decide what the calls do in the step that begins."""
        tuner, problems = self.tuner, [each.site.problem for each in self.outputs.values()]
        replaced = tuner.replaced
        watches = tuner.phase is TuningPhase.WATCHING and bool(problems)
        acts = watches or any(each in tuner.trials or each in replaced for each in problems)
        self.path = _Path(self, watches=watches) if acts else None
        self.bypass[0] = acts

    def rule(self, signature: Sequence[int]) -> GateRule | None:
        """Return what the gate does with calls of a signature; None if they are passed on."""
        outputs, fuses = {}, False
        for at, each in self.outputs.items():
            kernel = self.tuner.replaced.get(each.site.problem)
            if kernel is not None:
                outputs[at] = GateOutput(kernel.run_at, each.form.sizes, each.form.strides, kernel.direct())
                fuses |= kernel.fuses
        return GateRule(signature, outputs, self.bias_as, fuses) if outputs else None

    def has_free_blocks(self, at: int, position: int, sizes: Sequence[int]) -> bool:
        """Return whether new tensors of some bytes take no new memory from the device at one of a step's calls.

        A step allocates as the step before, so the free blocks at a call are looked up once.
        """
        epoch, free = self._free.get((at, position), (-1, None))
        if free is None or epoch != self.tuner.epoch:
            free = self.tuner.program.free_blocks()
            self._free[at, position] = self.tuner.epoch, free
        return free.hold(sizes)


@final
class CallTable:
    """What becomes of the calls of one operator.

    Attributes:
        calls: what becomes of calls, by all that it depends on.
        busy: shapes of x and the weight of calls that do not pass on in this step; None while all calls are looked at.
    """

    def __init__(self) -> None:
        self.calls: BoundedDict[tuple[Any, ...], TunedCall] = BoundedDict(_MOST_CALLS)
        self.busy: set[Shapes] | None = None

    def __iter__(self) -> Iterator[TunedCall]:
        return iter(list(self.calls.values()))  # another thread may add to it meanwhile

    @property
    def replaces(self) -> bool:
        """Whether some calls do not pass on in this step."""
        return any(each.path is not None for each in self)

    def begin_step(self) -> None:
        """Decide what the calls do in the step that begins."""
        for each in self:
            each.begin_step()

    def rules(self) -> list[GateRule]:
        """Return the rules for those calls of which a part is replaced by adopted kernels."""
        rules = (call.rule(signature_of(key)) for key, call in list(self.calls.items()) if call.path is not None)
        return [rule for rule in rules if rule is not None]

    def look_at(self, *others: Shapes) -> None:
        """Look at calls of the shapes that do not pass on, and of some other shapes, and at no other calls."""
        self.busy = {each.shapes for each in self if each.path is not None}.union(others)


@final
class _Path:
    """What the calls of one signature do in one step."""

    def __init__(self, call: TunedCall, *, watches: bool) -> None:
        self._call = call
        self._outputs, self._transposed, self._bias_as = call.outputs, call.transposed, call.bias_as
        self._seen = dict.fromkeys(call.outputs, 0)
        # Memory is taken in the order of PyTorch, or of heuristic plans.
        self._order = (_DGRAD, _WGRAD) if call.tuner.owner is None else (_WGRAD, _DGRAD)
        self._watches = watches
        tuner, problems = call.tuner, {at: each.site.problem for at, each in call.outputs.items()}
        self._trials = {at: tuner.trials[each] for at, each in problems.items() if each in tuner.trials}
        self._kernels = {at: tuner.replaced[each] for at, each in problems.items() if each in tuner.replaced}
        self._ours = frozenset(call.outputs if watches else {*self._trials, *self._kernels})

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, baseline: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the output of a forward call, which `baseline` would compute."""
        kernel = self._kernels.get(0)
        if kernel is not None:  # written out, because each call of another function takes time
            out = self._outputs[0].form.new()
            done = kernel.run(out, weight, x) if self._transposed else kernel.run(x, weight, out, bias)
            if not done:
                del out  # PyTorch allocates its own
                return baseline()
            return out if bias is None or kernel.fuses else out.add_(alias(bias, *self._bias_as))
        tried = self._trials[0].kernel if 0 in self._trials else None
        added = bias is None or (tried is not None and tried.fuses)

        def operands(out: torch.Tensor) -> Operands:
            return (out, weight, x, None) if self._transposed else (x, weight, out, bias)

        def finished(out: torch.Tensor) -> torch.Tensor:
            return out if bias is None or added else out.add_(alias(bias, *self._bias_as))

        return self._observed(0, operands, baseline, finished)

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mask: list[bool],
        baseline: Callable[[list[bool]], Gradients],
    ) -> Gradients:
        """Return the gradients of a backward call, which `baseline` would compute for a mask."""

        def operands(at: int, out: torch.Tensor) -> Operands:
            x_like, w_like, y_like = (out if at == _DGRAD else x), (out if at == _WGRAD else weight), grad
            return (y_like, w_like, x_like, None) if self._transposed else (x_like, w_like, y_like, None)

        found: list[torch.Tensor | None] = [None, None, None]
        left, (first, second) = list(mask), self._order
        for at in self._order:
            if left[at] and at in self._ours:
                kernel = self._kernels.get(at)
                if kernel is not None:
                    found[at] = computed(kernel, self._outputs[at].form, partial(operands, at))
                else:
                    found[at] = self._observed(at, partial(operands, at), partial(_one, baseline, at), lambda out: out)
                left[at] = found[at] is None
            if at == first and left[first] and left[second] and second in self._ours:
                # Now, because after the other gradient that would be live while this kernel has its workspace.
                _add(found, left, baseline([wanted and place != second for place, wanted in enumerate(left)]))
        if any(left):
            _add(found, left, baseline(left))
        return found[0], found[1], found[2]

    def _observed(
        self,
        at: int,
        operands: Callable[[torch.Tensor], Operands],
        baseline: Callable[[], torch.Tensor],
        finished: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return one output, and time what computes it: PyTorch's own kernel, or a candidate in its place."""
        self._seen[at] += 1
        call, seen, output, trial = self._call, self._seen[at], self._outputs[at], self._trials.get(at)
        tuner, program = call.tuner, call.tuner.program
        idle = not self._watches if trial is None else trial.is_over
        if idle or seen > _MOST_SEEN or not program.untouched():
            return baseline()
        if trial is None:
            live, begin = program.live_bytes(), program.mark()
            out = baseline()
            tuner.watched(output.site, live + output.form.size_bytes, begin, program.mark())
            return out

        def has_free_blocks(sizes: Sequence[int], after: bool) -> bool:
            return call.has_free_blocks(at, -seen if after else seen, sizes)

        check = CandidateCheck(tuner, output.site, output.form, has_free_blocks, operands, finished)
        return check.output(trial, baseline)


def forward_of(
    tuner: Tuner,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
    flags: Flags,
) -> TunedCall:
    """Return what becomes of calls of aten::_convolution that look like this one."""
    call = asked_convolution(x, weight, geometry, flags, bias=bias, native=tuner.owner is None)
    if isinstance(call, str):
        return TunedCall(tuner, {}, reason=call)
    copied = missing_format(call, x, weight)
    reason = _reason(flags, tuner, copied)
    if reason:
        return TunedCall(tuner, {}, reason=reason)
    output = _output(tuner, biased_problem(bias, call) or call.forward, x)
    return TunedCall(tuner, {0: output}, transposed=call.transposed, bias_as=bias_form(bias, x.dim()), copied=copied)


def backward_of(
    tuner: Tuner,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    mask: Sequence[bool],
    flags: Flags,
) -> TunedCall:
    """Return what becomes of calls of aten::convolution_backward that look like this one."""
    call = asked_gradients(grad, x, weight, geometry, flags, native=tuner.owner is None)
    if isinstance(call, str):
        return TunedCall(tuner, {}, reason=call)
    copied = missing_format(call, grad, x, weight)
    reason = _reason(flags, tuner, copied)
    if any(backward_strides(grad, x, weight, geometry, call)):
        reason = "PyTorch's gradients differ in their memory format"
    if reason:
        return TunedCall(tuner, {}, reason=reason)
    problems = {_DGRAD: call.backward_input, _WGRAD: call.backward_weight}
    outputs = {at: _output(tuner, problem, x) for at, problem in problems.items() if mask[at]}
    return TunedCall(tuner, outputs, transposed=call.transposed, copied=copied)


def _output(tuner: Tuner, problem: ConvolutionProblem, x: torch.Tensor) -> _Output:
    return _Output(tuner.site(problem), OutputForm(problem, x.get_device()))


def _reason(flags: Flags, tuner: Tuner, copied: torch.memory_format | None) -> str:
    """Return why PyTorch computes calls for good; '' if it need not. Heuristic plans copy tensors as PyTorch does."""
    if flags.deterministic:
        return "deterministic algorithms are asked for, and nothing is tried among them"
    return "" if copied is None or tuner.owner is not None else "the tensors differ in their memory format"


def _add(found: list[torch.Tensor | None], left: list[bool], others: Gradients) -> None:
    """Add gradients of PyTorch's own to those that were found, and note that they are not left to be computed."""
    for at, each in enumerate(others):
        if each is not None:
            found[at], left[at] = each, False


def _one(baseline: Callable[[list[bool]], Gradients], at: int) -> Any:
    return baseline(_ONLY[at])[at]
