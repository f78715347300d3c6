"""Which modules are called again by the profile of a step."""

from torch import nn

from ucudnn.memory.torch.hooks.module_choice import Call, RepeatableModule, choose_modules


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
