"""Which sizes fit into free blocks, and when times on a GPU can be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lazy_streams import LazyGpu
from ucudnn.torch.device.timed_device import FreeBlocks, HomeStream, TimedGpu, holds, relative

MIB = 1 << 20


def taken(home, streams):
    """Take a step with calls on each of some streams; return which were at home, and whether the step was away."""
    return [home.is_current(each) for each in streams], home.step_ended()


def test_a_program_has_another_stream_once_many_steps_in_turn_ran_there_only():
    home = HomeStream(1)
    for _ in range(15):
        assert taken(home, [2, 3]) == ([False, False], True)
    assert taken(home, [3, 1]) == ([False, True], False)
    for _ in range(16):
        assert taken(home, [3, 2]) == ([False, False], True)
    assert taken(home, [2, 1]) == ([True, False], False)
    assert home.address == 2


def test_a_program_whose_steps_alternate_between_other_streams_keeps_its_own():
    home = HomeStream(1)
    for number in range(100):
        assert taken(home, [2 + number % 2]) == ([False], True)
    assert home.address == 1
    for _ in range(15):  # after the last of the hundred
        assert taken(home, [3]) == ([False], True)
    assert home.address == 3


def test_steps_without_calls_say_nothing_about_the_stream():
    home = HomeStream(1)
    for _ in range(15):
        assert taken(home, [2]) == ([False], True)
        assert taken(home, []) == ([], False)
    assert taken(home, [2]) == ([False], True)
    assert home.address == 2


def test_a_block_holds_several_sizes():
    assert holds([100], [60, 40])
    assert not holds([100], [60, 41])
    assert holds([60, 41], [41, 60])
    assert not holds([], [1])
    assert holds([5], [])


@given(st.lists(st.integers(1, 50), max_size=5), st.lists(st.integers(1, 30), max_size=4))
def test_what_fits_is_no_more_than_there_is(free, wanted):
    if holds(free, wanted):
        assert sum(wanted) <= sum(free)
        assert not wanted or max(wanted) <= max(free)
        assert holds([*free, 7], wanted)


def test_what_a_block_leaves_over_is_lost_if_it_is_too_small_to_be_split_off():
    assert holds([100], [60, 30], least=40)
    assert not holds([100], [70, 30], least=40)


def test_small_tensors_come_from_blocks_of_their_own_and_sizes_are_rounded():
    free = FreeBlocks([1024], [4 * MIB])
    assert free.hold([1, 512])
    assert not free.hold([1, 513]), "512 and 1,024 bytes"
    assert free.hold([2 * MIB, 1])
    assert not free.hold([3 * MIB, 1 * MIB]), "a MiB is small"
    assert not free.hold([2 * MIB, 2 * MIB - 1, 1025])
    assert not free.hold([3 * MIB, MIB + 1]), "what is left of the block is not split off"


def test_relative_distances():
    assert relative(1, 4) == 0.25
    assert relative(0, 0) == 0
    assert relative(1, 0) == float("inf")
    assert relative(float("nan"), 1) != relative(float("nan"), 1)


@pytest.mark.parametrize("first", [0, 1])
def test_a_time_between_streams_is_read_when_both_marks_are_reached(first, monkeypatch):
    gpu = LazyGpu(hurries=(False, False, False))
    monkeypatch.setattr("ucudnn.torch.device.timed_device.torch", gpu)
    streams = gpu.compute, gpu.copying[0]
    program = TimedGpu(0)
    begin = program.mark()
    gpu.compute = streams[1]  # the program goes on in another stream, which does not wait for the first one
    end = program.mark()
    assert program.elapsed_ms(begin, end) is None
    streams[first].synchronize()
    assert program.elapsed_ms(begin, end) is None
    streams[1 - first].synchronize()
    assert program.elapsed_ms(begin, end) == 1 - 2 * first
