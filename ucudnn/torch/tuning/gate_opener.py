"""Decides which operators are wanted in place of PyTorch's while a program is tuned, and opens the gate."""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import NamedTuple, Protocol, final

from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.device.gpu import on_default_stream
from ucudnn.torch.gate.call_gate import CallGate, GateRule
from ucudnn.torch.gate.gate_library import GateLibrary
from ucudnn.torch.steps.next_module import NextModule
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.step_tracker import StepTracker
from ucudnn.torch.tuning.call_table import CallTable
from ucudnn.torch.tuning.gate_rules import beginning, rules_of, tried_rules
from ucudnn.torch.tuning.plan_owner import STEPS_TO_PLAN
from ucudnn.torch.tuning.plan_rules import plan_rules
from ucudnn.torch.tuning.tuner import Tuner

_LOG = logging.getLogger("ucudnn.torch")

_LEAST_STEPS = 16  # until the gate is opened again for the first time, and then twice as many each time
_LOOKS_IN_A_STEP = 4  # another step for so many looks, because each takes 0.1 to 0.2 ms when the gate is opened
_TRIES = {TuningPhase.TRYING}
_TRIES_PLANS = {*TuningPhase} - {TuningPhase.WATCHING, TuningPhase.SETTLED}  # in which heuristic plans last


class GateUse(Enum):
    """What the gate does with calls that it knows; it passes all others on."""

    CLOSED = "closed"
    OVER_TRIALS = "over trials"  # only those in which something is tried come to Python
    COMPUTES = "computes"  # by adopted kernels or by plans


@final
class Wanted(NamedTuple):
    """What is wanted in place of PyTorch's operators.

    Attributes:
        forward: whether forward calls have something else to do than to pass on.
        backward: whether backward calls have.
        gate: what the gate does.
        kernels: identities of the adopted kernels of each device, for which the gate has rules.
    """

    forward: bool
    backward: bool
    gate: GateUse = GateUse.CLOSED
    kernels: tuple[tuple[int, ...], ...] = ()


class Refresh(Protocol):
    """Lets the operators that are wanted be registered, between steps."""

    def __call__(self, *, rules_only: bool = False) -> None:
        """Register them, or only open the gate again, with other rules."""


@final
class GateOpener:
    """Decides which operators are wanted, and whether the gate stands in front of them.

    Args:
        library: builds the gate; None goes without.
        planned: computes by heuristic plans, as the gate does while others are tried and by adopted ones once all is
            settled; None if PyTorch's own kernels run.
        tracker: says where steps end.
        tables: what becomes of forward and backward calls.
        tuners: the tuner of each device; others may be added later.
        changed: called between steps when other operators are wanted.

    Attributes:
        is_settled: whether nothing is tried any more.
        wanted: what is wanted in place of PyTorch's operators.
    """

    def __init__(
        self,
        library: GateLibrary | None,
        planned: Interceptor | None,
        tracker: StepTracker,
        tables: tuple[CallTable, CallTable],
        tuners: Mapping[int, Tuner],
        changed: Refresh,
    ) -> None:
        self.is_settled = False
        self.wanted = Wanted(forward=True, backward=True)
        self._tries = False
        self._library = library
        self._planned = planned
        self._tracker = tracker
        self._tables = tables
        self._tuners = tuners
        self._changed = changed
        self._lasts_since = 0
        self._reopened = 0
        self._reopens_at = 0
        self._changes = 0  # of plans that are compared
        self._has_changed = False  # since the gate was opened
        self._opened_elsewhere = False  # on another stream than the default one, where no kernel does without Python
        self._next_module = NextModule()

    @property
    def is_over_trials(self) -> bool:
        """Whether the gate that is wanted lets only calls come to Python in which something is tried."""
        return self.wanted.gate is GateUse.OVER_TRIALS

    def keep(self, device_type: str) -> None:
        """Keep PyTorch's own kernels, if the gate is opened over trials; called while they are registered."""
        gate = self._gate
        if gate is None or not self.is_over_trials:
            return
        try:
            gate.keep(device_type)
        except RuntimeError as error:
            self._refused(error)

    def open(self, device_type: str, first_is_called: Callable[[], None], *, again: bool = False) -> CallGate | None:
        """Put the gate in front of the operators, and return it; None if it is not wanted, or cannot be opened.

        No kernel of ours may be registered then, except those of `planned`, or those that try something, which must be.

        Args:
            device_type: 'cuda' or 'cpu'.
            first_is_called: called where the first kernel that the gate knows is called, if no optimizer steps.
            again: whether it stands there already, and only gets other rules.
        """
        gate, over_trials = self._gate, self.is_over_trials
        if gate is None or self.wanted.gate is GateUse.CLOSED:
            return None
        if self._planned is not None:
            forward, backward = self._plan_rules(self._planned)
        elif over_trials:
            forward, backward = (tried_rules(each.calls) for each in self._tables)
        else:
            forward, backward = (rules_of(each.calls) for each in self._tables)
            self._opened_elsewhere = not self._on_default_streams()
            self._reopens_at = self._tracker.steps + (_LEAST_STEPS << self._reopened)
            if not self._tracker.by_optimizer:
                forward = beginning(forward, first_is_called)
        try:
            over_plans = self._planned is not None
            gate.open(device_type, forward, backward, over_plans=over_plans, over_trials=over_trials, again=again)
        except RuntimeError as error:
            self._refused(error)
            return None
        return gate

    def update(self, *, may_differ: bool) -> None:
        """Let other operators be registered, or the gate get other rules; called between steps.

        Args:
            may_differ: whether other operators may be wanted by now.
        """
        may_differ = may_differ or self._has_new_gate()
        if may_differ:
            self._register()
        if not may_differ or self._planned is not None:  # new shapes may have plans while others are tried
            self._renew_rules()

    def update_later(self) -> None:
        """Let other operators be registered when a module is called next: a convolution is being computed now.

        It is not done before all is settled, because steps would end unseen then. It must not be asked for if several
        threads compute, because one of them may always be inside a convolution.
        """
        if self.is_settled and not self._next_module.is_awaited and self._wants() != self.wanted:
            self._next_module.wait(self._register)

    def _register(self) -> None:
        wanted = self._wants()
        if wanted != self.wanted:
            self.wanted = wanted
            self._changed()

    def _renew_rules(self) -> None:
        """Give the gate other rules if it would compute more without Python then.

        There may be calls or plans that it does not know. Or it was opened while another stream was the current one.

        Each time doubles the number of steps until the next one. So a program whose looks are always new is not held
        up again and again. Where plans are compared, they change only a few times.
        """
        misses = self._opened_elsewhere if self._planned is None else self._planned.has_unlent or self._has_changed
        if not misses or self._tracker.steps < self._reopens_at:
            return
        gate = self._gate
        if gate is not None and gate.is_open and self._on_default_streams():
            self._reopened += not self._has_changed
            self._changed(rules_only=True)

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

    def _has_new_gate(self) -> bool:
        """Return whether the gate was built after kernels in Python had been registered."""
        forward, backward, use, _ = self.wanted
        return use is GateUse.CLOSED and self._gate is not None and (forward or backward or self._gates_plans())

    def step_ended(self, phases: AbstractSet[TuningPhase]) -> None:
        """Note what tuners do after a step; called until nothing is tried any more.

        Heuristic plans last from the first step on: only calls in which others are tried come to Python. But all do
        where they are watched. Whole steps are compared later. Plans last for some steps then, behind which the gate
        takes those that have changed. PyTorch's own kernels and others are compared in Python.
        """
        settled = phases == {TuningPhase.SETTLED}
        trying = _TRIES if self._planned is None else _TRIES_PLANS
        tries = not phases.isdisjoint(trying) and phases <= {*trying, TuningPhase.SETTLED}
        changes = sum(each.owner.changes for each in self._tuners.values() if each.owner is not None)
        if changes != self._changes:
            self._changes, self._reopens_at = changes, self._tracker.steps + STEPS_TO_PLAN
            self._has_changed = True
        if (settled, tries) != (self.is_settled, self._tries):
            self._lasts_since = self._tracker.steps
        self.is_settled, self._tries = settled, tries
        needs_gate = settled or (tries and self._tracker.by_optimizer)
        if self._planned is None:  # while others are tried, nothing is built, because the program may gain nothing
            needs_gate = tries and self._library is not None and self._library.is_built()
        if needs_gate:
            self.awaits_gate()

    def forget_modules(self) -> None:
        """Wait for no call of a module any more."""
        self._next_module.forget()

    def _wants(self) -> Wanted:
        tuners = list(self._tuners.values())
        if any(each.phase is TuningPhase.WATCHING for each in tuners) or not tuners:
            return Wanted(forward=True, backward=True)
        forward, backward = (each.replaces for each in self._tables)
        if self._gates_trials(tuners):  # from step to step, others are tried, and no operator is registered for that
            return Wanted(forward=True, backward=True, gate=GateUse.OVER_TRIALS)
        if self._needs_steps():  # calls by plans come to Python anyway, and may end steps there
            forward = True
        replaces = all(each.phase in (TuningPhase.COMPARING, TuningPhase.SETTLED) for each in tuners)
        gates = self._gates_plans() if self._planned is not None else replaces and (forward or backward)
        if not gates or self._gate is None:
            return Wanted(forward, backward)
        backward |= self._tries  # what is tried changes from step to step, and operators are not registered for that
        kernels = tuple(tuple(map(id, each.kernels.values())) * each.uses_adopted for each in tuners)
        return Wanted(forward, backward, GateUse.COMPUTES, kernels)

    def _refused(self, error: RuntimeError) -> None:
        _LOG.warning("calls that are passed on make a detour through Python: %s", error)
        self._library = None

    def _gates_trials(self, tuners: list[Tuner]) -> bool:
        """Return whether only calls come to Python in which something is tried; an optimizer must tell steps then."""
        if self._planned is not None or not self._tracker.by_optimizer or self._gate is None:
            return False
        return all(each.phase is TuningPhase.TRYING for each in tuners)

    @property
    def _gate(self) -> CallGate | None:
        return None if self._library is None else self._library.gate

    def _on_default_streams(self) -> bool:
        """Return whether this thread's current stream is the default one on each GPU of the program."""
        if self._planned is not None:
            return self._planned.on_default_streams()
        return all(map(on_default_stream, list(self._tuners)))

    def _plan_rules(self, planned: Interceptor) -> tuple[list[GateRule], list[GateRule]]:
        self._has_changed = False
        planned.has_unlent = not planned.on_default_streams()  # first, because another thread may call meanwhile
        calls = {} if planned.has_unlent else planned.cached_calls()
        distance = max(_LEAST_STEPS, len(calls) // _LOOKS_IN_A_STEP) << self._reopened
        self._reopens_at = self._tracker.steps + distance
        tried = [item for table in self._tables for item in list(table.calls.items())] if self._tries else []
        return plan_rules(calls, {look: call.aside for look, call in tried})

    def _needs_steps(self) -> bool:
        """Return whether forward calls by plans must tell steps: until all is settled, and the gate is open after it.

        An optimizer tells the gate when to open without them.
        """
        if self._planned is None or not self.is_settled:
            return self._planned is not None
        if self._library is None or self._planned.names.any or self._tracker.by_optimizer:
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
