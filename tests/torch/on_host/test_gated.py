"""Programs that are tuned while they run, with the gate in front of PyTorch's operators once all is settled."""

import pytest
import torch

from tests.support.noted import noted
from ucudnn.execution.launcher import BoundKernel
from ucudnn.problem import Operation
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.gate.call_gate import CallGate
from ucudnn.torch.gate.gate_library import GateLibrary
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.tuning import tuner as module


@pytest.fixture
def gated(program, gate_library):
    """Return a function that makes a program with a gate."""
    return lambda **options: program(**{"library": gate_library, **options})


def settles_in_python(one):
    """Settle, and check that all five kernels are replaced without a gate."""
    one.settle()
    assert not one.is_gated
    assert one.computed() == 5


def only(monkeypatch, *operations):
    """Let only kernels of some operations be replaced."""
    chosen = module.worth_replacing
    monkeypatch.setattr(
        module,
        "worth_replacing",
        lambda *found, **how: [s for s in chosen(*found, **how) if s.problem.operation in operations],
    )


@pytest.mark.parametrize(
    "operations",
    [tuple(Operation), *((each,) for each in Operation)],
    ids=lambda operations: "+".join(each.value for each in operations),
)
def test_replaced_kernels_run_through_the_gate_and_others_are_pytorchs(gated, monkeypatch, operations):
    only(monkeypatch, *operations)
    one = gated()
    with one.enable():
        one.settle()
        assert one.is_gated
        assert not process_overrides._libraries, "no kernel in Python is registered"
        replaced = {each.operation for each in one.tuner.kernels}
        assert replaced == set(operations)
        monkeypatch.setattr(one.made, "_pass_forward", None)
        monkeypatch.setattr(one.made, "_pass_backward", None)
        assert one.computed() == len(one.tuner.kernels)
        x, one.x = one.x, torch.randn(4, 4, 9, 8)
        assert one.computed() == 0, "PyTorch computes a new signature, without Python"
        one.x = x
    assert not one.is_gated
    assert one.computed() == 0
    with one.enable():
        assert one.is_gated, "what was found is used again"
        assert one.computed() == len(one.tuner.kernels)


def test_steps_with_the_gate_and_without_are_compared_once_it_is_built(gated, gate_library, monkeypatch):
    one, asked, seen = gated(), [], []
    pending = iter([True] * 5)
    monkeypatch.setattr(GateLibrary, "is_awaited", property(lambda _: asked.append(1) or next(pending, False)))
    with one.enable():
        one.settle(lambda: (one.check(), seen.append((one.phase, one.is_gated, one.tuner.uses_adopted))))
    assert len(asked) > 5
    compared = [(gates, uses) for phase, gates, uses in seen if phase is TuningPhase.COMPARING]
    assert {(True, True), (False, False)} <= set(compared)
    assert (False, True) not in compared, "what is compared are steps as they will be"


@pytest.mark.parametrize("why", ["no compiler", "there is no such kernel"])
def test_without_a_gate_all_goes_through_python(gated, tmp_path, monkeypatch, caplog, why):
    def refuse(*_, **__):
        raise RuntimeError(why)

    monkeypatch.setattr(CallGate, "use", refuse)
    one = gated(library=GateLibrary(tmp_path, find=lambda name: None)) if why == "no compiler" else gated()
    with one.enable():
        settles_in_python(one)
    assert why == "no compiler" or why in caplog.text


def test_a_program_that_gains_nothing_builds_nothing(gated, tmp_path):
    asked = []
    one = gated(library=GateLibrary(tmp_path, find=lambda name: asked.append(name)))
    one.program.baseline_ms = 10.0  # the fast engine takes 18
    with one.enable():
        one.settle()
        assert one.made.operators() == (None, None)
    assert not asked


@pytest.mark.parametrize("current", [0, 1], ids=["its GPU is the current one", "another GPU is"])
def test_kernels_are_computed_behind_the_gate_without_python(gated, host, monkeypatch, current):
    host.current = current
    one = gated()
    with one.enable():
        one.settle()
        assert one.is_gated
        monkeypatch.setattr(BoundKernel, "__call__", lambda kernel: pytest.fail("a kernel was called in Python"))
        assert [one.computed() for _ in range(2)] == [5, 5]


def test_on_another_stream_kernels_in_python_compute_and_the_gate_once_the_default_one_is_used(
    gated, host, monkeypatch
):
    one = gated()
    one.program.untouched = lambda: True
    host.stream = 0x40
    seen = noted(monkeypatch, BoundKernel, "__call__")
    with one.enable():
        one.settle()
        assert one.is_gated
        seen.clear()
        assert one.computed() == len(seen) == 5
        opened = noted(monkeypatch, CallGate, "use")
        for _ in range(40):
            one.check()
        assert not opened, "on another stream it would compute no more than now"
        host.stream = 0
        for _ in range(20):
            one.check()
        assert len(opened) == 1
        seen.clear()
        assert {one.computed() for _ in range(40)} == {5}
        assert not seen
        assert len(opened) == 1


def test_nothing_is_replaced_in_a_capture_under_deterministic_algorithms_or_in_other_shapes(
    gated, host, flags, monkeypatch
):
    monkeypatch.setattr(TunedKernel, "direct", lambda kernel: None)  # the host's streams are not those of PyTorch
    one = gated()
    with one.enable():
        one.settle()
        with host.elsewhere(captures=True):
            assert one.computed() == 0
        flags.deterministic = True
        assert one.computed() == 0
        flags.deterministic = False
        x, one.x = one.x, torch.randn(4, 4, 7, 6)
        assert one.computed() == 0
        one.x = x
        assert one.computed() == 5


@pytest.mark.parametrize(("baseline_ms", "kept"), [(10.0, False), (50.0, True)])
def test_converted_modules_give_operators_back_where_nothing_is_replaced(gated, baseline_ms, kept):
    one = gated()
    one.program.baseline_ms = baseline_ms
    one.made.names.give(one.model)
    process_overrides.add(one.made)
    one.settle()
    one.check()
    assert [each is not None for each in process_overrides._chosen("cpu")] == [kept, kept]
    one.check()


def test_a_program_that_infers_until_all_is_settled_and_trains_then_is_tuned_again(gated):
    one = gated()
    with one.enable():
        one.settle(one.infer)
        one.infer()
        one.infer()
        assert one.is_gated
        assert len(one.tuner.kernels) == 2
        one.check()
        assert not one.is_gated, "PyTorch's own steps are watched again"
        one.settle()
        assert one.is_gated
        assert len(one.tuner.kernels) == one.computed() == 5
