"""Which modules are called again by the profile of a step."""

import pytest
from torch import nn

from ucudnn.memory.torch.hooks.module_choice import Call, RepeatableModule, choose_modules, weights


def option(ms, size, *spans, inside=()):
    module = nn.Module()
    calls = [Call(set(), 0.0, size=size, ended_at=ended, back_at=back) for ended, back in spans]
    return RepeatableModule(module, calls, ms, {module, *(each.module for each in inside)})


def choose(options, demand, limit, dearest=1.0, allowed=lambda module: True):
    found, left = choose_modules(options, demand, limit, dearest, allowed)
    return [next(at for at, each in enumerate(options) if each is one) for one in found], left


DEMAND = [10, 20, 30, 40, 30, 20]  # events 1 to 6


def test_the_cheapest_that_suffice_are_chosen():
    options = [option(9, 10, (1, 6)), option(5, 10, (2, 5)), option(1, 10, (3, 4))]
    assert choose(options, DEMAND, 40) == ([], 0)
    assert choose(options, DEMAND, 30) == ([2], 0)
    assert sorted(choose(options, DEMAND, 25)[0]) == [1, 2]
    assert choose(options[1:2], DEMAND, 21) == ([0], 9)  # the rest is for the host


def test_what_is_read_again_at_the_worst_event_does_not_help():
    assert choose([option(1, 10, (4, 6))], DEMAND, 30) == ([], 10)
    assert choose([option(1, 10, (1, 0))], DEMAND, 30) == ([], 10)  # nothing has read it


def test_what_is_dear_large_or_forbidden_is_left():
    cheap = option(1, 10, (1, 6))
    assert choose([cheap], DEMAND, 30, dearest=0.1) == ([], 10)
    assert choose([option(1, 20, (1, 6))], DEMAND, 30) == ([], 10)
    assert choose([cheap], DEMAND, 30, allowed=lambda module: False) == ([], 10)


def test_modules_within_others_are_not_chosen_with_them():
    inner = [option(1, 4, (1, 6)), option(1, 4, (1, 6))]
    assert choose([*inner, option(2, 10, (1, 6), inside=inner)], DEMAND, 30) == ([2], 0)
    assert sorted(choose([*inner, option(3, 10, (1, 6), inside=inner)], DEMAND, 30)[0]) == [0, 1]


def test_several_calls_of_a_module_count_together():
    assert choose([option(1, 5, (1, 6), (2, 5))], DEMAND, 30) == ([0], 0)


def test_small_parts_are_not_in_the_way_of_modules_that_suffice():
    demand = [1000 * each for each in DEMAND]
    parts = [option(1, 800, (2, 5)), option(1, 800, (2, 5))]
    whole = option(20, 12_000, (1, 6), inside=parts)  # takes more for each byte
    assert choose([*parts, whole], demand, 29_000) == ([2], 0)
    assert choose([*parts, whole], demand, 38_500) == ([0, 1], 0)


def call(begin_ms, end_ms, passed_ms, host_ms, *, waits=(), inner=(), starves=False):
    waits = [(begin / 1e3, end / 1e3) for begin, end in waits]
    how = {"host_ms": host_ms, "passed_ms": passed_ms, "waits": waits, "inner": [*inner], "starves": starves}
    return Call(set(), begin_ms / 1e3, end_ms / 1e3, **how)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call(0, 10, 30, 5), 10),
        (call(0, 30, 30, 5), 30),  # the host was ahead, and took as long by chance
        (call(0, 30, 30, 5, starves=True), 5),  # the device waited for the host, whose own time is 5
        (call(0, 30, 10, 5, starves=True), 30),
        (call(0, 4, 4.1, 9, starves=True), 4),
        (call(0, 30, 10, 5, waits=[(3, 9), (20, 25)]), 19),
        (call(0, 30, 10, 5, inner=[call(2, 12, 4, 2), call(13, 20, 7, 3, starves=True)]), 13 + 10 + 3),
        (call(0, 30, 24, 5, inner=[call(2, 12, 7, 2), call(13, 20, 4, 2)], starves=True), 13 + 10 + 7),
        (call(0, 30, 24, 5, inner=[call(2, 12, 10, 2, starves=True), call(13, 20, 1, 0)], starves=True), 1 + 2 + 7 + 2),
        (call(0, 30, 10, 5, waits=[(3, 9)], inner=[call(2, 12, 4, 2, waits=[(3, 9)])]), 20 + 4),
    ],
)
def test_what_a_call_takes_the_device_is_told_from_what_it_waits(made, expected):
    assert made.device_ms() == pytest.approx(expected)


def test_what_takes_longer_counts_and_both_do_that_take_as_long():
    assert weights(10, 10) == (1, 1)
    assert weights(10, 1) == (1, pytest.approx(1e-4))
    assert weights(1, 2) == (pytest.approx(1 / 16), 1)
    assert (weights(3, 0), weights(0, 3), weights(0, 0)) == ((1, 0), (0, 1), (1, 0))
