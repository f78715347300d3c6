"""What a site decides from times: candidates are checked first, then timed in place, and adopted if they are faster."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configurations import in_parts
from tests.support.host_gpu import PROBLEM
from ucudnn.problem import Operation
from ucudnn.torch.trials.call_site import ENOUGH, CallSite, priority, ranked, sets_to_compare, worth_replacing
from ucudnn.torch.trials.candidate_list import FAILED, SLOW, WRONG, Candidate, CandidateState


def candidate(name, size=8):
    return Candidate(in_parts(name, size), 0)


def site_of(*candidates, baseline=1.0, calls=2):
    site = CallSite(PROBLEM)
    site.calls, site.baseline_ms, site.candidates = calls, [baseline] * 4, list(candidates)
    return site


def run(site, times, baseline=1.0, errors=None):
    """Do what a site asks for until it is finished; return the order of what it tried."""
    done = []
    while (trial := site.next_trial()) is not None:
        assert trial.estimate_ms > 0
        name = None if trial.candidate is None else trial.candidate.configuration.parts[0].algorithm
        done.append((name, trial.in_place))
        assert len(done) < 100
        if trial.candidate is None:
            site.sampled(None, baseline)
        elif trial.in_place:
            assert trial.candidate.state is CandidateState.CHECKED
            for _ in range(site.calls):
                site.sampled(trial.candidate, times[name])
        else:
            site.checked(trial.candidate, times[name], (errors or {}).get(name, 0.0), 1e-2)
    assert site.finished
    return done


def test_a_promising_candidate_is_timed_before_others_are_run_and_may_be_adopted_at_any_time():
    a, b = candidate("a"), candidate("b")
    site = site_of(a, b, calls=ENOUGH)
    site.checked(a, 0.5, 0.0, 1e-2)
    trial = site.next_trial()
    assert (trial.candidate, trial.in_place) == (a, True)
    site.conclude()
    assert site.adopted is None, "it was not timed yet"
    site.finished = False
    for _ in range(ENOUGH):
        site.sampled(a, 0.5)
    trial = site.next_trial()
    assert (trial.candidate, trial.in_place) == (b, False)
    site.conclude()
    assert site.adopted is a


@pytest.mark.parametrize(
    ("baseline", "first", "second", "state", "runs"),
    [
        (2.0, 4.0, 0.6, "checked", 2),
        (2.0, 4.0, 2.1, "rejected", 2),
        (2.0, 12.1, 0.6, "rejected", 1),  # no code takes so long to load
        (2.0, 1.9, 2.1, "checked", 1),
        (1.0, 4.0, 0.6, "rejected", 1),  # it has run before it was timed
    ],
)
def test_a_first_run_that_may_have_loaded_code_is_not_the_last_one(baseline, first, second, state, runs):
    one = candidate("a")
    site, times = site_of(one, baseline=baseline), iter([first, second])
    done = 0
    while (trial := site.next_trial()) is not None and not trial.in_place:
        site.checked(trial.candidate, next(times), 0.0, 1e-2)
        done += 1
    assert (one.state.value, done) == (state, runs)
    if state == "checked":
        assert one.rough_ms == min(first, second) < baseline


def test_a_candidate_that_fails_in_place_is_given_up():
    a = candidate("a")
    site = site_of(a)
    site.checked(a, 0.5, 0.0, 1e-2)
    site.sampled(a, 0.5)
    a.reject(FAILED)
    assert site.next_trial() is None
    assert site.finished
    assert site.adopted is None


def test_nothing_is_asked_while_results_are_awaited():
    site = site_of(candidate("a"))
    site.pending = 1
    assert site.next_trial() is None
    assert not site.finished


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 5), min_size=1),
    st.floats(0.1, 3),
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.02, float("nan"), float("inf")])),
)
def test_what_is_adopted_is_right_and_faster(times, baseline, wrong):
    site = site_of(*map(candidate, times), baseline=baseline)
    run(site, times, baseline, wrong)
    ran = {name: each for name, each in zip(times, site.candidates, strict=True) if each.state.value != "new"}
    for name, each in ran.items():
        is_slow = times[name] > baseline
        assert each.reason == (WRONG if name in wrong else SLOW if is_slow else "")
    right = [time for name, time in times.items() if name in ran.keys() - wrong]
    assert len(ran) >= min(3, len(times))
    if site.adopted is None:
        assert all(time > 0.96 * baseline for time in right)
        assert site.saved_ms == 0
    else:
        (name,) = (name for name, each in ran.items() if each is site.adopted)
        assert name not in wrong
        assert times[name] == min(right)
        assert times[name] <= 0.97 * baseline
        assert site.saved_ms == pytest.approx(baseline - times[name])
        assert len(site.adopted.samples_ms) >= ENOUGH


def test_candidates_that_promise_less_are_not_run_after_slow_ones_in_turn():
    names = dict.fromkeys("abcdefgh", 3.0) | {"b": 0.99}
    site = site_of(*map(candidate, names))
    done = run(site, names)
    assert {name for name, in_place in done if not in_place} == set("abcde"), "one that was not slow begins anew"
    assert site.adopted is None
    many = dict.fromkeys(map(chr, range(97, 97 + 18)), 3.0)
    assert len(run(site_of(*map(candidate, many)), many)) == 9, "half of many"


def run_ones(site, times):
    """Return the algorithms that were run beside PyTorch's own kernel, in their order."""
    return [name for name, in_place in run(site, times) if not in_place]


def test_of_many_candidates_three_of_a_kind_may_be_slow_and_other_engines_get_their_turn():
    names = [f"eng{engine}_k2={knob}" for engine in (65, 10, 33) for knob in range(-1, 5)]
    times = {name: 0.8 if name.startswith("eng33") else 1.5 for name in names}
    assert run_ones(site_of(*map(candidate, names)), times) == [*names[:3], *names[6:9], *names[12:]]
    few = names[5:7] + names[11:14]
    assert run_ones(site_of(*map(candidate, few)), times) == few[:3], "of few, three in turn"


def test_a_kind_of_which_one_is_fast_begins_anew():
    names = [f"eng65_k2={knob}" for knob in range(9)] + [f"eng9_k2={knob}" for knob in range(6)]
    times = dict(zip(names, [1.1, 1.1, 0.8, 1.1, 1.1, 1.1] + [0.1] * 3 + [1.2] * 6, strict=True))
    assert run_ones(site_of(*map(candidate, names)), times) == [*names[:6], *names[9:12]]


def test_micro_batches_and_sums_of_a_slow_engine_are_kinds_of_their_own():
    names = ["eng9_k2=1", "eng9_k2=1+rounded", *[f"a{number}" for number in range(10)]]
    both = [candidate(names[0]), candidate(names[0], 4), *map(candidate, names[1:])]
    assert len({each.kind for each in both}) == len(both)
    assert len(run_ones(site_of(*both), dict.fromkeys(names, 2.0))) == 6, "half of twelve and more"


def test_a_kernel_that_could_save_much_of_a_step_is_costly():
    site = site_of(baseline=2.0, calls=3)
    assert site.is_costly(199.0)
    assert not site.is_costly(201.0)
    site.floor_ms = 1.0
    assert not site.is_costly(199.0)


def test_the_twenty_costliest_kernels_are_costly_within_a_limit():
    sites = [site_of(baseline=1.0 + number, calls=1) for number in range(30)]
    found = ranked(sites, 1000.0)
    assert [each.rank for each in found] == list(range(len(found)))
    assert [each for each in found if each.is_costly(1e9, limited=True)] == sites[:-21:-1]
    assert not any(each.is_costly(1e9) for each in found)


def test_a_kernel_that_reads_and_writes_at_the_bandwidth_of_the_memory_is_not_worth_trying():
    site = site_of(baseline=1.0)
    touched = PROBLEM.x_bytes + PROBLEM.w_bytes + PROBLEM.y_bytes
    for bytes_per_ms, near in ((touched / 0.9, True), (touched / 0.5, False), (0.0, False)):  # 0: not known
        site.bound_by(bytes_per_ms)
        assert site.is_near_floor is near
        assert ranked([site], 10.0) == ([] if near else [site])


def test_kernels_that_could_save_most_come_first_and_not_those_that_take_most():
    slow, bound, short = sites = [site_of(baseline=each, calls=1) for each in (3.0, 5.0, 0.2)]
    touched = PROBLEM.x_bytes + PROBLEM.w_bytes + PROBLEM.y_bytes
    slow.floor_ms, bound.floor_ms, short.floor_ms = 0.1, 3.9, 0.19
    assert [each.hoped_ms for each in sites] == pytest.approx([2.9, 1.1, 0.01])
    assert ranked(sites, 10.0) == [slow, bound], "0.01 ms of 10 are nothing"
    assert sorted([bound, slow], key=priority) == [slow, bound]
    slow.bound_by(touched / 9.0)
    assert slow.hoped_ms == 0, "no time is less than nothing"


def test_kernels_are_replaced_only_where_a_pass_gains_more_than_its_detour():
    sites = [site_of(candidate("a"), calls=1) for _ in range(3)]
    sites[1].problem = sites[2].problem = replace(PROBLEM, operation=Operation.BACKWARD_DATA)
    for site, time in zip(sites, (0.9, 0.8, 0.5), strict=True):
        site.candidates[0].samples_ms = [time] * ENOUGH
        site.adopted = site.candidates[0]
    assert worth_replacing(sites, 10.0) == sites
    assert worth_replacing(sites, 100.0) == sites[1:], "0.1 ms of 100 is nothing"
    assert worth_replacing(sites, 1000.0) == []
    sites[2].baseline_ms = [0.5]
    assert worth_replacing(sites, 10.0) == sites[:2], "by later times it saves nothing"


def replaced(saved, calls=1, parts=1):
    """Return a site of which a candidate in some parts saves milliseconds in each call, and an undivided one half."""
    divided, whole = candidate("a", 8 // parts), candidate("b")
    site = site_of(divided, whole, baseline=10.0, calls=calls)
    divided.samples_ms, whole.samples_ms = [10.0 - saved] * ENOUGH, [10.0 - saved / 2] * ENOUGH
    site.adopted, site.undivided = divided, divided if parts == 1 else whole
    return site


def test_a_kernel_that_takes_the_host_more_than_it_saves_the_device_is_not_adopted():
    for host_ms, adopted in ((0.11, True), (0.19, True), (0.21, False)):
        slow = candidate("a")
        site = site_of(slow)
        for each in (0.3, 0.1, 0.2):  # the least counts, because something else may delay the host
            site.issued(None, each)
            site.issued(slow, each + host_ms - 0.1)
        run(site, {"a": 0.9})
        assert (site.adopted is slow) is adopted
        assert site.host_over_ms(site.adopted) == pytest.approx(host_ms - 0.1 if adopted else 0.0)


def test_a_fast_kernel_may_take_the_host_some_microseconds_and_an_unknown_time_counts_as_none():
    site = site_of(candidate("a"), baseline=0.05)
    site.issued(None, 0.02)
    run(site, {"a": 0.048}, baseline=0.05)
    assert site.adopted is not None
    assert site.host_over_ms(site.adopted) == 0
    site.issued(site.adopted, 0.0245)
    site.finished = False
    site.conclude()
    assert site.adopted is not None, "0.0045 ms of the host for 0.002 of the device"


def test_kernels_that_take_the_host_longest_for_what_they_save_are_not_replaced_beyond_what_it_may_take():
    cheap, dear, free = sites = [replaced(saved) for saved in (0.6, 0.5, 0.1)]
    for site, host_ms in zip(sites, (0.07, 0.08, 0.0), strict=True):
        site.issued(None, 0.1)
        site.issued(site.adopted, 0.1 + host_ms)
    assert worth_replacing(sites, 10.0) == [free, cheap, dear]
    assert worth_replacing(sites, 10.0, spares_host=True) == [free], "0.015 ms for 3 kernels"
    dear.host_ms = 0.131
    assert worth_replacing(sites, 10.0, spares_host=True) == [free, dear], "it saves ten times what it takes the host"
    dear.host_ms = 0.1
    for calls, replaces in ((28, [free, cheap, dear]), (26, [free, cheap])):  # 0.155 and 0.145 ms of the host
        assert worth_replacing([*sites, site_of(baseline=1.0, calls=calls)], 10.0, spares_host=True) == replaces


def test_the_few_kernels_that_save_most_are_compared_beside_all_of_them():
    large, small, many = replaced(4.0), [replaced(0.1) for _ in range(4)], replaced(0.5, calls=8)
    everything = {site: site.adopted for site in (large, *small, many)}
    assert sets_to_compare(list(everything)) == [everything, {large: large.adopted, many: many.adopted}]
    alike = {site: site.adopted for site in (replaced(1.0) for _ in range(4))}
    assert sets_to_compare(list(alike)) == [alike], "most of them save most of the time"
    assert sets_to_compare([]) == [{}, {}]


def test_kernels_of_one_launch_are_compared_where_others_have_more():
    whole, divided = replaced(1.0), replaced(1.0, parts=4)
    sets = sets_to_compare([whole, divided])
    assert sets == [
        {whole: whole.adopted, divided: divided.adopted},
        {whole: whole.adopted, divided: divided.undivided},
    ]
