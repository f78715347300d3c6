"""Programs within a stated limit, whose plans the gate computes without Python once all is settled."""

from threading import Event, Thread

import pytest
import torch

import ucudnn.torch
from tests.support.gate_call import directs
from tests.support.host_gpu import ELSEWHERE, assert_near
from tests.support.noted import noted
from tests.support.tuned_program import LATER, LIMIT, HostProgram, python_calls, taken
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.problem import WITH_BIAS, Operation
from ucudnn.torch.calls.direct_kernel import direct_kernel
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.gate.call_gate import CallGate
from ucudnn.torch.overrides import Overrides, process_overrides
from ucudnn.torch.steps import step_comparison
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor


@pytest.fixture
def gated(program, gate_library):
    """Return a program with a gate that computes by its plans."""
    one = program(limit_bytes=LIMIT, library=gate_library)
    with one.enable():
        one.until(lambda: one.is_final)
        yield one


@pytest.fixture
def in_python(gated, monkeypatch):
    """Return a list that gets an item for each call that comes to Python, once none does in a step."""
    seen = python_calls(monkeypatch)
    process_overrides.use(process_overrides.interceptor)  # registers its methods again
    until_open(gated, seen)
    return seen


def until_open(gated, in_python):
    """Take steps until one does not come to Python: the gate may stay closed for a while after other plans have run."""
    gated.until(lambda: not taken(in_python), 100)


def parts_of(one):
    """Return how many calls of cuDNN a step has, as the report says."""
    handle = one.handle
    plans = {str(each.problem): int(each.configuration.partition("x")[0]) for each in handle.report().kernels}
    left = {problem.removesuffix(WITH_BIAS) for problem in plans if problem.endswith(WITH_BIAS)}
    return sum(parts for problem, parts in plans.items() if problem not in left)


def adopt_another_plan(gated):
    """Let the handle compute a kernel without a bias by another of its candidates."""
    handle = gated.handle
    problem, kernel = next(each for each in gated.tuner.kernels.items() if not each[0].biased)
    known = gated.tuner.sites[problem].candidates
    other = next(each for each in known if each.configuration.parts != kernel.configuration.parts)
    with handle.backend.lock:
        handle.plans.adopt(problem, other.configuration)


def test_calls_within_a_limit_do_not_come_to_python_and_are_counted(gated, in_python, calls):
    on = process_overrides.interceptor
    (handle,) = on.handles().values()
    before = sum(each.calls for each in handle.report().kernels)
    bound, looked_up = on.planned.bound_calls(), on.planned.looked_up_calls()
    calls()
    for _ in range(3):
        gated.check()
    made = calls()
    assert not in_python
    assert len(made) == 3 * parts_of(gated)
    assert any(each.batch < 8 for each in made), "divided to fit the limit"
    assert sum(each.calls for each in handle.report().kernels) == before + 15
    assert on.planned.bound_calls() == bound + 15
    assert on.planned.looked_up_calls() == looked_up
    assert gated.program.baseline_calls == 0
    with process_overrides.without_gates():
        gated.step()
    alike = [(each.operation, each.batch, each.algorithm, each.alpha, each.beta) for each in [*made, *calls()]]
    assert alike == 4 * alike[-len(alike) // 4 :], "the same calls in the same order as in Python"
    workspaces = [each.workspace_bytes for each in directs()]
    assert 0 < max(workspaces) <= LIMIT + LATER


def test_calls_of_another_look_or_under_deterministic_algorithms_come_to_python_and_keep_the_limit(
    gated, in_python, host, flags
):
    before, x = parts_of(gated), gated.x
    host.forget()
    gated.x = torch.randn(4, 4, 7, 6)
    gated.check()
    assert len(in_python) == 4
    gated.x = x
    flags.deterministic = True
    gated.check()
    assert len(in_python) == 8
    assert max(host.allocated) <= LIMIT + LATER
    flags.deterministic = False
    until_open(gated, in_python)
    assert gated.program.baseline_calls == 0
    assert before > 5


def test_the_gate_computes_on_the_default_stream_only_after_python_has_used_another_one(gated, in_python, host, calls):
    def comes_to_python():
        """Return how many calls of a step do after another stream was used, of which at least one must."""
        with torch.no_grad(), host.elsewhere():
            gated.model(torch.randn(4, 4, 7, 6))  # the same handle of cuDNN now has this stream
        assert {each.stream for each in calls()[-2:]} == {ELSEWHERE}
        in_python.clear()
        gated.check()
        assert {each.stream for each in calls()} == {None}
        found = taken(in_python)
        assert found, "which sets the default stream again"
        until_open(gated, in_python)
        return len(found)

    until_open(gated, in_python)
    assert 1 in (comes_to_python() for _ in range(20)), "the gate computes all others in the same step"


def test_no_kernel_is_computed_by_the_gate_while_python_may_use_its_handle(gated, in_python, monkeypatch):
    with process_overrides.without_gates():
        gated.check()
        assert len(taken(in_python)) == 4
    until_open(gated, in_python)
    entered, may_end = Event(), Event()
    run = Interceptor._keep

    def wait(*rest):
        entered.set()
        assert may_end.wait(600)
        return run(*rest)

    monkeypatch.setattr(Interceptor, "_keep", wait)  # a call of a new signature is inside Python
    other = Thread(target=lambda: torch.nn.functional.conv2d(torch.randn(3, 4, 7, 6), torch.randn(6, 4, 3, 3)))
    other.start()
    try:
        assert entered.wait(120)
        in_python.clear()
        gated.check()
        assert len(in_python) == 4
    finally:
        may_end.set()
        other.join()
    until_open(gated, in_python)


def test_what_cudnn_refuses_in_the_gate_is_computed_in_python_within_the_limit(gated, in_python, host):
    host.forget()
    with host.failing():
        found = gated.step()
    assert_near(found, gated.expected)
    assert len(in_python) == 4
    assert not host.allocated or max(host.allocated) <= LIMIT + LATER


@pytest.mark.parametrize("opens_before", [False, True], ids=["", "the gate was opened before it has run"])
def test_a_plan_that_changes_is_seen_at_once_and_computed_by_the_gate_again(gated, in_python, calls, opens_before):
    adopt_another_plan(gated)
    if opens_before:
        process_overrides.refresh()
        assert len(directs()) == 4
    for in_python_now in (1, 0):  # the call of the changed plan
        calls()
        gated.check()
        assert len(in_python) == in_python_now
        assert len(calls()) == parts_of(gated)
        until_open(gated, in_python)
    assert len(directs()) == 5
    assert gated.program.baseline_calls == 0


@pytest.mark.parametrize("change", ["size", "batch", "flag"])
def test_calls_of_a_new_look_are_computed_by_the_gate_once_it_was_opened_again(gated, in_python, flags, change):
    x = gated.x
    if change == "flag":
        flags.allow_tf32 = not flags.allow_tf32
    else:
        gated.x = torch.randn(8, 4, 9, 8) if change == "size" else torch.randn(12, 4, 7, 6)
    gated.check()
    assert len(in_python) == 4
    until_open(gated, in_python)
    seen = sum(kernel.calls[0] for kernel in directs())
    gated.check()
    assert sum(kernel.calls[0] for kernel in directs()) == seen + 5
    gated.x = x
    gated.check()
    assert not in_python, "what the gate has computed before it computes still"
    assert gated.program.baseline_calls == 0


def test_the_gate_is_opened_where_steps_end_on_the_default_stream(gated, in_python, host, monkeypatch):
    found = noted(monkeypatch, CallGate, "use")
    x, gated.x = gated.x, torch.randn(12, 4, 7, 6)
    with host.elsewhere():
        for _ in range(40):
            gated.check()
    assert not found, "on another stream no kernel would be found that the gate can compute"
    until_open(gated, in_python)
    assert len(found) == 1
    gated.x = x
    gated.check()
    assert not in_python


def test_the_gate_is_not_opened_again_for_kernels_that_it_can_never_compute(gated, in_python, monkeypatch):
    found, wanted = noted(monkeypatch, CallGate, "use"), direct_kernel
    monkeypatch.setattr(
        "ucudnn.torch.calls.kernel_call.direct_kernel",
        lambda plan, backend: None if plan.problem.operation is Operation.BACKWARD_FILTER else wanted(plan, backend),
    )
    process_overrides.refresh()
    assert len(directs()) == 2
    for _ in range(60):
        gated.check()
    assert len(found) == 1
    assert len(taken(in_python)) == 60 * 2


def test_the_gate_is_opened_less_and_less_often_however_often_looks_are_new(gated, in_python, monkeypatch):
    found, at = noted(monkeypatch, CallGate, "use"), []
    process_overrides.refresh()
    for step in range(130):
        gated.planned.has_unlent = True  # as with images of a new size
        opened = len(found)
        gated.check()
        at += [step] * (len(found) - opened)
    distances = [after - before for before, after in zip([-1, *at], at, strict=False)]
    assert distances == [16, 32, 64]


def test_converted_modules_keep_the_gate_closed_whatever_is_new(gated, in_python, monkeypatch):
    ucudnn.torch.convert(torch.nn.Conv2d(3, 4, 3), backend="cpu")
    (converted,) = process_overrides.converted
    assert not gated.is_gated
    assert (converted.names.any, gated.made.names.any) == (True, False), "names are those of the converted module only"
    registered = noted(monkeypatch, Overrides, "refresh")
    gated.made.router._changed = process_overrides.refresh
    for _ in range(30):
        gated.planned.has_unlent = True
        gated.check()
    assert not registered


@pytest.mark.parametrize("updates", [False, True], ids=["inference", "manual updates"])
def test_programs_without_an_optimizer_are_computed_by_the_gate_within_the_limit(
    program, host, gate_library, monkeypatch, calls, updates
):
    one = program(limit_bytes=LIMIT, library=gate_library)
    seen = python_calls(monkeypatch)

    def step():
        """Infer, or take a step of training whose updates the program itself computes."""
        one.program.passed_ms += one.program.idle_ms
        expected, *gradients = one._by_matrices()
        with torch.inference_mode(not updates):
            found = one.model(one.x)
        assert_near([found.detach()], [expected])
        if updates:
            made = torch.autograd.grad(found.square().sum(), list(one.model.parameters()))
            assert_near(made, gradients)
            with torch.no_grad():
                for each, gradient in zip(one.model.parameters(), made, strict=True):
                    each -= 1e-3 * gradient
        one.wait_for_threads()

    with one.enable():
        for _ in range(400):
            step()
            if one.is_gated:
                break
        assert one.is_gated
        step()
        taken(seen), calls()
        host.forget()
        for _ in range(3):
            step()
        assert not seen, "no call comes to Python"
        assert len(calls()) >= 3 * (5 if updates else 2)
        assert max(host.allocated, default=0) <= LIMIT + LATER
        assert one.program.baseline_calls == 0


@pytest.fixture
def trying(program, gate_library, monkeypatch):
    """Return a program that tries plans while the gate computes by the first ones, and what comes to its tuner."""
    came = python_calls(monkeypatch, AutoInterceptor)
    one = program(share=0.02, limit_bytes=LIMIT, library=gate_library)
    with one.enable():
        one.until(lambda: one.is_gated and one.phase is TuningPhase.TRYING)
        came.clear()
        yield one, came


def until_over(one, came):
    """Take steps until nothing is tried; return for each how much was tried, and how many calls came to Python."""
    found = []
    while one.phase is TuningPhase.TRYING:
        assert one.is_gated
        tried = len(one.tuner.trials)
        one.check()
        found.append((tried, len(taken(came))))
    return found


def test_only_calls_that_are_tried_come_to_python_while_others_are_computed_by_first_plans(trying, host, calls):
    one, came = trying
    host.forget()
    calls()
    steps = until_over(one, came)
    assert {tried > 0 for tried, _ in steps} == {True, False}
    assert all(count <= tried for tried, count in steps), "two gradients of a call may be tried at once"
    assert all(bool(count) is bool(tried) for tried, count in steps), "the gate computes them again in the next step"
    assert sum(tried == 0 for tried, _ in steps) >= 2 * sum(tried > 0 for tried, _ in steps)
    assert max(host.allocated) <= LIMIT + LATER
    assert one.program.baseline_calls == 0
    assert one.phase is TuningPhase.COMPARING
    one.until(lambda: one.is_final)
    assert one.tuner.kernels, "what was tried is adopted"


def compared_steps(one, came, calls):
    """Take the steps that are compared.

    Returns:
        For each whether its time counts, whether it has the plans that are compared, how many calls came to Python, and
        how many calls of cuDNN it had.
    """
    found = []
    while one.phase is TuningPhase.COMPARING:
        counts, uses = not one.tuner._comparison.turns.begins_block, bool(one.tuner._comparison.running)
        came.clear()
        calls()
        assert one.is_gated
        one.check()
        found.append((counts, uses, len(came), len(calls())))
    return found


def test_whole_steps_are_compared_behind_the_gate_whose_plans_take_turns(trying, host, calls, monkeypatch):
    one, came = trying
    until_over(one, came)
    host.forget()
    built = noted(monkeypatch, OperationGraph, "plan")
    seen = compared_steps(one, came, calls)
    counted = [(uses, launched) for counts, uses, arrived, launched in seen if counts and not arrived]
    assert len(counted) == sum(counts for counts, *_ in seen), "steps whose times count make no calls in Python"
    assert len(counted) >= 3 * 2 * 4, "three blocks of four steps with a set, and as many without"
    first, compared = ({launched for uses, launched in counted if uses is turn} for turn in (False, True))
    assert len(first) == 1, "the heuristic plans come back each time"
    assert compared
    assert compared.isdisjoint(first)
    assert any(arrived for counts, _, arrived, _ in seen if not counts), "where plans change"
    assert not built, "engines that are compiled would be so again"
    assert max(host.allocated) <= LIMIT + LATER
    assert one.program.baseline_calls == 0


def test_calls_in_python_do_not_tell_which_plans_are_faster(trying, calls, monkeypatch):
    """The host needs a minute for each call that comes to Python, and the GPU seconds for a step."""
    one, came = trying
    until_over(one, came)
    monkeypatch.setattr(HostProgram, "idle_ms", property(lambda _: 1e3 + 6e4 * len(came)), raising=False)
    compared_steps(one, came, calls)
    assert one.tuner.kernels
    assert one.tuner.gain < 0.7


@pytest.mark.parametrize("worth", [0.0, 0.995])
def test_the_first_plans_come_back_where_no_set_is_chosen(trying, monkeypatch, calls, worth):
    one, came = trying
    monkeypatch.setattr(step_comparison, "_WORTH_KEEPING", worth)
    one.until(lambda: one.tuner.trials)
    before = one.configurations
    until_over(one, came)
    assert one.configurations != before, "the first block has the plans of a set"
    compared_steps(one, came, calls)
    assert one.phase is TuningPhase.SETTLED
    assert (one.configurations == before) is (not one.tuner.kernels) is (worth == 0)
    one.until(lambda: one.is_final)
    one.until(lambda: not taken(came))
    calls()
    one.check()
    assert len(calls()) == parts_of(one)


def test_shapes_that_are_new_while_others_are_tried_are_computed_by_the_gate_before_all_is_settled(trying):
    one, came = trying
    one.x = torch.randn(4, 4, 7, 6)
    one.check()
    assert len(came) >= 4
    came.clear()
    steps = until_over(one, came)
    quiet = [count for tried, count in steps if not tried]
    assert quiet[0] == 4
    assert quiet[-1] == 0
    assert 0 < quiet.index(0) <= 16


def test_without_an_optimizer_all_calls_come_to_python_while_others_are_tried(program, gate_library):
    one, phases = program(limit_bytes=LIMIT, library=gate_library), set()
    gate_library.begin()
    gate_library.join(300)
    with one.enable():
        while one.phase is not TuningPhase.SETTLED:
            one.infer()
            assert not one.is_gated, "no call would say where steps end"
            phases.add(one.phase)
    assert TuningPhase.TRYING in phases


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


def test_calls_in_python_are_no_reason_to_leave_a_program_alone(phases):
    _, seen = phases(ROOM, host_bounds=True, has_gate=False)
    assert TuningPhase.HOST_CHECK not in {each for each, _ in seen}
    assert TuningPhase.TRYING in {each for each, _ in seen}


@pytest.mark.parametrize("limit_bytes", [LIMIT, ROOM])
def test_a_program_that_the_gpu_bounds_is_tuned_behind_the_gate_except_where_calls_are_timed(phases, limit_bytes):
    one, seen = phases(limit_bytes, host_bounds=False)
    gated = {phase: {state for each, state in seen if each is phase} for phase, _ in seen}
    checked = [TuningPhase.HOST_CHECK] * (limit_bytes == ROOM)  # plans of several launches may bound the host
    assert [*gated][1 : 1 + len(checked)] == checked
    assert not one.tuner.host_check.is_bound
    assert any(each.candidates for each in one.tuner.sites.values())
    assert True in gated[TuningPhase.WARMING]
    assert gated[TuningPhase.WATCHING] == {False}
    assert gated.get(TuningPhase.COMPARING, {True}) == gated.get(TuningPhase.HOST_CHECK, {True}) == {True}
