"""Kernels are made where that does not keep the program waiting."""

from types import SimpleNamespace

import pytest

from tests.support.configurations import in_parts
from tests.support.host_gpu import PROBLEM
from ucudnn.errors import CudnnError
from ucudnn.torch.trials import kernel_maker as module
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import FAILED, SLOW_PLAN, Candidate
from ucudnn.torch.trials.kernel_maker import KernelMaker


def candidate(name):
    return Candidate(in_parts(name), 0)


@pytest.fixture
def making(monkeypatch):
    """Return a maker, its source, and the seconds that each algorithm takes."""
    source = SimpleNamespace(backend=object(), is_busy=False)
    seconds, now = {}, [0.0]

    def kernel(problem, configuration, backend):
        name = configuration.parts[0].algorithm
        now[0] += seconds.get(name, 0.001)
        if name == "broken":
            raise CudnnError("no plan")
        return SimpleNamespace(configuration=configuration)

    monkeypatch.setattr(module, "TunedKernel", kernel)
    return KernelMaker(source, lambda: now[0]), source, seconds


def test_the_latest_kernel_of_a_problem_is_kept(making):
    maker, _, _ = making
    site, one = CallSite(PROBLEM), candidate("a")
    assert maker.needed_seconds(site, one) > 0
    kernel = maker.made(site, one)
    assert maker.made(site, one) is kernel
    assert maker.needed_seconds(site, one) == maker.needed_seconds(site, None) == 0
    assert maker.made(site, candidate("a")) is not kernel


def test_kernels_of_candidates_that_are_timed_are_kept_until_all_is_forgotten(making):
    maker, _, _ = making
    site = CallSite(PROBLEM)
    site.baseline_ms, site.candidates = [10.0], [candidate(name) for name in "abcd"]
    kernels = []
    for rough_ms, each in enumerate(site.candidates):
        kernels.append(maker.made(site, each))
        site.checked(each, 1.0 + rough_ms, 0.0, 0.01)
    first, second, third, fourth = site.candidates
    assert site.fastest == [first, second]
    assert [maker.made(site, each) for each in (first, second, fourth)] == [kernels[0], kernels[1], kernels[3]]
    assert maker.needed_seconds(site, third) > 0, "it does not run again"
    maker.forget()
    assert maker.needed_seconds(site, first) > 0


def test_what_cannot_be_made_is_given_up(making):
    maker, _, _ = making
    broken = candidate("broken")
    assert maker.made(CallSite(PROBLEM), broken) is None
    assert broken.reason == FAILED


def test_an_algorithm_whose_plan_took_long_is_not_made_again(making):
    maker, _, seconds = making
    seconds["a"] = 0.9
    site = CallSite(PROBLEM)
    assert maker.made(site, candidate("a")) is not None
    assert maker.slowest_seconds == pytest.approx(0.9)
    again = candidate("a")
    assert maker.made(site, again) is None
    assert again.reason == SLOW_PLAN
    assert maker.may_make()


def test_an_engine_of_which_two_plans_took_long_is_left_alone(making):
    maker, _, seconds = making
    site = CallSite(PROBLEM)
    seconds |= {"eng7_k2=1": 0.9, "eng7_k2=2": 0.9, "eng8_k2=1": 0.9}
    assert maker.made(site, candidate("eng7_k2=1")) is not None
    assert maker.made(site, candidate("eng8_k2=1")) is not None
    assert maker.made(site, candidate("eng7_k2=3")) is not None, "one may be an exception"
    assert maker.made(site, candidate("eng7_k2=2")) is not None
    other = candidate("eng7_k2=4+added")
    assert maker.made(site, other) is None
    assert other.reason == SLOW_PLAN
    assert maker.made(site, candidate("eng8_k2=2")) is not None
    assert maker.made(site, candidate("eng77")) is not None


def test_kernels_wait_for_threads_after_one_took_long_beside_them(making):
    maker, source, seconds = making
    source.is_busy = True
    assert maker.may_make()
    seconds["a"] = 0.9
    assert maker.made(CallSite(PROBLEM), candidate("a")) is not None
    assert not maker.may_make()
    source.is_busy = False
    assert maker.may_make()
    seconds["a"] = 0.01
    assert maker.made(CallSite(PROBLEM), candidate("a")) is not None, "the threads were to blame"


def test_one_plan_that_took_long_keeps_no_other_waiting_but_most_of_them_do(making):
    maker, _, seconds = making
    site = CallSite(PROBLEM)
    seconds |= {name: 0.9 for name in "abcdefgh"}
    maker.made(site, candidate("a"))
    assert maker.needed_seconds(site, candidate("z")) < 0.05
    for name in "bcdefgh":
        maker.made(site, candidate(name))
    assert maker.needed_seconds(site, candidate("z")) == pytest.approx(0.9)
