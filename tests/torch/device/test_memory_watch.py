"""The headroom at a call never reaches beyond the peak of PyTorch's own steps."""

from hypothesis import given
from hypothesis import strategies as st

from ucudnn.torch.device.memory_limit import MemoryWatch

MIB = 1 << 20


def test_a_peak_that_rises_after_the_first_step_is_the_peak_of_a_step():
    watch = MemoryWatch()
    watch.step_ended(500 * MIB)  # the benchmarks of the first step
    assert watch.peak_bytes == 0
    watch.called(300 * MIB)
    watch.step_ended(500 * MIB)
    assert watch.peak_bytes == 300 * MIB, "what was seen at calls, because the peak did not rise"
    watch.step_ended(520 * MIB)
    assert watch.peak_bytes == 520 * MIB
    assert watch.headroom(100 * MIB) == 418 * MIB, "less than 420, because blocks may be larger than asked for"
    assert watch.headroom(520 * MIB) == 0


def test_a_program_may_reset_the_statistics():
    watch = MemoryWatch()
    for peak in (100, 500, 50, 60):
        watch.step_ended(peak * MIB)
    assert watch.peak_bytes == 60 * MIB


@given(st.lists(st.lists(st.integers(0, 4000), min_size=1, max_size=6), min_size=2, max_size=6))
def test_no_headroom_reaches_beyond_the_true_peak_of_the_steps_after_the_first(steps):
    """Each step is a list of live MiB at its calls; its true peak is the largest of them and what is between calls."""
    watch, highest = MemoryWatch(), 0
    for number, live in enumerate(steps):
        highest = max(highest, max(live) * MIB)
        if number:
            for each in live:
                watch.called(each * MIB)
        watch.step_ended(highest)
    true = max(max(live) for live in steps[1:]) * MIB
    assert watch.peak_bytes <= true
    for live in steps[-1]:
        assert live * MIB + watch.headroom(live * MIB) <= max(true, live * MIB)
