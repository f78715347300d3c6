"""The course of tuning on one device: watch PyTorch's own steps, try candidates, compare whole steps, and settle."""

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, final

from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.device.memory_limit import MemoryWatch, StatedHeadroom
from ucudnn.torch.device.timed_device import TimedGpu
from ucudnn.torch.steps.host_bound_check import HostBoundCheck
from ucudnn.torch.steps.phase import Transition, TuningPhase, next_phase
from ucudnn.torch.steps.step_comparison import KernelSet, StepComparison
from ucudnn.torch.steps.step_times import StepTimes
from ucudnn.torch.steps.trial_ledger import TrialLedger
from ucudnn.torch.trials.call_site import CallSite, priority, ranked, sets_to_compare, timed, worth_replacing
from ucudnn.torch.trials.candidate_list import Candidate, Trial
from ucudnn.torch.trials.candidate_source import CandidateSource
from ucudnn.torch.trials.kernel_maker import KernelMaker
from ucudnn.torch.trials.readings import Reading, Readings
from ucudnn.torch.tuning.plan_owner import UNSTEADY_STEPS, PlanOwner
from ucudnn.units import bytes_down, bytes_up
from ucudnn.workspace.spare import own_bytes

_LOG = logging.getLogger("ucudnn.torch")

_SETTLED = "%d of %d kinds of kernels were replaced%s; tried for %.1f s, lost %.2f s"
_WATCH_COST_SECONDS = 60e-6  # of the host, for each call that is watched
_OPENING_SECONDS, _LISTING_SECONDS = 0.1, 0.05  # of the host, for a handle of cuDNN, and for its heuristics
_WARM_STEPS, _TYPICAL_STEPS, _WATCHED_STEPS = 5, 3, 2  # warm ones come before those that are watched; two are untypical
_MOST_UNWATCHED = 64  # steps that run on other streams
_MOST_SECONDS, _MOST_STEPS = 90.0, 3000  # of trying
_MOST_AT_ONCE, _TRIAL_STRIDE = 16, 3  # trials in one step, and steps of which one may have trials
_REST_STRIDE, _REST_STEPS = 72, 9  # steps of which the first ones have no trials, and tell the program's own pace
_WORK = "opening", "listing", "building"
_LEAST_MADE, _QUICK_SECONDS = 2, 0.02  # kernels in one step, and the host's time in which further ones are made
_GUARDED_STEPS, _SLACK_BYTES = 16, 2 << 20  # between looks at the peak; a program's small tensors come and go
_MOST_ASKED, _MOST_KNOWN = 4, 1 << 13  # kernels whose candidates are looked for at a time, and problems


@final
class Tuner:
    """Decides what runs in each step on one device; calls tell it what they measured. Nothing changes within a step.

    Args:
        program: the device.
        source: finds candidates.
        ledger: bounds the time that is lost.
        owner: of the plans within a stated limit; None where PyTorch computes what is not tried.
        clock: the host's, in seconds.

    Attributes:
        watch: the memory of PyTorch's own steps.
        trials: what is tried in this step, by problem.
        kernels: the adopted kernels, by problem.
        epoch: changes when the free blocks at calls may have changed.
        host_seconds: time of the program's own thread between steps: for handles of cuDNN ('opening'), for lists of
            candidates ('listing'), for plans ('building'), and for the slowest plan ('slowest').
        gain: time of a step with adopted kernels over PyTorch's own; None if that was not compared.
        awaits: returns whether the gate is being built, so that the comparison waits for it.
        gated: returns whether calls by heuristic plans cost what they do once all is settled; None if they may soon.
    """

    def __init__(
        self,
        program: TimedGpu,
        source: CandidateSource,
        ledger: TrialLedger,
        owner: PlanOwner | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.program = program
        self.source = source
        self.ledger = ledger
        self.phase = TuningPhase.WARMING
        self.sites: dict[ConvolutionProblem, CallSite] = {}
        self.watch: MemoryWatch | StatedHeadroom = MemoryWatch() if owner is None else owner.headroom
        self.owner = owner
        self.uses_adopted = False
        self.trials: dict[ConvolutionProblem, Trial] = {}
        self.kernels: KernelSet = {}
        self.epoch = 0
        self.gain: float | None = None
        self.awaits: Callable[[], bool] = lambda: False
        self.gated: Callable[[], bool | None] = lambda: False
        self.host_seconds = dict.fromkeys(("opening", "listing", "building", "slowest"), 0.0)
        self._trains = self._watched_training = False
        self._times = StepTimes(program, ledger, lambda: sum(map(self.host_seconds.__getitem__, _WORK)))
        self._readings = Readings(program, self._times.ran)
        unsteady, certain = (1, True) if owner is None else (UNSTEADY_STEPS, False)
        self._new_comparison = partial(StepComparison, self._times, must_be_certain=certain, unsteady_steps=unsteady)
        self._comparison = self._new_comparison()
        self.host_check = HostBoundCheck(program, self._times, ledger)
        self._phase_steps = self._away_steps = self._held_bytes = self._calls = 0
        self._tried_since = self._paused_at = 0.0
        self._maker = KernelMaker(source, clock)
        self._clock = clock
        self._ranked: list[CallSite] | None = None  # that are not decided yet
        self._settled_steps = self._allowed_bytes = 0
        self._asked: dict[ConvolutionProblem, bool] = {}  # whether the answer is awaited

    @property
    def step_ms(self) -> float:
        """Median time of the latest steps of PyTorch's own; 0 if none is known."""
        return self._times.typical_ms

    @property
    def replaced(self) -> KernelSet:
        """The adopted kernels that run in this step, by problem."""
        return self.kernels if self.uses_adopted else {}

    def site(self, problem: ConvolutionProblem) -> CallSite:
        """Return what is known of a problem; nothing grows once all is settled, however many shapes a program has."""
        found = self.sites.get(problem)
        if found is None:
            found = CallSite(problem)
            if self.phase is not TuningPhase.SETTLED and len(self.sites) < _MOST_KNOWN:
                self.sites[problem] = found
        return found

    def watched(self, site: CallSite, live_bytes: int, begin: Any, end: Any) -> None:
        """Note a call of PyTorch's own kernel: the live bytes with its output, and the marks around it."""
        self.watch.called(live_bytes)
        site.calls += 1
        site.headroom_bytes = min(site.headroom_bytes, -live_bytes)  # becomes headroom when the peak is known
        self.measured(site, None, begin, end)

    def measured(
        self,
        site: CallSite,
        candidate: Candidate | None,
        begin: Any,
        end: Any,
        distance: Callable[[], float] | None = None,
    ) -> None:
        """Note marks around a kernel; they are read at the end of a later step."""
        if self.owner is None and self._times.is_in_step():
            site.issued(candidate, self.program.issue_ms(begin, end))
        self._readings.add(Reading(site, candidate, begin, end, distance))

    def step_ended(self, calls: int) -> None:
        """End a step: read what has been measured by now, and decide what the next one does."""
        if self.phase is TuningPhase.SETTLED:  # another device is still at work, or the peak has grown
            return
        self._calls = calls
        self._phase_steps += 1
        away = self.program.was_away()
        self._away_steps += away
        self.epoch += away  # another stream has other free blocks
        compared = self.host_check if self.phase is TuningPhase.HOST_CHECK else self._comparison
        differs, first = bool(self._comparison.running) or self.host_check.delays, compared.turns.begins_block
        self._times.ended(self.phase, differs=differs, first=first, busy=self.source.was_busy())
        if self.phase in (TuningPhase.WARMING, TuningPhase.WATCHING):
            self.watch.step_ended(self.program.peak_bytes())
        self._readings.read()
        self._times.read()
        transition = {
            TuningPhase.WARMING: self._warm,
            TuningPhase.HOST_CHECK: self._check_host,
            TuningPhase.OPENING: self._open,
            TuningPhase.WATCHING: self._watch,
            TuningPhase.TRYING: self._try,
            TuningPhase.COMPARING: self._compare,
        }[self.phase]()
        if transition is not None:
            self._enter(transition)

    def begin_anew(self, *, trains: bool) -> None:
        """Take the steps that follow for others, whose time is not known.

        What was watched or decided in inference lacks the gradients of a training that follows, and its peak. So all
        begins again if the program trains from now on.
        """
        self._times.begin_anew()
        self._trains = trains
        self._watched_training &= trains or self.phase is not TuningPhase.WATCHING
        if self.phase is TuningPhase.HOST_CHECK:
            self._warm_anew()
        elif trains and not self._watched_training and self.phase not in (TuningPhase.WARMING, TuningPhase.OPENING):
            self.trials, self._ranked, self._asked, self._comparison = {}, None, {}, self._new_comparison()
            self._run_compared()
            self._readings.forget()
            for site in self.sites.values():
                site.forget()
            self.source.resume()
            self._warm_anew()

    def pause(self) -> None:
        """End the work in the background, because the program is not followed any more."""
        self._paused_at = self.ledger.elapsed_seconds
        self.source.stop()
        if self.phase is TuningPhase.HOST_CHECK:
            self._warm_anew()

    def resume(self) -> None:
        """Go on after a pause; what was asked for and not answered is asked for again."""
        self._times.interrupted()
        self._tried_since += self.ledger.elapsed_seconds - self._paused_at
        if self.phase not in (TuningPhase.COMPARING, TuningPhase.SETTLED):
            self.source.resume()
            self._asked = {problem: False for problem, awaited in self._asked.items() if not awaited}

    @property
    def is_quiet(self) -> bool:
        """Whether all calls of this step are passed on, and nothing is timed."""
        return self.phase is not TuningPhase.WATCHING and not self.trials and not self.uses_adopted

    @property
    def _is_turn(self) -> bool:
        """Whether the next step may have trials: a third of them, in all ranks the same, once usual steps are known."""
        return self._times.count % _TRIAL_STRIDE == 0 and self._times.typical_count >= _TYPICAL_STEPS

    def keeps_peak(self) -> bool:
        """Return whether the peak of memory is what it was before kernels were replaced; if not, give them up.

        It is looked at in some of the steps. The program itself may need more memory by now, so what was learned about
        its headroom does not hold any more.
        """
        self._settled_steps += self.uses_adopted
        if not self.uses_adopted or self._settled_steps % _GUARDED_STEPS:
            return True
        peak = self.program.peak_bytes()
        if peak <= self._allowed_bytes + _SLACK_BYTES:
            return True
        grown = bytes_down(self._allowed_bytes), bytes_up(peak)
        _LOG.warning("the peak of memory grew from %s to %s: PyTorch's own kernels run again", *grown)
        self.kernels, self.uses_adopted = {}, False
        return False

    def _enter(self, transition: Transition) -> None:
        self.phase, self._phase_steps, self._away_steps = next_phase(self.phase, transition), 0, 0
        if self.phase is TuningPhase.SETTLED:
            self._settle()

    def _warm(self) -> Transition | None:
        if self._times.count < _WARM_STEPS or self._times.typical_count < _TYPICAL_STEPS or not self._calls:
            return None
        self.ledger.begin()
        checks = self.owner is None or self.owner.checks_host(gated=self.gated(), steps=self._phase_steps)
        if checks and self.host_check.begin():
            return Transition.STEADY
        return Transition.UNCHECKED if checks is False or self.host_check.is_over else None

    def _warm_anew(self) -> None:
        self.host_check.give_up()
        self.host_check = HostBoundCheck(self.program, self._times, self.ledger)
        self._enter(Transition.OTHER_STEPS)

    def _check_host(self) -> Transition | None:
        self.host_check.step_ended()
        if not self.host_check.is_bound:
            return Transition.DEVICE_BOUND if self.host_check.is_over else None
        self._watched_training = self._trains
        self.source.stop()
        return Transition.HOST_BOUND

    def _open(self) -> Transition | None:
        if not self._is_turn:
            return None
        if self.source.failed:
            return Transition.FAILED
        if not self.source.is_ready:
            self._open_one()
        elif self._times.reserve(self._calls * _WATCH_COST_SECONDS):
            self._watched_training = self._trains
            return Transition.OPENED
        return None

    def _open_one(self) -> None:
        """Open a part of what finds candidates, at the beginning of a step, which is charged with it."""
        if self._times.reserve(_OPENING_SECONDS):
            begin = self._clock()
            self.source.open_one()
            self.host_seconds["opening"] += self._clock() - begin

    def _watch(self) -> Transition | None:
        if self._phase_steps < _WATCHED_STEPS + min(self._away_steps, _MOST_UNWATCHED):
            self._times.reserve(self._calls * _WATCH_COST_SECONDS)
            return None
        bytes_per_ms = self.program.bytes_per_ms()
        for site in self.sites.values():
            site.bound_by(bytes_per_ms)
            site.headroom_bytes = self.watch.headroom(-int(site.headroom_bytes)) if site.calls else 0
            site.calls = -(-site.calls // _WATCHED_STEPS)
            site.finished = self.owner is not None and self.owner.is_final(site.problem)
        self._tried_since = self.ledger.elapsed_seconds - self._times.paused_seconds
        return Transition.WATCHED

    def _try(self) -> Transition | None:
        self.trials = {}
        rests = self._times.count % _REST_STRIDE < _REST_STEPS  # in all ranks the same steps
        if (has_new_plans := self.owner is not None and self.owner.has_new_plans()) or rests:
            self.source.pause(paused=True)  # plans wait while a thread compiles; a rest is undisturbed
        self._tried_since += self.step_ms / 1e3 * rests
        if rests or not self._is_turn or (not self._asked and self._readings):
            return None  # it is another step's turn, or what was watched is not read yet
        if self._ranked is None:
            self._ranked = ranked(self.sites.values(), self.step_ms)
        sites = self._ranked = [each for each in self._ranked if not each.finished]
        for problem, configurations in self.source.take():
            self._asked[problem] = False
            self.sites[problem].offer(Candidate(each, own_bytes(problem, each)) for each in configurations)
        tried_seconds = self.ledger.elapsed_seconds - self._tried_since - self._times.paused_seconds
        if tried_seconds > _MOST_SECONDS or self._phase_steps > _MOST_STEPS or self.source.failed or not sites:
            waits_for_gate = any(site.adopted for site in self.sites.values()) and self.awaits()
            return None if waits_for_gate else self._end_trying()
        if not self.source.is_complete:
            self._open_one()
        self._ask(sites)
        waits = has_new_plans or self.ledger.left_seconds <= 0 or not self._choose_trials(sites)
        self.source.pause(paused=waits)  # or what threads disturb would use up what trials wait for
        return None

    def _choose_trials(self, sites: list[CallSite]) -> bool:
        """Choose what is tried in the next step, and return whether the share of the time covers the best trial.

        Free blocks are looked up again if memory was taken from the device, or given back to it.
        """
        held = self.program.reserved_bytes()
        self.epoch, self._held_bytes = self.epoch + (held != self._held_bytes), held
        made, before = 0, self._maker.seconds
        for site in sorted(sites, key=priority):
            trial = site.next_trial()
            if trial is None:
                continue
            seconds = self._maker.needed_seconds(site, trial.candidate)
            is_slow = self._maker.seconds - before >= _QUICK_SECONDS
            if seconds and ((made >= _LEAST_MADE and is_slow) or not self._maker.may_make()):
                continue
            if len(self.trials) >= _MOST_AT_ONCE or not self._times.reserve(seconds + trial.estimate_ms / 1e3):
                return bool(self.trials)  # smaller kernels wait, or they would use up what the larger one waits for
            made += seconds > 0
            trial.kernel = None if trial.candidate is None else self._maker.made(site, trial.candidate)
            if trial.candidate is None or trial.kernel is not None:
                self.trials[site.problem] = trial
            self.host_seconds.update(building=self._maker.seconds, slowest=self._maker.slowest_seconds)
        return True

    def _ask(self, sites: list[CallSite]) -> None:
        """Ask for the candidates of few kernels at a time, because listing and building disturb the program."""
        if not self._maker.may_make() or (self._maker.waits and any(site.has_new for site in sites)):
            return
        missing = [site for site in sites if site.problem not in self._asked]
        for site in missing[: max(0, _MOST_ASKED - sum(self._asked.values()))]:
            # Heuristics are asked twice about a problem with a bias: with the addition, and without it.
            if self._times.reserve(_LISTING_SECONDS * (1 + site.problem.biased)):
                begin = self._clock()
                self._asked[site.problem] = True
                costly = site.is_costly(self.step_ms, limited=self.owner is not None)
                self.source.ask(site.problem, int(site.headroom_bytes), costly=costly, now_ms=site.baseline_median_ms)
                self.host_seconds["listing"] += self._clock() - begin

    def _end_trying(self) -> Transition:
        self._watched_training &= self._trains
        self.source.keep(timed(self.sites.values()))
        self.source.stop()
        for site in self.sites.values():
            site.conclude()
        chosen = worth_replacing(self.sites.values(), self.step_ms, spares_host=self.owner is None)
        self._comparison.begin([self._maker.all_made(each) for each in sets_to_compare(chosen)])
        self._run_compared()
        return Transition.NOTHING_FASTER if self._comparison.is_over else Transition.TRIED

    def _compare(self) -> Transition | None:
        self._comparison.step_ended()
        self._run_compared()
        if not self._comparison.is_over:
            return None
        self.gain = self._comparison.gain
        for problem, kernel in self.kernels.items():
            site = self.sites[problem]
            if site.undivided is not None and site.undivided.configuration is kernel.configuration:
                site.adopted = site.undivided
        return Transition.COMPARED

    def _run_compared(self) -> None:
        """Let the kernels of the comparison run in the next step if it is their turn; plans are the owner's."""
        running, self.kernels = self._comparison.running, self._comparison.kernels
        self.uses_adopted = bool(running) and self.owner is None
        if self.owner is not None:
            self.owner.turn_to(running)

    def _settle(self) -> None:
        self._watched_training &= self._trains
        self.uses_adopted = bool(self.kernels) and self.owner is None
        if self.owner is not None:
            self.owner.adopt(self.sites[problem] for problem in self.kernels)
        self.trials = {}
        self._maker.forget()
        self._settled_steps, self._allowed_bytes = 0, max(self.watch.peak_bytes, self.program.peak_bytes())
        gain, ledger = "" if self.gain is None else f", a step takes {self.gain:.3f} of the time before", self.ledger
        _LOG.info(_SETTLED, len(self.kernels), len(self.sites), gain, ledger.elapsed_seconds, ledger.lost_seconds)
