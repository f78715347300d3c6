"""bench.torch.programs.host_turns on the CPU: turns alternate with PyTorch's, and the gate stands in ours."""

import re
from functools import partial

import pytest

pytest.importorskip("torch")

import torch

from bench.torch.programs import host_turns
from ucudnn.torch.gate.call_gate import CallGate
from ucudnn.torch.overrides import process_overrides


@pytest.fixture
def run(run_case):
    """Return `run_case` of the script on the CPU."""
    yield partial(run_case, host_turns, "--backend", "cpu", "--network", "small")
    process_overrides.clear()


def test_each_turn_is_compared_with_those_of_pytorch_around_it():
    stock = [10.0, 12.0, 14.0, 10.0, 10.0]
    ours = [11.1, 13.2, 12.0, 10.4]
    found = host_turns.over_us(ours, stock, 100)
    assert found["over_us"] == pytest.approx((1.0 + 2.0) / 2), "of 1, 2, 0 and 4"
    assert found["quartiles_us"] == pytest.approx([0.25, 3.5])
    assert found["error_us"] == pytest.approx(1.2533 / 1.349 * 3.25 / 2)
    assert found["turns"] == 4


@pytest.mark.parametrize("batch", [None, 2])
def test_the_gate_passes_calls_on_in_every_other_turn(run, monkeypatch, batch):
    opened, seen = [], []
    real_open, real_times = CallGate.open, host_turns.host_ms

    def watched(gate, *arguments, **options):
        opened.append(gate)
        return real_open(gate, *arguments, **options)

    def times(*arguments):
        seen.append(bool(opened) and opened[-1].is_open)
        return real_times(*arguments)

    monkeypatch.setattr(CallGate, "open", watched)
    monkeypatch.setattr(host_turns, "host_ms", times)
    options = () if batch is None else ("--batch", str(batch))
    met, name, case, said = run("--way", "passed", "--seconds", "0", *options)
    assert seen == [False, True, False, True, False]
    assert (name, case["batch"], case["turns"]) == ("small nchw passed", batch or 4, 2)
    assert (case["kernels"] + 1) % 3 == 0
    assert case["over_us"] == pytest.approx(case["claims"][0]["found"])
    assert met == (case["over_us"] <= 3)
    assert re.search(r"^a step takes the host .* ms, PyTorch .* ms; 2 turns, quartiles ", said.err, re.MULTILINE)


def test_a_setting_is_measured_once_it_is_settled(run, monkeypatch):
    seen = []
    real = host_turns.host_ms

    def times(*arguments):
        seen.append(process_overrides.interceptor is not None)
        return real(*arguments)

    monkeypatch.setattr(host_turns, "host_ms", times)
    _, name, _, said = run("--way", "64KiB", "--seconds", "0")
    assert seen == [False, True, False, True, False]
    assert name == "small nchw 64KiB"
    assert "0 kernels replaced, no gate; " in said.err
    assert process_overrides.interceptor is None, "nothing is left on"


def test_a_setting_is_on_before_the_first_step_and_is_tuned_after_one(run, monkeypatch):
    taken, asked = [], []
    real_step_of, real_settled = host_turns.step_of, host_turns.is_settled

    def step_of(*arguments):
        step, kernels = real_step_of(*arguments)

        def watched(*between):
            taken.append((process_overrides.interceptor is not None, torch.backends.cudnn.benchmark))
            return step(*between)

        return watched, kernels

    def settled(on):
        asked.append(len(taken))
        return real_settled(on)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(host_turns, "step_of", step_of)
    monkeypatch.setattr(host_turns, "is_settled", settled)
    run("--way", "64KiB", "--seconds", "0")
    assert taken[0] == (True, True)
    assert asked[0] == 1, "a program has nothing to try before its first step, and would count as settled"


def test_what_cannot_be_measured_is_refused(run):
    with pytest.raises(SystemExit, match="--way stock turns nothing on"):
        run("--way", "stock")


def test_a_network_that_is_still_tried_is_not_measured(run, monkeypatch):
    monkeypatch.setattr(host_turns, "is_settled", lambda on: False)
    with pytest.raises(SystemExit, match="not settled after --tuning-seconds 0: give more"):
        run("--way", "64KiB", "--tuning-seconds", "0")
