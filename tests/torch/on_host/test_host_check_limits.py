"""Programs within stated limits whose host bounds them: heuristic plans of one launch stay, and nothing is tried."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.tuned_program import LIMIT, HostProgram  # noqa: E402
from ucudnn.torch.steps.phase import TuningPhase  # noqa: E402

ROOM = 1 << 20
"""Bytes of workspace within which no kernel is divided."""


@pytest.fixture
def phases(program, gate_library, monkeypatch):
    """Return a function that runs a program until it is settled, and returns it and its phases, with the gate's state.

    The arguments are the limit, whether the host bounds the program, and whether there is a gate. The stand-in's
    heuristic plans have one launch.
    """

    def run(limit_bytes, *, host_bounds, has_gate=True):
        monkeypatch.setattr(HostProgram, "can_delay", True)
        if host_bounds:  # the GPU waits for the host in each step, and would do so without a delay
            monkeypatch.setattr(HostProgram, "delay", lambda program, _: program.untouched())
        one, seen = program(limit_bytes=limit_bytes, library=gate_library if has_gate else None), []

        def take():
            one.check()
            seen.append((one.phase, one.is_gated))

        with one.enable():
            one.settle(take)
            if has_gate:
                one.until(lambda: one.is_final, take=take)
        return one, seen

    return run


def test_a_program_that_its_host_bounds_keeps_first_plans_of_one_launch(phases):
    one, seen = phases(ROOM, host_bounds=True)
    assert {each for each, _ in seen} == {TuningPhase.WARMING, TuningPhase.HOST_CHECK, TuningPhase.SETTLED}
    assert all(gated for phase, gated in seen if phase is TuningPhase.HOST_CHECK), "calls in Python would bound it"
    assert one.tuner.host_check.is_bound
    assert not any(each.candidates for each in one.tuner.sites.values()), "nothing is looked for"
    assert not one.tuner.kernels
    assert {each.calls for each in one.configurations.values()} == {1}
    assert one.program.baseline_calls == 0


def test_a_program_that_the_gpu_bounds_is_tuned_within_a_limit_once_that_is_known(phases):
    one, seen = phases(ROOM, host_bounds=False)
    order = list(dict.fromkeys(each for each, _ in seen))
    assert order[:2] == [TuningPhase.WARMING, TuningPhase.HOST_CHECK]
    assert TuningPhase.TRYING in order
    assert not one.tuner.host_check.is_bound
    assert any(each.candidates for each in one.tuner.sites.values())


def test_calls_in_python_are_no_reason_to_leave_a_program_alone(phases):
    _, seen = phases(ROOM, host_bounds=True, has_gate=False)
    assert TuningPhase.HOST_CHECK not in {each for each, _ in seen}
    assert TuningPhase.TRYING in {each for each, _ in seen}


def test_the_gate_computes_by_first_plans_before_calls_are_watched_and_after(phases):
    _, seen = phases(LIMIT, host_bounds=False)
    gated = {phase: {state for each, state in seen if each is phase} for phase, _ in seen}
    assert True in gated[TuningPhase.WARMING]
    assert gated[TuningPhase.WATCHING] == {False}, "all calls are timed"
    assert gated[TuningPhase.COMPARING] == {True}
