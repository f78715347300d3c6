"""The course of tuning under a made-up program: what is tried, when plans change, and what whole steps decide."""

import gc
from collections import Counter
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configurations import in_parts
from tests.support.host_gpu import PROBLEM
from tests.support.made_up_gpu import MadeUpGpu
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.trial_ledger import TrialLedger
from ucudnn.torch.trials import kernel_maker as module
from ucudnn.torch.tuning.tuner import Tuner
from ucudnn.torch.tuning.tuning_report import report_tuning


class Timeline(MadeUpGpu):
    """A GPU with one clock."""

    def spend(self, time_ms, name=""):
        """Let a kernel run, or other work of the program."""
        self.now += time_ms


class TwoClocks(Timeline):
    """A host that launches kernels one after another, and a GPU that runs each once it is launched.

    The host is at most 100 ms ahead, as a queue of launches has an end.

    Args:
        launch_ms: time of the host for a launch.
        launches: how many launches a candidate takes, by name; others take one.
    """

    most_ahead_ms = 100.0

    def __init__(self, launch_ms, launches):
        super().__init__(late=1)
        self.host = 0.0
        self.delayed = []
        self.launch_ms = launch_ms
        self.launches = launches

    def spend(self, time_ms, name=""):
        parts = self.launches.get(name, 20 if not name else 1)  # other work of the program is many small kernels
        for _ in range(parts):
            self.host = max(self.host, self.now - self.most_ahead_ms) + self.launch_ms
            self.now = max(self.now, self.host) + time_ms / parts

    def mark(self):
        return max(self.now, self.host), self.step, self.host

    def has_reached(self, mark):
        return mark[0] <= self.host

    can_delay = True

    def delay(self, time_ms):
        self.delayed.append(time_ms)
        self.now = max(self.now, self.host) + time_ms
        return True

    def issue_ms(self, begin, end):
        return end[2] - begin[2]


class Listed:
    """Offers stated candidates at once."""

    def __init__(self, times):
        self.backend, self.failed, self.stopped = object(), False, False
        self.is_ready = self.is_complete = self.is_busy = False
        self._times = times
        self._found = []

    def open_one(self):
        self.is_ready = self.is_complete = True

    def ask(self, problem, headroom_bytes, *, costly, now_ms):
        assert headroom_bytes > 0
        assert now_ms > 0, "how long the kernel takes is known by then"
        sizes = {name: 4 if name == "divided" else 8 for name in self._times[problem.channels]}
        self._found.append((problem, [in_parts(name, size) for name, size in sizes.items()]))

    def pause(self, *, paused):
        pass

    def take(self):
        found, self._found = self._found, []
        return found

    def was_busy(self):
        return self.is_busy

    def keep(self, timed):
        self.kept = timed

    def stop(self):
        self.stopped = True

    def resume(self):
        self.stopped = False

    def join(self, seconds):
        pass


class Compiling(Listed):
    """Offers candidates some steps after they were asked for, and compiles meanwhile, unless it is paused.

    Args:
        times: as for `Listed`.
        steps: how many steps of the program the engines of one kernel take.
    """

    def __init__(self, times, steps):
        super().__init__(times)
        self.steps = steps
        self.paused = False
        self._asked = []
        self._left = 0
        self._passed = False

    def ask(self, problem, headroom_bytes, **others):
        self._left = self._left or self.steps
        super().ask(problem, headroom_bytes, **others)
        self._asked.append(self._found.pop())
        self.is_busy = not self.paused

    def pause(self, *, paused):
        self.paused = paused
        self.is_busy = bool(self._asked) and not paused

    def passed(self):
        """Note that a step has passed; return whether it was disturbed."""
        if not self._asked or self.paused:
            return False
        self._passed = True
        self._left -= 1
        if not self._left:
            self._found.append(self._asked.pop(0))
            self._left = self.steps if self._asked else 0
            self.is_busy = bool(self._asked)
        return True

    def was_busy(self):
        passed, self._passed = self._passed, False
        return passed or self.is_busy


MODEL = torch.nn.Identity()


class Course:
    """Steps of a program with one kernel for each number of channels.

    Args:
        baseline: milliseconds of PyTorch's own kernels, by number of channels.
        times: milliseconds of candidates, by number of channels and name.
        late: steps after which marks are read.
        side: milliseconds that each replaced kernel costs elsewhere in the step.
        idle: returns the milliseconds of the rest of a step, given its number.
        source: offers the candidates; None for one that offers them at once.
        program: the device; None for one with a single clock.
        clock: the host's, in seconds; None for one that stands still.
    """

    def __init__(
        self, baseline, times, late=1, side=0.0, idle=lambda step: 20.0, source=None, program=None, clock=None
    ):
        self.baseline, self.times, self.side, self.idle = baseline, times, side, idle
        self.program = program or Timeline(late)
        self.source = source or Listed(times)
        self.ledger = TrialLedger(0.05, lambda: self.program.now / 1e3)
        self.tuner = Tuner(self.program, self.source, self.ledger, clock=clock or (lambda: 0.0))
        self.problems = {each: replace(PROBLEM, channels=each, x_batch_stride=0) for each in baseline}
        self.worst_estimate = 0.0

    def step(self):
        tuner, program = self.tuner, self.program
        MODEL(None)
        for channels, problem in self.problems.items():
            site = tuner.site(problem)
            trial = tuner.trials.get(problem)
            kernel = trial and trial.kernel
            begin = program.mark()
            if tuner.uses_adopted and problem in tuner.kernels:
                name = tuner.kernels[problem].name
                program.spend(self.times[channels][name] + self.side, name)
            elif trial is not None and trial.in_place and kernel is not None:
                program.spend(self.times[channels][kernel.name], kernel.name)
                tuner.measured(site, trial.candidate, begin, program.mark())
            else:
                program.spend(self.baseline[channels], "baseline")
                if tuner.phase is TuningPhase.WATCHING:
                    tuner.watched(site, 1 << 20, begin, program.mark())
                elif trial is not None:
                    tuner.measured(site, None, begin, program.mark())
                    if kernel is not None:
                        middle = program.mark()
                        program.spend(self.times[channels][kernel.name], kernel.name)
                        tuner.measured(site, trial.candidate, middle, program.mark(), lambda: 0.0)
        program.spend(self.idle(program.step))
        program.step += 1
        tuner.step_ended(len(self.problems))

    def run(self, most=5000):
        for _ in range(most):
            self.step()
            if self.tuner.phase is TuningPhase.SETTLED:
                return self.tuner
            if self.tuner.trials:
                assert self.ledger.left_seconds >= -1e-9, "nothing is admitted beyond the share"
        pytest.fail("not settled")


@pytest.mark.parametrize(("launch_ms", "bounds"), [(1.5, True), (0.05, False)])
def test_a_program_that_its_host_bounds_is_left_alone(launch_ms, bounds):
    course = Course({4: 1.0, 5: 1.0}, {4: {"a": 0.1}, 5: {"a": 0.1}}, program=TwoClocks(launch_ms, {}))
    tuner = course.run()
    assert tuner.host_check.is_bound is bounds
    assert len(tuner.kernels) == (0 if bounds else 2)
    assert report_tuning("cpu", tuner).host_bound is bounds
    told = "waits for the host" in "\n".join(report_tuning("cpu", tuner).lines())
    assert told is bounds
    assert len(course.program.delayed) == 10
    assert course.program.delayed == pytest.approx([0.2 * tuner.step_ms] * 10, rel=0.2)
    if bounds:
        assert course.program.step < 100, "no longer than until the share of the time covers the delays"
        assert course.source.stopped
        assert not course.source.is_ready, "nothing was opened"
        assert all(site.candidates is None for site in tuner.sites.values()), "nothing was asked for"
        assert not any(site.baseline_ms for site in tuner.sites.values()), "nothing was timed"


def test_a_program_whose_inference_the_host_bounds_is_tuned_when_it_trains():
    program = TwoClocks(1.5, {})
    course = Course({4: 1.0, 5: 1.0}, {4: {"a": 0.1}, 5: {"a": 0.1}}, program=program)
    assert course.run().host_check.is_bound
    course.tuner.begin_anew(trains=True)
    program.launch_ms = 0.05
    tuner = course.run()
    assert not tuner.host_check.is_bound
    assert len(tuner.kernels) == 2
    assert len(program.delayed) == 20


def test_a_training_that_the_host_bounds_is_not_looked_at_again_after_each_evaluation():
    program = TwoClocks(1.5, {})
    course = Course({4: 1.0}, {4: {"a": 0.1}}, program=program)
    course.tuner.begin_anew(trains=True)
    assert course.run().host_check.is_bound
    for _ in range(3):
        course.tuner.begin_anew(trains=False)
        course.tuner.begin_anew(trains=True)
    assert course.tuner.phase is TuningPhase.SETTLED
    assert len(program.delayed) == 10


@pytest.mark.parametrize("trains", [False, True])
def test_steps_that_are_others_while_some_are_delayed_are_compared_anew(trains):
    program = TwoClocks(0.05, {})
    course = Course({4: 1.0, 5: 1.0}, {4: {"a": 0.1}, 5: {"a": 0.1}}, program=program)
    while len(program.delayed) < 7:
        course.step()
    assert course.tuner.phase is TuningPhase.HOST_CHECK
    assert course.tuner.is_quiet
    course.tuner.begin_anew(trains=trains)
    assert course.tuner.phase is TuningPhase.WARMING
    course.baseline = {4: 3.0, 5: 3.0}
    assert len(course.run().kernels) == 2
    assert len(program.delayed) == 17
    assert program.delayed[-1] > 1.1 * program.delayed[0], "it is a part of the steps that run now"
    assert course.ledger.lost_seconds < 0.05 * course.ledger.elapsed_seconds


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Let kernels only know their name."""
    monkeypatch.setattr(
        module,
        "TunedKernel",
        lambda problem, configuration, backend: SimpleNamespace(
            name=configuration.parts[0].algorithm, configuration=configuration, workspace_bytes=0, calls=0
        ),
    )


@pytest.mark.parametrize(("building_ms", "least", "most"), [(1.0, 8, 12), (6.0, 4, 4), (50.0, 2, 2)])
def test_kernels_are_made_together_where_they_are_made_quickly_and_each_of_them_once(
    monkeypatch, building_ms, least, most
):
    channels, now, made, kept = range(4, 16), [0.0], [], WeakSet()

    class Kernel:
        def __init__(self, problem, configuration, backend):
            now[0] += building_ms / 1e3
            self.configuration, self.name = configuration, configuration.parts[0].algorithm
            made.append((course.program.step, problem.channels, self.name))
            kept.add(self)

    monkeypatch.setattr(module, "TunedKernel", Kernel)
    times = {each: {"a": 9.0, "b": 5.0, "c": 8.0} for each in channels}
    course = Course(dict.fromkeys(channels, 10.0), times, idle=lambda step: 1000.0, clock=lambda: now[0])
    course.run()
    assert {each.name for each in course.tuner.kernels.values()} == {"b"}
    gc.collect()
    assert set(kept) == set(course.tuner.kernels.values()), "what is not adopted is not kept"
    assert least <= max(Counter(step for step, *_ in made).values()) <= most
    assert sorted(made_of for _, *made_of in made) == sorted([each, name] for each in channels for name in "abc")
    assert course.tuner.host_seconds["building"] == pytest.approx(len(made) * building_ms / 1e3)


@pytest.mark.parametrize("late", [0, 1, 4])
def test_each_kernel_is_replaced_by_its_fastest_candidate_however_late_times_are_read(late):
    course = Course({4: 2.0, 5: 1.0, 6: 3.0}, {4: {"a": 1.5, "b": 1.0}, 5: {"a": 1.1}, 6: {"c": 2.0}}, late=late)
    tuner = course.run()
    assert {problem.channels: kernel.name for problem, kernel in tuner.kernels.items()} == {4: "b", 6: "c"}
    assert tuner.gain == pytest.approx((20 + 1 + 1 + 2) / 26)
    assert tuner.uses_adopted
    assert {(problem.channels, each.parts[0].algorithm) for problem, each, _ in course.source.kept} == {
        (4, "a"),
        (4, "b"),
        (6, "c"),
    }
    assert course.source.stopped


def test_a_long_first_step_does_not_fill_the_steps_behind_it_with_trials():
    channels = range(4, 24)
    times = {each: {"a": 4.9, "b": 4.8, "c": 4.7} for each in channels}
    course = Course(dict.fromkeys(channels, 5.0), times, idle=lambda step: 20.0 if step else 30e3)
    course.step()
    usual_ms, steps = 20.0 + 5.0 * len(channels), []
    for _ in range(100):
        before = course.program.now
        course.step()
        steps.append(course.program.now - before)
    lost = [max(0.0, each - usual_ms) for each in steps]
    assert sum(lost) > usual_ms, "little was tried"
    for count in range(1, len(steps)):
        assert sum(lost[:count]) <= 0.05 * sum(steps[:count]) + 0.25 * usual_ms, count


def test_whole_steps_decide_even_if_each_kernel_is_faster():
    tuner = Course({4: 2.0, 5: 2.0}, {4: {"a": 1.5}, 5: {"a": 1.5}}, side=1.0).run()
    assert tuner.gain > 1
    assert not tuner.kernels
    assert not tuner.uses_adopted


def test_ranks_try_in_the_same_steps_however_different_their_clocks_are_and_in_a_third_of_them_at_most():
    tried = []
    for slower in (1.0, 1.3):
        course = Course({4: 2.0 * slower, 5: 1.0}, {4: {"a": 1.5, "b": 1.0}, 5: {"a": 0.5}}, late=int(slower > 1))
        steps = set()
        while course.tuner.phase is not TuningPhase.SETTLED:
            course.step()
            if course.tuner.trials:
                steps.add(course.program.step)
            assert course.program.step < 5000
        tried.append(steps)
        assert {problem.channels for problem in course.tuner.kernels} == {4, 5}
    assert len(tried[0]) > 3
    assert len({step % 3 for steps in tried for step in steps}) == 1


@pytest.mark.parametrize("behind", [1, 2])
def test_what_trials_cost_the_host_in_the_steps_behind_them_stays_within_the_share(behind):
    baseline = {4 + number: 1.5 for number in range(20)}
    course = Course(baseline, {each: {"a": 1.8, "b": 1.3, "c": 0.8} for each in baseline})
    tried_at = [-9]

    def idle(step):  # of a program whose host is nearly as slow as its device
        if course.tuner.trials:
            tried_at.append(step)
        return 20.0 if step - tried_at[-1] <= behind else 10.0

    course.idle = idle
    tuner = course.run()
    assert len(tuner.kernels) == 20
    assert {each.name for each in tuner.kernels.values()} == {"c"}
    slower_ms = 10.0 * len({step + late for step in tried_at[1:] for late in range(behind + 1)})
    candidates_ms = sum(sum(each.samples_ms) for site in tuner.sites.values() for each in site.candidates)
    assert slower_ms > 1000
    assert slower_ms + candidates_ms <= 0.055 * course.ledger.elapsed_seconds * 1e3, "what the program has really lost"
    assert course.tuner.step_ms == pytest.approx(40.0), "no slow step is taken for one of the program's own"


def test_some_steps_rest_so_that_the_programs_own_pace_is_known_while_much_is_tried():
    baseline = {4 + number: 1.0 for number in range(60)}
    course = Course(baseline, {each: {"a": 1.2, "b": 0.9, "c": 0.5} for each in baseline})
    course.ledger._share = 1.0  # nothing else keeps trials from steps
    course.idle = lambda step: 40.0 if step < 40 else 20.0
    tried, paces = [], set()
    while course.tuner.phase is not TuningPhase.SETTLED:
        if course.tuner.phase is TuningPhase.TRYING:
            tried.append(bool(course.tuner.trials))
            paces.add(course.tuner.step_ms)
        course.step()
    assert {80.0, 100.0} <= paces <= {80.0, 90.0, 100.0}
    spans = [len(list(steps)) for is_tried, steps in groupby(tried) if not is_tried]
    assert max(spans) >= 8, "between them, there are two steps without trials"
    assert sum(tried) > 0.25 * len(tried)
    assert len(course.tuner.kernels) == 60


@pytest.mark.parametrize("pace", [lambda step: 20.0, lambda step: 20.0 if step < 12 else 24.0], ids=["even", "slower"])
def test_threads_that_disturb_the_program_stay_within_the_share_and_keep_no_trial_waiting(pace):
    baseline = {4 + number: 2.0 for number in range(8)}
    source = Compiling({each: {"a": 1.5, "b": 1.0} for each in baseline}, steps=60)
    course = Course(baseline, source._times, source=source)
    course.idle = lambda step: pace(step) + (6.0 if source.passed() else 0.0)  # of a program that its host bounds
    worst = 0.0
    while course.tuner.phase is not TuningPhase.SETTLED:
        course.step()
        if course.ledger.elapsed_seconds > 2:
            worst = max(worst, course.ledger.lost_seconds / course.ledger.elapsed_seconds)
        assert course.program.now < 120e3, "two minutes"
    assert worst < 0.06, "the share, and one step that was longer than estimated"
    assert {each.name for each in course.tuner.kernels.values()} == {"b"}
    assert len(course.tuner.kernels) == 8, "the largest gains come first, and all are found in time"


def test_a_thread_that_holds_up_one_step_and_has_built_by_its_end_is_charged_with_it():
    source = Compiling({4: {"a": 1.5}}, steps=4)
    course = Course({4: 2.0}, source._times, source=source)

    def until_built(step):
        is_last = source._left == 1
        return 520.0 if source.passed() and is_last else 20.0

    course.idle = until_built
    course.run()
    assert course.ledger.lost_seconds == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("launch_ms", "chosen"), [(0.01, "divided"), (1.25, "whole")], ids=["by the GPU", "by the host"]
)
def test_a_program_that_its_host_bounds_gets_plans_with_few_launches(launch_ms, chosen):
    program = TwoClocks(launch_ms, {"divided": 16})
    course = Course({4: 8.0, 5: 8.0}, {each: {"divided": 2.0, "whole": 4.0} for each in (4, 5)}, program=program)
    tuner = course.run()
    assert {each.name for each in tuner.kernels.values()} == {chosen}, "marks see how long a kernel waits for its host"
    for problem, kernel in tuner.kernels.items():
        assert tuner.sites[problem].adopted.configuration is kernel.configuration, "what the report shows runs"


@pytest.mark.parametrize(
    ("launch_ms", "replaced"), [(1e-4, 2), (0.005, 0), (0.02, 0)], ids=["few", "what it saves", "more than it saves"]
)
def test_kernels_that_take_the_host_too_long_for_what_they_save_do_not_replace_any(launch_ms, replaced):
    program = TwoClocks(launch_ms, {"grouped": 24})

    def wait_for_gpu(step):
        program.spend(20.0)
        program.host = max(program.host, program.now)
        return 0.0

    times = {each: {"grouped": 1.7} for each in (4, 5)}
    tuner = Course({4: 2.0, 5: 2.0}, times, program=program, idle=wait_for_gpu).run()
    assert not tuner.host_check.is_bound
    assert len(tuner.kernels) == replaced, "the GPU is faster by them, and never waits for the host"
    assert all(len(each.candidates[0].samples_ms) >= 5 for each in tuner.sites.values())


def test_time_in_which_the_host_waits_for_a_place_in_the_queue_is_not_taken_for_that_of_a_launch():
    program = TwoClocks(1e-4, {"grouped": 24})
    tuner = Course({4: 2.0, 5: 2.0}, {each: {"grouped": 1.7} for each in (4, 5)}, program=program).run()
    assert program.host < program.now - 90, "it is as far ahead as it may be"
    assert len(tuner.kernels) == 2


def test_the_report_shows_the_kernels_that_run_while_divided_ones_are_compared_with_undivided_ones():
    course, seen = Course({4: 8.0, 5: 8.0}, {each: {"divided": 2.0, "whole": 4.0} for each in (4, 5)}), set()
    while course.tuner.phase is not TuningPhase.SETTLED:
        course.step()
        for each in report_tuning("cuda:0", course.tuner).kernels:
            assert each.parts == (2 if "divided" in each.configuration else 1)
            assert each.time_ms == pytest.approx(2.0 if "divided" in each.configuration else 4.0)
            seen.add(each.parts)
            assert {kernel.name for kernel in course.tuner.kernels.values()} == {each.configuration.split()[1]}
    assert seen == {1, 2}


times = st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 20), max_size=4)


@given(st.lists(st.tuples(st.floats(0.5, 5), times), min_size=1, max_size=4), st.integers(0, 3))
def test_a_settled_program_is_never_slower_and_trials_stay_within_their_share(kernels, late):
    baseline = {4 + number: time for number, (time, _) in enumerate(kernels)}
    offered = {4 + number: found for number, (_, found) in enumerate(kernels)}
    course = Course(baseline, offered, late=late)
    tuner = course.run()
    before = course.program.now
    course.step()
    assert course.program.now - before <= 20 + sum(baseline.values()) + 1e-9
    slowest = sum(max(found.values(), default=0.0) for found in offered.values())
    assert course.ledger.lost_seconds <= 0.05 * course.ledger.elapsed_seconds + slowest / 1e3
    for channels, found in offered.items():
        run = [time for number, time in enumerate(found.values()) if number < 3]  # the others wait for a fast one
        saved = [each.saved_ms * each.calls for each in tuner.sites.values() if each.adopted is not None]
        if run and min(run) < 0.9 * baseline[channels] and sum(saved) > 0.01 * tuner.step_ms:
            assert course.problems[channels] in tuner.kernels
