"""FittedStep: a model whose forward and backward follow a plan, for a training loop that stays as it is."""

import traceback
from collections.abc import Sequence
from statistics import median
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ucudnn.errors import InvalidValueError
from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Phase, Role
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.reports.plan_summary import backward_end_ms, plan_lines
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.torch.execution.generator import GeneratedCode, generate
from ucudnn.memory.torch.execution.step_program import StepProgram, StepSubject
from ucudnn.memory.torch.execution.transfers import Transfers
from ucudnn.memory.torch.execution.usage import StepClock, memory_usage
from ucudnn.memory.torch.model_state import ModelState
from ucudnn.memory.torch.tracer import TracedTensor
from ucudnn.units import format_bytes, format_ms


@final
class PlannedRun:
    """The code of a plan with what it runs on. Not thread-safe.

    Args:
        program: the step.
        plan: the plan.
        simulation: what the plan takes.
        transfers: carries out its copies.
        debug: whether storages are poisoned before they are freed, and must be gone after it.
    """

    def __init__(
        self,
        program: StepProgram,
        plan: MemoryPlan,
        simulation: Simulation,
        transfers: Transfers,
        *,
        debug: bool = False,
    ) -> None:
        self.program, self.plan, self.transfers = program, plan, transfers
        self.persistent = tuple(tensor for tensor, _ in program.persistent)
        self.guarded = _guarded(program)
        self.forwards = 0  # how often forward has begun
        self.clock = StepClock(program.device)
        self._debug = debug
        self._delayed = simulation.delayed
        self.copying = simulation.offloaded_bytes > 0
        self._checked = True  # until a step has ended, what operators return is compared with the trace
        self.code = self._generated()

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Return the outputs, and what backward needs."""
        self.forwards += 1
        self.clock.begin()
        return self._settled(self.code.forward, self.persistent, inputs)  # type: ignore[no-any-return]

    def backward(self, number: int, state: list[Any], tangents: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients, and empty what forward left.

        Raises:
            RuntimeError: if another forward has overwritten what this one left on the host.
        """
        if self.copying and number != self.forwards:
            state.clear()
            raise RuntimeError(
                "another forward of the fitted step ran before this backward, and its plan keeps activations of one"
                " forward on the host: call backward after each forward"
            )
        gradients: tuple[Tensor | None, ...] = self._settled(self.code.backward, self.persistent, state, tangents)
        self.clock.end()
        if self._checked:
            self._checked = False
            self.code = self._generated()
        return gradients

    def _generated(self) -> GeneratedCode:
        return generate(self.program, self.plan, self._delayed, checked=self._checked, debug=self._debug)

    def _settled(self, function: Any, *args: Any) -> Any:
        """Call code below autograd; if it fails, wait for its copies, because their memory may be used again."""
        try:
            # Gradients are computed by the code. Grad mode stays on, because operators choose kernels by it.
            with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                return function(self.transfers, *args)
        except BaseException as error:
            self.transfers.abandon()
            self._note_line(error)
            raise

    def _note_line(self, error: BaseException) -> None:
        """Add to an error the line of code at which it occurred: no file has it."""
        lines = self.code.text.splitlines()
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == self.code.filename:
                error.add_note(f"in the code of the plan: {lines[number - 1].strip()}")


def _guarded(program: StepProgram) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return which persistent tensors, inputs and outputs backward reads; they must not change before it."""
    read = {
        storage
        for operation in program.graph.operations
        if operation.phase is Phase.BACKWARD
        for storage in operation.reads
    }
    read = {storage for storage in read if program.graph.storages[storage].role is not Role.BUFFER}
    groups = ([tensor for _, tensor in program.persistent], program.inputs, program.outputs)
    persistent, inputs, outputs = (
        tuple(index for index, tensor in enumerate(tensors) if tensor.storage in read) for tensors in groups
    )
    return persistent, inputs, outputs


class _Kept:
    """What forward left for backward. If backward never takes it, its copies must end before its memory is reused."""

    __slots__ = ("number", "run", "state")

    def __init__(self, run: PlannedRun, state: list[Any]) -> None:
        self.run, self.state, self.number = run, state, run.forwards

    def __del__(self) -> None:
        if self.state and self.run.copying:
            self.run.transfers.abandon()


class _Replay(torch.autograd.Function):
    """A step's forward and backward as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, run: PlannedRun, inputs: tuple[Tensor, ...], *sources: Tensor) -> tuple[Tensor, ...]:
        """Run the code of forward; `sources` are the tensors that need gradients, which autograd must see."""
        outputs, state = run.forward(inputs)
        ctx.kept = _Kept(run, state)
        ctx.set_materialize_grads(False)
        differentiable = {*run.program.differentiable}
        ctx.mark_non_differentiable(*(each for index, each in enumerate(outputs) if index not in differentiable))
        persistent, own, returned = run.guarded
        ctx.save_for_backward(  # for autograd's check that nobody has changed them
            *(run.persistent[index] for index in persistent),
            *(inputs[index] for index in own),
            *(outputs[index] for index in returned),
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the code of backward."""
        _ = ctx.saved_tensors
        kept = ctx.kept
        if not kept.state:
            raise RuntimeError("backward of a fitted step runs once: it frees activations on its way")
        program = kept.run.program
        used = [tangents[index] for index in program.differentiable]
        given = [
            _lying_as(tensor, traced, program.device) for tensor, traced in zip(used, program.tangents, strict=True)
        ]
        gradients = kept.run.backward(kept.number, kept.state, given)
        unused = {index for index, tensor in enumerate(used) if tensor is None}
        if unused:  # what only unused outputs depend on has no gradient, as in eager PyTorch
            gradients = tuple(
                None if from_tangents and from_tangents <= unused else gradient
                for gradient, from_tangents in zip(gradients, _origins(program), strict=True)
            )
        return None, None, *gradients


def _origins(program: StepProgram) -> list[set[int]]:
    """Return for each gradient the tangents that it depends on."""
    found: dict[int, set[int]] = {}
    for number, tangent in enumerate(program.tangents):
        found.setdefault(tangent.storage, set()).add(number)
    for operation, call in enumerate(program.calls):
        if call.phase is Phase.BACKWARD and operation not in program.outside:
            origins = set[int]().union(*(found.get(each.storage, ()) for each in call.inputs))
            for storage, _ in program.graph.makes[operation]:
                found.setdefault(storage, set()).update(origins)
    return [set() if each is None else found.get(each.storage, set()) for each in program.gradients]


def _lying_as(tensor: Tensor | None, traced: TracedTensor, device: torch.device) -> Tensor:
    """Return a tensor as the trace has it in memory: the tensor itself, or a copy; zeros for None."""
    if tensor is None:
        return torch.empty_strided(traced.shape, traced.stride, dtype=traced.dtype, device=device).zero_()
    if tensor.stride() == traced.stride and not tensor.storage_offset() and tensor.dtype is traced.dtype:
        return tensor
    made = torch.empty_strided(traced.shape, traced.stride, dtype=traced.dtype, device=tensor.device)
    return made.copy_(tensor)


@final
class FittedStep(nn.Module):
    """A model, or a model and its loss, whose training follows a plan.

    In training mode with gradients a call runs the plan's forward, and `backward` of what it returns runs the plan's
    backward, once. In evaluation mode and without gradients the model runs as it is.

    Attributes:
        model: the model; its parameters and buffers are those that are trained.
        plan: the plan.
        costs: what the plan was made with.
        simulation: what the plan takes by these costs.
        transfers: the plan's copies.
    """

    def __init__(self, subject: StepSubject, run: PlannedRun, costs: Costs, simulation: Simulation) -> None:
        super().__init__()
        self.model = subject.model
        self.plan, self.costs, self.simulation = run.plan, costs, simulation
        self.transfers = run.transfers
        self._subject, self._run = subject, run
        leaves, self._structure = subject.leaves()
        self._signature = [_signature(leaf) for leaf in leaves]
        self._autocast = _autocast(run.program.device.type)
        self._state = ModelState(self.model, run.persistent)

    @property
    def code(self) -> str:
        """The generated code, for people."""
        return self._run.code.text

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, or the loss of it and the last arguments if a loss was given.

        Raises:
            InvalidValueError: if the arguments differ from the sample in number, shape, strides, type or device, or
                the model in its parameters, buffers or modes, or the autocast type differs.
        """
        if not self.model.training or not torch.is_grad_enabled():
            return self._subject.called(args, kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        if structure != self._structure or [_signature(leaf) for leaf in leaves] != self._signature:
            raise InvalidValueError(self._difference(leaves, structure))
        if _autocast(self._run.program.device.type) != self._autocast:
            raise InvalidValueError("fit and the step must run under the same autocast: fit the step again under it")
        run = self._run
        run.persistent = self._state.tensors()
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        sources = [(run.persistent if is_persistent else inputs)[each] for is_persistent, each in run.program.sources]
        return run.program.build_result(_Replay.apply(run, inputs, *sources))

    def report(self) -> str:
        """Return what the plan does and what that takes, predicted and measured so far, for people.

        The measured peak is what PyTorch's allocator had at most in this process. It is not known on a CPU.
        """
        plan, costs, run, device = self.plan, self.costs, self._run, self._run.program.device
        usage = memory_usage(plan.graph, costs, device)
        peak = f"peak: predicted {format_bytes(self.simulation.peak_bytes + usage.library_bytes)}"
        if device.type == "cuda":
            peak += f", measured {format_bytes(torch.cuda.max_memory_allocated(device))}"
        time = f"forward and backward: predicted {format_ms(backward_end_ms(plan, self.simulation))}"
        measured = run.clock.times_ms()
        if measured:
            time += f", measured {format_ms(median(measured))} in {len(measured)} steps"
        budget = (
            "" if plan.budget_bytes is None else f", budget {format_bytes(plan.budget_bytes + usage.library_bytes)}"
        )
        head = f"{plan.graph.name}, mini-batch {plan.graph.batch}, on {costs.device}: policy {plan.policy}{budget}"
        host = f"host memory: {format_bytes(self.transfers.block_bytes)}{', pinned' if device.type == 'cuda' else ''}"
        return "\n".join([head, peak, time, *usage.lines(), host, *plan_lines(plan, costs, self.simulation)])

    def close(self) -> None:
        """Give the host's memory back; the step cannot run its plan after that."""
        self._run.transfers.close()

    def _difference(self, leaves: Sequence[Any], structure: Any) -> str:
        """Return how arguments differ from the sample."""
        if structure != self._structure:
            return f"the step was fitted to arguments of the structure {self._structure}, not {structure}: fit it again"
        for number, (leaf, expected) in enumerate(zip(leaves, self._signature, strict=True)):
            if _signature(leaf) != expected:
                return (
                    f"argument {number} is {_described(_signature(leaf))}, and the step was fitted to"
                    f" {_described(expected)}: fit it again for other arguments"
                )
        raise AssertionError(structure)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf


def _described(signature: Any) -> str:
    if not isinstance(signature, tuple) or not isinstance(signature[0], torch.Size):
        return f"the value {signature!r}"
    shape, stride, offset, dtype, device, requires_grad = signature
    size = "x".join(map(str, shape)) or "a scalar"
    needs = ", with a gradient" if requires_grad else ""
    begin = f", from element {offset} of its storage on" if offset else ""
    return f"{size} of {str(dtype).removeprefix('torch.')} on {device}, strides {tuple(stride)}{begin}{needs}"


def _autocast(device_type: str) -> torch.dtype | None:
    """Return the type to which autocast casts now, or None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
