"""bench.torch.programs.trial_turns on the CPU: turns alternate with PyTorch's, and what they take longer is lost."""

from functools import partial

import pytest

pytest.importorskip("torch")

from bench.torch.programs import trial_turns
from ucudnn.torch.overrides import process_overrides


@pytest.fixture
def run(run_case):
    """Return `run_case` of the script on the CPU."""
    yield partial(run_case, trial_turns, "--backend", "cpu", "--network", "small", "--steps", "3")
    process_overrides.clear()


def test_what_a_turn_takes_longer_than_those_of_pytorch_around_it_is_lost():
    stock = [[100.0, 100.0], [100.0, 120.0], [100.0, 100.0]]
    ours = [[110.0, 150.0], [100.0, 110.0]]
    found = trial_turns.lost(ours, stock)
    assert found["lost_s"] == pytest.approx((260 - 210 + 210 - 210) / 1e3)
    assert found["turns_s"] == pytest.approx((260 + 210 + 220 + 200) / 1e3)
    assert found["lost"] == pytest.approx(50 / 890)
    assert found["step"] == pytest.approx((130 / 105 + 105 / 105) / 2)
    assert found["ours_ms"] == [130, 105]
    assert found["stock_ms"] == [100, 110, 100]


def test_turns_alternate_with_those_of_pytorch_alone(run, monkeypatch):
    seen = []
    real = trial_turns.Clock.mark

    def mark(clock):
        seen.append(process_overrides.interceptor is not None)
        return real(clock)

    monkeypatch.setattr(trial_turns.Clock, "mark", mark)
    met, name, case, said = run("--setting", "64KiB", "--seconds", "0")
    assert seen == [each for whose in (False, True, False, True, False) for each in [whose] * 4]
    assert met, "within a limit nothing is asked"
    assert (name, case["settled"], case["claims"]) == ("small nchw 64KiB", True, [])
    assert "2 turns of 3 steps, settled, 0 kernels replaced; lost " in said.err
    assert process_overrides.interceptor is None, "nothing is left on"


def test_turns_may_have_different_numbers_of_steps():
    found = trial_turns.lost([[110.0, 150.0, 100.0]], [[100.0], [100.0, 120.0]])
    assert found["lost_s"] == pytest.approx((360 - 3 * 105) / 1e3)
    assert found["turns_s"] == pytest.approx((360 + 220) / 1e3)


def test_a_turn_lasts_until_it_is_known_whether_the_host_bounds_the_program(run, monkeypatch):
    phases = iter(["warming", "pacing", "trying", "trying", "settled"])
    monkeypatch.setattr(trial_turns, "phase_of", lambda on: next(phases))
    kept = {}
    real = trial_turns.lost

    def lost(ours, stock):
        kept.update(ours=[len(each) for each in ours], stock=[len(each) for each in stock])
        return real(ours, stock)

    monkeypatch.setattr(trial_turns, "lost", lost)
    run("--setting", "64KiB", "--seconds", "60")
    assert kept == {"ours": [9, 3], "stock": [3, 3, 3]}


def test_a_turn_ends_when_the_time_is_over(run, monkeypatch):
    monkeypatch.setattr(trial_turns, "phase_of", lambda on: "warming")
    *_, case, _ = run("--setting", "64KiB", "--seconds", "0")
    assert len(case["ours_ms"]) == 2


def test_more_than_a_twentieth_is_too_much(run, monkeypatch):
    monkeypatch.setattr(trial_turns, "measure", lambda arguments: found)
    for lost, expected in ((0.049, True), (0.051, False)):
        found = {"lost": lost, "lost_s": lost, "turns_s": 1.0, "step": 1.0, "steps": 3, "settled": True}
        found |= {"ours_ms": [1.0], "stock_ms": [1.0, 1.0], "tuned": []}
        met, _, case, _ = run("--setting", "auto")
        assert (met, case["claims"][0]["met"]) == (expected, expected)


def test_a_setting_that_turns_nothing_on_is_refused(run):
    with pytest.raises(SystemExit, match="--setting stock turns nothing on: try auto, or a size"):
        run("--setting", "stock")
