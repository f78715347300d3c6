"""Decides where calls go while a program is tuned: to the tuner, past it, or to the gate, whose table is made here."""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, NoReturn, final

from torch.utils.hooks import RemovableHandle

from ucudnn.torch.calls.fused_call import FusedCall
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.calls.kernel_call import KernelCall
from ucudnn.torch.device.gpu import on_default_stream
from ucudnn.torch.gate.call_gate import CallGate, GateOutput, GateRule, PythonOperators, signature_of
from ucudnn.torch.gate.gate_library import GateLibrary
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.step_tracker import StepTracker, before_next_module
from ucudnn.torch.tuning.plan_owner import STEPS_TO_PLAN
from ucudnn.torch.tuning.tuned_call import CallTable
from ucudnn.torch.tuning.tuner import Tuner


def beginning(rules: list[GateRule], begins: Callable[[], object]) -> list[GateRule]:
    """Return rules of which the first one calls a function before it computes, where no optimizer tells of steps."""
    if not rules:
        return rules
    at, first = next(iter(rules[0].outputs.items()))

    def compute(*addresses: int) -> bool:
        begins()
        return first.compute(*addresses)

    outputs = {**rules[0].outputs, at: first._replace(compute=compute, direct=None)}
    return [rules[0]._replace(outputs=outputs), *rules[1:]]


def _output(kernel: KernelCall, fused: FusedCall | None) -> GateOutput | None:
    direct = kernel.direct() if fused is None else fused.direct()
    return None if direct is None else GateOutput(_never, kernel.form.sizes, kernel.form.strides, direct)


def _never(x: int, w: int, y: int) -> NoReturn:
    raise AssertionError("cuDNN computes this without Python")


_LOG = logging.getLogger("ucudnn.torch")

_LEAST_STEPS = 16  # until the table is renewed for the first time, and then twice as many each time
_SIGNATURES_IN_A_STEP = 4  # another step for so many, because each takes 0.1 to 0.2 ms when the table is made
_COMPARED_OR_SETTLED = TuningPhase.COMPARING, TuningPhase.SETTLED


@final
class Routes(NamedTuple):
    """Where calls go.

    Attributes:
        forward: whether forward calls come to the tuner, unless the gate computes them.
        backward: whether backward calls do.
        table: tells apart the tables by which the gate computes; None if it computes nothing.
    """

    forward: bool
    backward: bool
    table: tuple[int, ...] | None = None


@final
class Router:
    """Decides where calls go, and makes the table of the gate."""

    def __init__(
        self,
        library: GateLibrary | None,
        planned: Interceptor | None,
        tracker: StepTracker,
        calls: tuple[CallTable, CallTable],
        tuners: Mapping[int, Tuner],
        changed: Callable[[], None],
    ) -> None:
        self.is_settled = False
        self.routes = Routes(forward=True, backward=True)
        self._library = library
        self._planned = planned
        self._tracker = tracker
        self._calls = calls
        self._tuners = tuners
        self._changed = changed
        self._tries = False  # plans beside the heuristic ones, with which the gate computes meanwhile
        self._lasts_since = 0
        self._edition = 0  # of the table, in which calls and plans change, too
        self._renewed = 0
        self._renews_at = 0
        self._changes = 0  # of plans that are compared
        self._has_changed = False  # since the table was made
        self._made_elsewhere = False  # on another stream than the default one, where no kernel does without Python
        self._in_python: tuple[PythonOperators, PythonOperators] | None = None  # of the tuner, and past it
        self._module: RemovableHandle | None = None

    @property
    def gate(self) -> CallGate | None:
        """The gate that is used now; None if kernels in Python are registered, or nothing is.

        Within a stated limit it stays once it stands, because other calls go on to Python.
        """
        return self._gate if self.routes.table is not None or self._in_python is not None else None

    def use_gate(
        self, device_type: str, kernels: tuple[Callable[..., Any], Callable[..., Any]], begins: Callable[[], None]
    ) -> bool:
        """Let the gate use the table that is wanted, and return whether PyTorch takes it.

        Args:
            device_type: 'cuda' or 'cpu'.
            kernels: the tuner's, for forward and backward calls.
            begins: called where the first kernel that the gate knows is called, if no optimizer steps.
        """
        gate, planned, routes = self._gate, self._planned, self.routes
        assert gate is not None
        python: tuple[str, ...] = ()
        forward: list[GateRule] = []
        backward: list[GateRule] = []
        if planned is not None:
            if self._in_python is None:
                past = planned.operators()
                self._in_python = PythonOperators(device_type, kernels), PythonOperators(device_type, past)
            of_tuner, past_it = (each.names for each in self._in_python)
            python = (of_tuner if routes.forward else past_it)[0], (of_tuner if routes.backward else past_it)[1]
            if routes.table is not None:
                forward, backward = self._plan_rules(planned)
        else:
            forward, backward = (each.rules() for each in self._calls)
            self._made_elsewhere = not self._on_default_streams()
            self._renews_at = self._tracker.steps + (_LEAST_STEPS << self._renewed)
            if not self._tracker.by_optimizer:
                forward = beginning(forward, begins)
        try:
            gate.use(device_type, forward, backward, python=python)
        except RuntimeError as error:
            _LOG.warning("calls that are passed on make a detour through Python: %s", error)
            self._library = None
            return False
        return True

    def update(self, *, may_differ: bool) -> None:
        """Let calls go where they are wanted between steps; that may differ from before, or only the table may."""
        stale = self._is_stale()
        self._edition += stale
        forward, backward, table = self.routes
        # The gate may have been built after kernels in Python were registered.
        newly_gated = table is None and self._gate is not None and (forward or backward or self._gates_plans())
        if may_differ or stale or newly_gated:
            self._apply()

    def update_later(self) -> None:
        """Do the same when a module is called next, because a convolution is being computed now.

        It is not done before all is settled, because steps would end unseen then. It must not be asked for if several
        threads compute, because one of them may always be inside a convolution.
        """
        if self.is_settled and self._module is None and self._wants() != self.routes:
            self._module = before_next_module(self._module_called)

    def end(self) -> None:
        """Wait for no module, and give up the operators that the gate calls, which must be closed."""
        if self._module is not None:
            self._module.remove()
            self._module = None
        for each in self._in_python or ():
            each.close()
        self._in_python = None

    def awaits_gate(self) -> bool:
        """Begin to build the gate, and return whether to wait for it; only a program that needs it pays for it."""
        if self._library is None:
            return False
        self._library.begin()
        return self._library.is_awaited

    def gates_now(self) -> bool | None:
        """Return whether the gate computes by plans now; None if it may do so soon."""
        if self._library is None or self._planned is None or not self._tracker.by_optimizer:
            return False
        gate = self._gate
        if gate is None:
            return None if self._library.is_awaited else False
        return True if gate.is_open else None

    def step_ended(self, phases: AbstractSet[TuningPhase]) -> None:
        """Note what tuners do after a step; called until nothing is tried any more.

        Heuristic plans last from the first step on: only calls in which others are tried come to Python. But all calls
        do where they are watched. Whole steps are compared later. Plans last for some steps then, behind which the gate
        takes those that have changed. PyTorch's own kernels are compared with others without a gate.
        """
        settled = phases == {TuningPhase.SETTLED}
        tries = self._planned is not None and bool(phases) and not settled and TuningPhase.WATCHING not in phases
        changes = sum(each.owner.changes for each in self._tuners.values() if each.owner is not None)
        if changes != self._changes:
            self._changes, self._renews_at = changes, self._tracker.steps + STEPS_TO_PLAN
            self._has_changed = True
        if (settled, tries) != (self.is_settled, self._tries):
            self._lasts_since = self._tracker.steps
        self.is_settled, self._tries = settled, tries
        if self._planned is not None and (settled or (tries and self._tracker.by_optimizer)):
            self.awaits_gate()

    @property
    def _gate(self) -> CallGate | None:
        return None if self._library is None else self._library.gate

    def _module_called(self) -> None:
        self._module = None
        self._apply()

    def _apply(self) -> None:
        wanted = self._wants()
        if wanted != self.routes:
            self.routes = wanted
            self._changed()

    def _wants(self) -> Routes:
        tuners = list(self._tuners.values())
        if not tuners or any(each.phase is TuningPhase.WATCHING for each in tuners):
            return Routes(forward=True, backward=True)
        forward, backward = (each.replaces for each in self._calls)
        kernels: list[int] = []
        gates = self._gate is not None
        if self._planned is None:
            gates &= (forward or backward) and all(each.phase in _COMPARED_OR_SETTLED for each in tuners)
            kernels = [id(kernel) for each in tuners for kernel in each.replaced.values()]
        else:
            gates &= self._gates_plans()
            forward |= self._needs_steps(self._planned)  # calls by plans come to Python anyway, and may end steps there
            backward |= gates and self._tries  # what is tried changes from step to step
        return Routes(forward, backward, (self._edition, *kernels) if gates else None)

    def _is_stale(self) -> bool:
        """Return whether the gate would compute more without Python if it had another table.

        There may be calls or plans that it does not know. Or its table was made while another stream was the current
        one. Each time doubles the number of steps until the next one. So a program whose signatures are always new is
        not held up again and again. Where plans are compared, they change only a few times.
        """
        misses = self._made_elsewhere if self._planned is None else self._planned.has_unlent or self._has_changed
        gate = self._gate
        may_renew = self._tracker.steps >= self._renews_at and gate is not None and gate.is_open
        if not (misses and may_renew and self._on_default_streams()):
            return False
        self._renewed += not self._has_changed
        return True

    def _on_default_streams(self) -> bool:
        """Return whether this thread's current stream is the default one on each GPU of the program."""
        if self._planned is not None:
            return self._planned.on_default_streams()
        return all(map(on_default_stream, list(self._tuners)))

    def _plan_rules(self, planned: Interceptor) -> tuple[list[GateRule], list[GateRule]]:
        """Return the rules of forward and backward calls all of whose outputs cuDNN can compute without Python."""
        self._has_changed = False
        planned.has_unlent = not planned.on_default_streams()  # first, because another thread may call meanwhile
        calls = {} if planned.has_unlent else planned.cached_calls()
        distance = max(_LEAST_STEPS, len(calls) // _SIGNATURES_IN_A_STEP) << self._renewed
        self._renews_at = self._tracker.steps + distance
        tried = [item for table in self._calls for item in list(table.calls.items())] if self._tries else []
        bypasses = {key: call.bypass for key, call in tried}
        forward: list[GateRule] = []
        backward: list[GateRule] = []
        for key, call in calls.items():
            if call.reason or not call.lies_as_computed:
                continue
            kernels = {0: call.output} if call.output is not None else {0: call.input_gradient, 1: call.weight_gradient}
            wanted = {at: kernel for at, kernel in kernels.items() if kernel is not None}
            fused = call.fused if call.fused is not None and call.fused.is_on else None
            outputs = {at: _output(kernel, fused) for at, kernel in wanted.items()}
            ready = {at: each for at, each in outputs.items() if each is not None}
            if wanted and len(ready) == len(wanted):  # a part of a gradient's call would have another plan
                signature = key[:-1]  # without the name of the layer, which is ''
                rule = signature_of(signature), ready, call.bias_as, fused is not None, bypasses.get(signature)
                (backward if call.output is None else forward).append(GateRule(*rule))
        return forward, backward

    def _needs_steps(self, planned: Interceptor) -> bool:
        """Return whether forward calls by plans must tell steps: until all is settled, and the gate is open after it.

        An optimizer tells the gate when to open without them.
        """
        if not self.is_settled:
            return True
        if self._library is None or planned.names.any or self._tracker.by_optimizer:
            return False
        return self._library.is_pending or (self._gate is not None and not self._gates_plans())

    def _gates_plans(self) -> bool:
        """Return whether plans last and were launched since.

        While others are tried, an optimizer must tell steps, because most calls do not come to Python.

        On another stream than the default one, no kernel would be found that the gate can compute. Nor are plans of
        named layers for the gate: only `convert` names layers, by their weights' memory, and an address may be that of
        another layer's weight once that memory is gone.
        """
        if self._planned is None or self._planned.names.any:
            return False
        lasts = self.is_settled or (self._tries and self._tracker.by_optimizer)
        launched = lasts and self._tracker.steps >= self._lasts_since + STEPS_TO_PLAN
        return launched and self._planned.on_default_streams()
