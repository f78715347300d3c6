"""Programs that are tuned while they run, on the host's GPU, with stated times of PyTorch's own kernels."""

import gc
from math import inf
from random import Random
from threading import current_thread

import pytest
import torch
from torch._dynamo import convert_frame
from torch.nn.modules import conv as convolution
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import ucudnn
from tests.support.host_gpu import assert_near
from tests.support.noted import noted
from tests.support.tuned_program import LIMIT, HostProgram
from ucudnn.backends.cudnn.algorithms.graph_call import GraphCall
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.problem import Operation
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.device.timed_device import FreeBlocks
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import NO_MEMORY, WRONG
from ucudnn.torch.tuning import tuned_call
from ucudnn.torch.tuning import tuner as tuner_module

MIB = 1 << 20


def test_faster_kernels_are_found_and_run_from_then_on(program):
    one = program(share=0.05)  # the stand-in's fast engine takes 18 ms
    with one.enable() as on:
        phases = []
        while one.phase is not TuningPhase.SETTLED:
            one.check()
            phases += [one.phase] * (one.phase not in phases)
            if one.phase is TuningPhase.WARMING:
                assert one.program.baseline_calls > 0 == on.report().calls, "the first steps are PyTorch's own"
            if one.tuner.trials:
                assert one.ledger.left_seconds > -1e-9, "nothing is tried before the time covers what was lost"
        assert phases == [each for each in TuningPhase if each is not TuningPhase.HOST_CHECK]
        (report,) = on.report().tuned
        assert report.seen == report.finished == 5  # the gradient of the first input is not wanted
        assert len(report.kernels) == 5
        assert all("eng1" in each.configuration for each in report.kernels)
        assert report.gain == pytest.approx((1000 + 5 * 18) / (1000 + 5 * 50), rel=0.02)
        one.program.baseline_calls = 0
        assert one.computed() == 5
        assert one.program.baseline_calls == 0
        assert 0 < report.host_seconds["slowest"] <= report.host_seconds["building"]
        assert report.host_seconds["opening"] > 0
        assert "5 of 5 kinds of kernels replaced" in str(on.report())


@pytest.mark.parametrize("refuses", [False, True])
def test_an_engine_that_adds_the_bias_is_adopted_if_there_is_one(program, stub, refuses):
    stub.stub_refuse_bias(refuses)
    one = program()
    with one.enable() as on:
        one.settle()
        (biased,) = (problem for problem in one.tuner.kernels if problem.biased)
        assert one.tuner.kernels[biased].fuses is not refuses
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            calls = on.report().calls
            out = one.model(one.x)
        assert on.report().calls == calls + 2
        assert sum(each.name == "aten::add_" for each in found.events()) == refuses
        assert_near([out], [one.model.requires_grad_(False).double()(one.x.double()).float()])


@pytest.mark.parametrize("replaced", [Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER])
def test_gradients_are_computed_in_the_order_of_pytorch_so_that_memory_is_taken_in_that_order(
    program, monkeypatch, replaced
):
    one = program()
    baseline = one.made.aten.backward
    seen = noted(monkeypatch, TunedKernel, "run", of=lambda kernel, *_: kernel._plan.problem.operation)
    one.made._pass_backward = lambda *rest: seen.append(tuple(rest[-1][:2])) or baseline(*rest)
    chosen = tuner_module.worth_replacing
    monkeypatch.setattr(
        tuner_module,
        "worth_replacing",
        lambda *found, **how: [s for s in chosen(*found, **how) if s.problem.operation is replaced],
    )
    first = set()  # of each step: it is of the second layer, of which both gradients are wanted
    with one.enable():
        while one.phase is not TuningPhase.SETTLED:
            seen.clear()
            one.check()
            first.update([each for each in seen if each is not Operation.FORWARD][:1])
        assert {problem.operation for problem in one.tuner.kernels} == {replaced}
        seen.clear()
        one.check()
    data, filters = (True, False), (False, True)
    of_input = replaced is Operation.BACKWARD_DATA
    assert seen[:2] == ([replaced, filters] if of_input else [data, replaced])
    assert {(True, True), data} <= first <= {(True, True), data, Operation.BACKWARD_DATA}, "nor while others are tried"


def test_pytorchs_kernels_stay_where_nothing_is_faster_and_are_called_without_a_detour(program):
    one = program(10.0)
    with one.enable() as on:
        one.until(lambda: one.phase in (TuningPhase.COMPARING, TuningPhase.SETTLED))
        assert one.phase is TuningPhase.SETTLED, "nothing is compared"
        (report,) = on.report().tuned
        # The call with a bias has four candidates, two of which add it; after three slow ones the last is not tried.
        # Both filter gradients have one more than the two others, sample by sample.
        assert report.outcomes == {"slow": 13, "new": 1}, "candidates were tried"
        assert not report.kernels
        assert one.made.operators() == (None, None)
        calls = one.program.baseline_calls
        one.check()
        assert one.program.baseline_calls == calls, "PyTorch's operators are registered again, and not ours around them"


@pytest.mark.parametrize("reason", [WRONG, NO_MEMORY])
def test_what_is_wrong_or_cannot_be_checked_never_replaces_pytorchs_kernel(program, reason):
    one = program()
    if reason == WRONG:
        one.program.distance = lambda found, expected: lambda: float("nan")
    else:
        one.program.has_memory = False
    report = one.tuned()
    assert not report.kernels
    assert set(report.outcomes) == {reason}


@pytest.mark.parametrize(("limit", "replaced"), [(None, 5), (64 << 10, 0)])
def test_where_no_memory_is_free_for_another_output_candidates_are_checked_in_that_of_the_first_one(
    program, monkeypatch, limit, replaced
):
    one = program(limit_bytes=limit)
    monkeypatch.setattr(FreeBlocks, "hold", lambda blocks, sizes: len(sizes) != 3)  # beside PyTorch's output
    report = one.tuned()
    assert len(report.kernels) == replaced, "a heuristic plan within the limit is as fast"
    assert "checked" in report.outcomes
    assert NO_MEMORY not in report.outcomes
    assert all(each.in_turn for site in one.tuner.sites.values() for each in site.candidates if each.rough_ms < inf)


def test_a_candidate_that_leaves_its_output_as_it_was_is_found_in_a_sketch(program, monkeypatch):
    one = program()
    monkeypatch.setattr(FreeBlocks, "hold", lambda blocks, sizes: len(sizes) != 3)  # beside PyTorch's output
    monkeypatch.setattr(GraphCall, "_run", lambda *_: None)
    report = one.tuned()
    assert not report.kernels
    assert set(report.outcomes) == {WRONG}


def test_a_kernel_that_would_take_new_memory_from_the_device_does_not_stay(program, monkeypatch):
    one = program()
    monkeypatch.setattr(FreeBlocks, "hold", lambda blocks, sizes: len(sizes) == 3)  # two outputs, and not only one
    report = one.tuned()
    assert not report.kernels
    assert report.outcomes[NO_MEMORY] >= 5, "the fast engine; the other one needs none, but is slow"


def test_free_blocks_are_looked_up_once_for_each_call_until_memory_is_taken_from_the_device(program, monkeypatch):
    asked = noted(monkeypatch, FreeBlocks, "hold")
    one = program()
    one.tuned()
    once = one.program.looked
    assert once <= 2 * 5 < len(asked), "beside PyTorch's own kernel and in its place"
    process_overrides.use(None)
    other = program()
    reserved = iter(range(1 << 20, 1 << 30, MIB))
    other.program.reserved_bytes = lambda: next(reserved)
    other.tuned()
    assert other.program.looked > once


def test_kernels_at_the_bandwidth_of_the_memory_are_not_tried(program):
    one = program()
    one.program.bandwidth = 1e-3
    report = one.tuned()
    assert (report.outcomes, report.seen) == ({}, 5)


def test_kernels_are_divided_where_the_peak_leaves_too_little_for_whole_ones(program):
    one = program(200.0)
    one.program.peak = 2 * MIB + 6000  # of which a part is live, and 2 MiB are lost to rounding
    with one.enable() as on:
        one.settle()
        (report,) = on.report().tuned
        assert report.kernels
        assert all(each.workspace_bytes <= each.headroom_bytes for each in report.kernels)
        divided = [each for each in report.kernels if each.parts > 1]
        assert divided
        before = on.report().divided
        one.check()
        assert on.report().divided == before + len(divided)


def test_only_the_programs_own_thread_makes_handles_of_cudnn(program, monkeypatch):
    one, relaxed = program(), []
    made = noted(monkeypatch, one.source, "_open", of=current_thread)
    monkeypatch.setattr("ucudnn.torch.trials.candidate_source.relax", lambda: relaxed.append(current_thread().name))
    with one.enable():
        one.step()
        assert not made, "nothing is opened before the program has taken a few steps"
        one.settle()
    assert set(made) == {current_thread()}
    assert len(made) == 3
    assert relaxed == ["ucudnn-candidates"] * 2, "so that building ends no capture of the program"


def thread_of(*call, **how):
    """Return the thread of a call."""
    return current_thread()


def test_only_the_programs_own_thread_asks_the_heuristics_of_cudnn(program, monkeypatch):
    asked, built = (noted(monkeypatch, CudnnBackend, each, of=thread_of) for each in ("algorithms", "prepare"))
    report = program().tuned()
    assert set(asked) == {current_thread()}, "they capture a stream"
    assert "ucudnn-candidates" in {each.name for each in built}, "what takes long is built in the background"
    assert report.host_seconds["listing"] > 0


@pytest.mark.parametrize("refused", [False, True])
def test_the_programs_own_thread_runs_plans_that_others_have_built(program, stub, refused, monkeypatch):
    stub.stub_refuse_lent(refused)
    built, one = noted(monkeypatch, OperationGraph, "plan", of=thread_of), program()
    with one.enable():
        one.settle()
        assert one.tuner.kernels
        one.step()
        gc.collect()  # the threads have ended, and what they built is still there
        one.check()
    assert built
    assert (current_thread() in built) is refused


@pytest.mark.parametrize("captures", [False, True])
def test_nothing_is_tried_in_a_capture_nor_in_another_stream(program, host, captures):
    one = program()
    with one.enable() as on:
        for _ in range(60 if captures else 20):
            host.captures, host.stream = (captures, 0x40) if one.made.tuners() else (False, 0)
            one.check()
        assert on.report().calls == 0
        assert not on.report().tuned[0].outcomes


def test_a_whole_step_that_is_captured_while_kernels_are_tried_ends_no_step_and_tries_nothing(program, host):
    one = program()
    with one.enable() as on:
        one.until(lambda: one.phase is TuningPhase.TRYING and one.tuner.trials)
        tried = dict(one.tuner.trials)
        assert tried
        calls, steps = on.report().calls, one.tuner._times.count
        with host.elsewhere(captures=True):
            one.step()  # the optimizer's step is captured, too
        assert on.report().calls == calls, "the graph keeps PyTorch's own kernels"
        assert one.tuner._times.count == steps, "no mark is made in a capture"
        assert one.tuner.trials == tried, "what was to be tried next waits for a step of the program"
        one.settle()
        assert one.tuner.kernels, "the eager program goes on tuning"
        assert on.report().calls > calls


@pytest.mark.parametrize(("limit", "calls"), [(None, 0), (LIMIT, 5)])
def test_nothing_is_tried_among_deterministic_algorithms(program, monkeypatch, limit, calls):
    for module in ("tuning.auto_interceptor", "calls.interceptor"):
        monkeypatch.setattr(f"ucudnn.torch.{module}.cudnn_deterministic", lambda: True)
    one = program(limit_bytes=limit)
    with one.enable() as on, torch.backends.cudnn.flags(enabled=True, deterministic=True):
        for _ in range(60):
            one.check()
        assert not on.report().tuned[0].seen
        assert on.report().calls == 60 * calls, "all by the heuristic mode within a limit"
        assert bool(one.program.baseline_calls) is (limit is None)


@pytest.mark.parametrize(("has_gate", "trains"), [(False, True), (True, True), (True, False)])
def test_kernels_are_given_up_if_the_peak_grows(program, gate_library, caplog, has_gate, trains):
    one = program(library=gate_library if has_gate else None)
    take = one.check if trains else one.infer
    with one.enable():
        one.settle(take)
        for _ in range(2):  # without an optimizer, the gate opens when a module is called
            take()
        assert one.is_gated is has_gate
        assert one.computed(take) == (5 if trains else 2)
        one.program.peak += 3 * MIB
        for _ in range(20):
            take()
        assert "PyTorch's own kernels run again" in caplog.text
        assert not one.is_gated
        assert one.computed(take) == 0
        if trains:
            assert one.made.operators() == (None, None)


def test_a_checkpoint_computes_again_by_the_plan_of_its_forward_pass(program, monkeypatch):
    one = program()
    part = torch.nn.Sequential(*one.model)
    one.model.forward = lambda x: checkpoint(part, x, use_reentrant=False)
    seen = noted(monkeypatch, TunedKernel, "run", of=lambda kernel, *_: (kernel._plan.problem, kernel.configuration))
    with one.enable():
        one.settle()
        steps, before = one.made._tracker.steps, one.replaced_calls
        seen.clear()
        one.check()
        assert one.made._tracker.steps == steps + 1, "computing again begins no step"
        forward = [each for each in seen if each[0].operation is Operation.FORWARD]
        assert len(forward) == 3, "the output of the last one is not needed again"
        assert len(set(forward)) == 2, "by the same plan each time"
        assert one.replaced_calls == before + 6


def compiled(one, host):
    made = torch.compile(torch.nn.Sequential(*one.model), backend="aot_eager")
    one.model.forward = lambda x: made(x)  # a module would be taken for another layer


def infers(one, host):
    """Let a program take no steps of an optimizer."""
    one.check = one.infer


def on_another_gpu_than_the_current_one(one, host):
    host.current = 1


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize(("kind", "kernels"), [(compiled, 5), (infers, 2), (on_another_gpu_than_the_current_one, 5)])
def test_all_kinds_of_programs_are_tuned(program, host, limit, kind, kernels):
    one = program(limit_bytes=limit)
    kind(one, host)
    with one.enable() as on:
        one.settle()
        replaced = len(on.report().tuned[0].kernels)
        assert replaced == kernels if kind is infers else replaced
        assert one.computed() == kernels
        assert limit is None or not one.program.baseline_calls


def uncompiled(one):
    """Compile a program so that the compiler gives it up at run time, and tries each frame below; return those."""
    part = torch.nn.Sequential(*one.model)

    def forward(x):
        for _ in range(1):
            torch._dynamo.graph_break()
            y = part(x)
        return y

    torch.compiler.reset()
    one.model.forward = torch.compile(forward, backend="eager")
    return convert_frame.input_codes


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_no_code_of_ours_is_compiled_where_a_program_is_given_up(program, limit):
    one = program(limit_bytes=limit)
    codes = uncompiled(one)
    with one.enable() as on:
        one.settle()
        assert on.report().tuned[0].kernels
    names = {each.co_filename for each in filter(None, (each() for each in codes.seen))}
    assert convolution.__file__ in names, "frames below the one that was given up were tried"
    assert not [each for each in names if each.startswith(ucudnn.__path__[0])]


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_a_device_is_asked_whether_it_can_be_delayed_only_without_a_stated_limit(program, monkeypatch, limit):
    asked = []
    monkeypatch.setattr(HostProgram, "can_delay", property(lambda program: asked.append(program)))
    one = program(limit_bytes=limit)
    with one.enable():
        one.until(lambda: one.phase is TuningPhase.WATCHING)
    assert bool(asked) is (limit is None), "a driver loads a kernel then, while the program waits"


@pytest.mark.parametrize("benchmark", [False, True])
def test_pytorchs_own_kernels_obey_its_benchmark_flag_and_others_are_tried_either_way(program, monkeypatch, benchmark):
    one = program()
    told = noted(monkeypatch, one.made, "_pass_forward", of=lambda *call: call[-4])
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
        assert one.tuned().kernels
    assert set(told) == {benchmark}


def test_times_are_kept_as_taken_in_a_program_and_order_the_candidates_of_the_next_one(program, tmp_path, monkeypatch):
    path = str(tmp_path / "measurements.db")
    one = program(database=path)
    keep, timed = one.source.keep, []

    def keep_without_a_list(found):
        timed.extend(found)
        with monkeypatch.context() as patch:
            patch.setattr(CudnnBackend, "algorithms", lambda *_: pytest.fail("the program would wait for heuristics"))
            keep(found)

    monkeypatch.setattr(one.source, "keep", keep_without_a_list)
    assert one.tuned().kernels
    assert timed
    one.source.join(30)
    machines = Database(path).machines()
    assert [each.conditions["taken"] for each in machines] == ["in a program"]
    backend, problem = one.source.backend, next(iter(one.tuner.kernels))
    assert not open_store(path, backend).load([problem]), "times that were taken in isolation are others"
    assert open_store(path, backend, in_program=True).load([problem])
    tried = noted(monkeypatch, CallSite, "checked", of=lambda site, candidate, *_: candidate)
    assert program(database=path).tuned().kernels
    names = [each.configuration.parts[0].algorithm for each in tried]
    assert names[0] == "eng1", "the fastest one before, not the first one of the heuristics"


SIZES = 32


def images():
    """Return images of as many sizes in random order, again and again."""
    sizes, shuffled = [torch.randn(8, 4, 5 + number, 6) for number in range(SIZES)], Random(0)
    while True:
        yield shuffled.choice(sizes)


@pytest.mark.parametrize("baseline_ms", [10.0, 50.0], ids=["nothing gained", "replaced"])
def test_a_program_whose_image_sizes_change_never_waits_for_plans_and_nothing_grows(program, monkeypatch, baseline_ms):
    one, sizes = program(baseline_ms), images()
    looked = noted(monkeypatch, tuned_call, "asked_convolution")
    with one.enable() as on:
        while one.phase is not TuningPhase.SETTLED:
            one.x = next(sizes)
            one.check()
        assert on.report().tuned[0].outcomes, "kernels of the sizes that were watched were tried"
        assert 0 < len(looked) <= 4 * 4, (
            "two convolutions, forward and backward, of the first step and two watched ones"
        )
        tables = one.tuner.sites, one.made._forward_calls.calls, one.made._backward_calls.calls
        grown = lambda: (len(looked), *map(len, tables))  # noqa: E731
        before, asked_memory = grown(), one.program.looked
        for _ in range(2 * SIZES):
            one.x = next(sizes)
            one.check()
        assert grown() == before
        assert one.program.looked == asked_memory
        if not one.tuner.kernels:
            assert one.made.operators() == (None, None)


def test_inference_of_changing_sizes_by_several_threads_learns_nothing_after_it_has_settled(program):
    one, sizes = program(10.0), images()
    with one.enable(), torch.inference_mode():
        while one.phase is not TuningPhase.SETTLED:
            one.model(next(sizes))
            one.made._threads.add(-1)  # so that the operators stay registered
            one.program.passed_ms += one.program.idle_ms
        known = len(one.tuner.sites), len(one.made._forward_calls.calls)
        for number in range(SIZES):
            one.model(torch.randn(8, 4, 50 + number, 6))
        assert one.made.operators() != (None, None)
        assert (len(one.tuner.sites), len(one.made._forward_calls.calls)) == known
