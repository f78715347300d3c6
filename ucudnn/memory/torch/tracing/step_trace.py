"""Traces a training step on fake tensors, and returns its program.

The step is traced below autograd, so nothing is computed and no memory is taken.
"""

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_unflatten

from ucudnn.errors import InvalidValueError, StepGraphError
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.torch.subject.call_modes import CallModes, leave_autocast
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.model_state import hooks_of, modules_of
from ucudnn.memory.torch.subject.module_attributes import ModuleAttributes
from ucudnn.memory.torch.subject.output_tree import OutputTree
from ucudnn.memory.torch.subject.step_program import StepProgram, StepSubject
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, unused_name
from ucudnn.memory.torch.tracing.assemble import TracedStep, TracedSubject, assemble, executable
from ucudnn.memory.torch.tracing.averaging import with_groups
from ucudnn.memory.torch.tracing.kept_tensors import BufferTables, check_kept, check_stays
from ucudnn.memory.torch.tracing.optimizer_trace import trace_optimizer
from ucudnn.memory.torch.tracing.provenance import Provenance
from ucudnn.memory.torch.tracing.step_effects import StepEffects, StepFakes
from ucudnn.memory.torch.tracing.step_reads import StepReads
from ucudnn.memory.torch.tracing.trace_checks import check_calls, check_generators, explained, quiet_fakes
from ucudnn.memory.torch.tracing.tracer import Tracer

BEFORE = "make it a buffer or an argument of the step; what is made once is made by a call of the model before the fit"


@final
class StepTracing:
    """One trace of a step on fake tensors, at a mini-batch that is larger than the subject's by a factor.

    In a settled one no value beside tensors may change. One that seeks looks for the place of what changes.

    Attributes:
        moved: a value beside tensors that the step changed; None for none.
    """

    def __init__(
        self, subject: StepSubject, batch: int, factor: int, snapshot: Snapshot, *, settled: bool, seeks: bool
    ) -> None:
        self._modes = CallModes()  # first, because transforms of torch.func would not let tensors be made
        self._subject, self._snapshot = subject, snapshot
        self.moved: str | None = None
        self._settled, self._seeks = settled, seeks
        self._mode = StepFakes(allow_non_fake_inputs=True)
        model = subject.model
        named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            named.setdefault(id(tensor), (name, tensor))
        self._real = dict(named.values())
        self._fake = {name: self._faked(tensor) for name, tensor in self._real.items()}
        self._reads = StepReads(model, subject.loss, snapshot)
        leaves, self._structure = subject.leaves()
        # The gradient of what arguments were computed from is the caller's.
        cut = [it.detach().requires_grad_(it.requires_grad) if isinstance(it, Tensor) else it for it in leaves]
        self._leaves = [self._faked(it) if isinstance(it, Tensor) else it for it in cut]
        if factor > 1:
            self._leaves = [self._repeated(leaf, batch, factor) for leaf in self._leaves]
        self._inputs = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._provenance = Provenance(model)
        self._tracer = Tracer(self._provenance, self._note_constant, self._stand_in)
        leaves_by_id = {id(tensor): name for name, tensor in (*self._fake.items(), *self._named_inputs())}
        modules = {id(each) for _, each in modules_of(model, subject.loss)}
        self.effects = self._tracer.effects = self._mode.effects = StepEffects(
            self._provenance, leaves_by_id, modules, self._reads.called, self._changed, seeks=seeks, settled=settled
        )
        self._constants: list[tuple[Tensor, TracedTensor]] = []
        self._stand_ins: list[Tensor] = []
        self._roles: dict[int, tuple[Role, str]] = {}
        self._names = set[str]()
        self._before: list[Any] = []
        self._buffers: BufferTables
        self._grad_outputs: list[TracedTensor] = []
        self._gradients: list[TracedTensor | None] = []
        self._sources: list[tuple[bool, int]] = []
        self._arrivals: list[int] = []
        self._outputs: list[TracedTensor] = []
        self._differentiable: list[int] = []
        self._used: list[int] = []
        self._result: OutputTree

    def program(self, name: str, batch: int) -> StepProgram:
        """Trace the step, and return its program."""
        model = self._subject.model
        parameters = {each for each, _ in model.named_parameters()}
        fakes = {id(self._real[key]): fake for key, fake in self._fake.items()}
        for module in model.modules():  # the snapshot puts the real ones back
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    table[key] = None if tensor is None else fakes[id(tensor)]  # type: ignore[assignment]
        with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):  # it looks for NaN in values
            for key, tensor in self._fake.items():
                self._meet(Role.PARAMETER if key in parameters else Role.BUFFER, key, tensor)
            self._meet_values(self._tracer)
            for key, tensor in self._named_inputs():
                self._meet(Role.INPUT, key, tensor)
            persistent = [(self._real[key], self._tracer.describe(fake)) for key, fake in self._fake.items()]
            inputs = [self._tracer.describe(each) for each in self._inputs]
            self._buffers = BufferTables(model, self._subject.loss)
            self._reads.begin()
            with self._mode, self._provenance.entered():
                try:
                    self._run()
                except Exception:  # of an operator before, of which no plan is known, is the better reason
                    check_calls(self._tracer.trace)
                    raise
        self._reads.end()
        attributes = self._reads.attributes()  # what forward changed of them differs now
        self._snapshot.restore_tensors()
        check_calls(self._tracer.trace)
        given = (each for each in self._leaves if isinstance(each, Generator))
        check_generators(self._tracer.trace, chain(self._reads.generators(), given))
        gc.collect()  # what only circles of references hold is freed
        device = self._device().type
        subject = TracedSubject(
            name=name,
            batch=batch,
            device=device,
            roles=self._roles,
            runs=True,
            in_pieces=self._subject.in_pieces,
            conditions={"torch": torch.__version__.partition("+")[0], "device": device},
        )
        return self._built(assemble(self._tracer.trace, subject), [*persistent, *self._constants], inputs, attributes)

    def _run(self) -> None:
        tracer = self._tracer
        self._before = [*self._state_now()]
        args, kwargs = tree_unflatten(self._leaves, self._structure)
        with explained(tracer), quiet_fakes():
            with tracer, self.effects.entered():
                result = self._subject.called(self._subject.model, args, kwargs)
                result = self._buffers.write_back(result)
            self._check_kept(args, kwargs)
            outputs = self._returned(result)
            del result
            leave_autocast()
            gradients = self._differentiate(outputs)
            del outputs
        self._update(gradients)

    def _update(self, gradients: Sequence[Tensor | None]) -> None:
        fakes = {id(self._real[key]): fake for key, fake in self._fake.items()}
        of_kind = {True: [*self._fake.values()], False: self._inputs}
        pairs = zip(self._sources, gradients, strict=True)
        found = {id(of_kind[is_parameter][index]): gradient for (is_parameter, index), gradient in pairs}
        for optimizer in self._subject.optimizers:
            for label, tensor in trace_optimizer(
                optimizer, fakes, found, self._faked, self._tracer, in_parts=self._subject.in_pieces
            ):
                self._meet(Role.OPTIMIZER_STATE, label, tensor)

    def _named_inputs(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"input{index or ''}", tensor) for index, tensor in enumerate(self._inputs))

    def _changed(self) -> str | None:
        if not self.effects.hooked and [*self._state_now()] != self._before:
            return (
                "changes modules, hooks, or what parameters are, which no plan does in its steps: do it before the fit"
            )
        changed = next(self._reads.changed(), None)
        if changed is None:
            self.moved = "hooks of the model" if self.effects.hooked else None
            return None
        self.moved = changed.label
        return (
            f"reads and changes {changed.label}, which no plan does in its steps: {BEFORE}" if self._settled else None
        )

    def _state_now(self) -> Iterator[Any]:
        for module in self._subject.model.modules():
            yield [*map(id, chain(module._modules.values(), *map(dict.values, hooks_of(module))))]
        for tensor in (*self._fake.values(), *self._inputs):
            yield tensor.requires_grad, tensor.grad is None, self._tracer.find(tensor)

    def _check_kept(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        kept = [*self._reads.kept()]
        if not kept:
            return
        roots = [tensor for key, tensor in self._fake.items() if isinstance(self._real[key], nn.Parameter)]
        found = (self._tracer.meet(tensor) for tensor in (*roots, *self._inputs))
        written = check_kept(kept, self._tracer.trace.calls, found, self._tracer.find)
        # A table is there in the next forward, a counter is replaced. Backward of the first forward must not notice.
        unseen = *self._fake.values(), *self._inputs, *self._stand_ins
        second = Tracer(self._provenance, None, self._as_fake)
        self._meet_values(second)
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(unseen), second:
            self._subject.called(self._subject.model, args, kwargs)
        calls = zip(second.trace.calls, self._tracer.trace.calls, strict=False)
        check_stays(kept, written, second.find, alike=all(one.func is other.func for one, other in calls))

    def _meet_values(self, tracer: Tracer) -> None:
        for key, tensor in self._fake.items():
            tracer.meet_values(tensor, self._real[key], changes=self._real[key].requires_grad)
        for tensor, real in zip(self._leaves, self._subject.leaves()[0], strict=True):
            if isinstance(tensor, Tensor) and not tensor.is_floating_point() and tensor.shape == real.shape:
                tracer.sampled.meet(tracer.meet(tensor), real, changes=False)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor, static_shapes=True)

    def _returned(self, result: Any) -> list[Tensor]:
        self._result, outputs = OutputTree.of(result)
        for index, tensor in enumerate(outputs):
            self._meet(Role.OUTPUT, "loss" if self._subject.loss else f"output{index or ''}", tensor)
            self._outputs.append(self._tracer.describe(tensor))
        for tensor, version, _, place, _ in self._tracer.supposed:
            if tensor._version != version:
                raise StepGraphError(f"{place} looks at a tensor that forward changes later: look at a clone of it")
            self._meet(Role.OUTPUT, "condition", tensor)
            self._outputs.append(self._tracer.describe(tensor))
        return outputs

    def _differentiate(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        self._differentiable = [index for index, each in enumerate(outputs) if each.requires_grad]
        if not self._differentiable:
            raise InvalidValueError("no output of the step needs a gradient, so there is nothing to train")
        # Until backward tells, a scalar among other outputs is the loss, and they are there to be looked at.
        scalars = [index for index in self._differentiable if not outputs[index].dim()]
        told = dict(self._subject.used or ((index, None) for index in scalars or self._differentiable))
        self._used = sorted(told)
        sources: dict[str, Tensor] = {}
        for is_parameter, tensors in ((True, self._fake.items()), (False, self._named_inputs())):
            for index, (key, tensor) in enumerate(tensors):
                if tensor.requires_grad:
                    sources[f"{key}.grad"] = tensor
                    self._sources.append((is_parameter, index))
        with self._tracer, self._tracer.during(Phase.BACKWARD), ExitStack() as hooks:
            for number, tensor in enumerate(sources.values()):
                hooks.enter_context(tensor.register_hook(lambda _, source=number: self._arrivals.append(source)))
            ends = [outputs[index] for index in self._used]
            with torch.no_grad():
                grads = [
                    torch.empty_like(each) if (own := told[index]) is None else each.new_empty_strided(each.shape, own)
                    for index, each in zip(self._used, ends, strict=True)
                ]
            with self._buffers.explained(), self.effects.entered():
                gradients = torch.autograd.grad(ends, [*sources.values()], grads, allow_unused=True)
        for grad in grads:
            self._meet(Role.OUTPUT, "outside", grad)
            self._grad_outputs.append(self._tracer.describe(grad))
        for label, gradient in zip(sources, gradients, strict=True):
            if gradient is not None:
                self._meet(Role.GRADIENT, label, gradient)
            self._gradients.append(None if gradient is None else self._tracer.describe(gradient))
        return [*gradients]

    def _built(
        self,
        traced: TracedStep,
        persistent: list[tuple[Tensor, TracedTensor]],
        inputs: list[TracedTensor],
        attributes: ModuleAttributes,
    ) -> StepProgram:
        trace, merged = self._tracer.trace, traced.merged
        numbers = dict(traced.rows)
        behind = len(traced.graph.storages) + 1 + len(self._subject.beside)  # those of the graph that runs
        for storage in range(len(trace.storages)):
            numbers.setdefault(storage, behind + storage)

        def numbered(tensor: TracedTensor) -> TracedTensor:
            return replace(tensor, storage=numbers[merged.get(tensor.storage, tensor.storage)])

        calls: list[TracedCall] = []
        uncounted: list[tuple[int, TracedCall]] = []
        for is_operation, call in traced.executed:
            renumbered = call.with_storages(numbers)
            if is_operation:
                calls.append(renumbered)
            else:
                uncounted.append((len(calls), renumbered))
        grad_outputs = [numbered(each) for each in self._grad_outputs]
        outside = {
            index: grad_outputs.index(call.results)
            for index, call in enumerate(calls)
            if call.phase is Phase.BACKWARD
            and call.results in grad_outputs
            and call.func in (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty_strided.default)
        }
        program = StepProgram(
            graph=executable(traced.graph, calls, outside, self._subject.beside),
            calls=tuple(calls),
            uncounted=tuple(uncounted),
            persistent=tuple((real, numbered(each)) for real, each in persistent),
            inputs=tuple(map(numbered, inputs)),
            outputs=tuple(map(numbered, self._outputs)),
            result=self._result,
            differentiable=tuple(self._differentiable),
            used=tuple(self._used),
            grad_outputs=tuple(grad_outputs),
            outside=outside,
            sources=tuple(self._sources),
            gradients=tuple(None if each is None else numbered(each) for each in self._gradients),
            device=self._device(),
            sizes={numbers[index]: each.size for index, each in enumerate(trace.storages)},
            attributes=attributes,
            modes=self._modes,
            values=self._tracer.values.copies(persistent),
            supposed=tuple(each[2:] for each in self._tracer.supposed),
        )
        parallel = self._subject.parallel
        return program if parallel is None else with_groups(program, parallel, self._arrivals)

    def _faked(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise StepGraphError(
                "a sparse, conjugated or negated tensor, or zeros without memory, as derivatives have them, has no"
                " storage of its own: a plan cannot hold it"
            )
        return self._mode.from_tensor(tensor, static_shapes=True)

    def _repeated(self, leaf: Any, batch: int, factor: int) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        with self._mode, torch.no_grad():
            larger = torch.empty_like(leaf.detach().repeat(factor, *[1] * (leaf.dim() - 1)))
            for form, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
                if leaf.dim() == dims and leaf.is_contiguous(memory_format=form) and not leaf.is_contiguous():
                    larger = larger.contiguous(memory_format=form)
        return larger.requires_grad_(leaf.requires_grad)

    def _meet(self, role: Role, label: str, tensor: Tensor) -> None:
        storage = self._tracer.meet(tensor)
        if storage not in self._roles:
            self._roles[storage] = role, unused_name(label, self._names)

    def _note_constant(self, tensor: Tensor, storage: int) -> None:
        if isinstance(tensor, FakeTensor):
            return
        if tensor.requires_grad:
            raise StepGraphError(
                f"{self._provenance.here(sys._getframe(1))} reads a tensor of {[*tensor.shape]} that gets a gradient,"
                " and is no parameter of the model and no argument, as parameters of a loss: call the loss in forward"
                " of a module that holds both"
            )
        self._meet(Role.BUFFER, "constant", tensor)
        self._tracer.meet_values(tensor, tensor, changes=False)
        self._constants.append((tensor, self._tracer.describe(tensor)))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return the fake of a constant, in whose storage lie its views: PyTorch itself would write some constants."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._as_fake(tensor)
        index = self._tracer.find(tensor)
        assert index is not None
        self._tracer.know(fake, index)
        self._stand_ins.append(fake)
        return fake

    def _device(self) -> torch.device:
        devices = [each.device for each in (*self._real.values(), *self._inputs)]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
