"""Programs within stated limits: heuristic plans at once, others tried on the program's calls, and bytes counted."""

from random import Random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.noted import noted
from tests.support.operands import QUICK
from tests.support.tuned_program import LATER, LIMIT, TunedProgram
from ucudnn.benchmarking.measurer import Measurer
from ucudnn.execution.kernel_plans import KernelPlans
from ucudnn.handle import Handle, save_plans
from ucudnn.planning.choices import Origin
from ucudnn.settings import Settings
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.phase import TuningPhase

MIB = 1 << 20


@pytest.fixture
def measured(monkeypatch):
    """Return what is measured."""
    return noted(monkeypatch, Measurer, "explore", "measure_slab")


def origins(one, problem):
    return one.handle.plans.origins(problem)


def test_the_first_step_measures_nothing_and_its_plans_keep_the_limit(stated, host, calls, measured):
    one = stated()
    with one.enable() as on:
        host.forget()
        one.check()
        assert not measured
        layers = on.report().layers
        assert len(layers) == 5
        assert len(calls()) == sum(int(each.configuration.partition("x")[0]) for each in layers), "nothing else is run"
        assert all(each.workspace_bytes <= LIMIT for each in layers)
        assert 0 < max(host.allocated) <= LIMIT + LATER, "of what is returned afterwards, a part is lent before"
        assert one.program.baseline_calls == 0, "PyTorch's own kernels know no limit"


def test_faster_plans_replace_the_first_ones_within_the_limit_and_the_handle_computes_by_them(stated, host, measured):
    one = stated()
    with one.enable() as on:
        host.forget()
        one.settle()
        (report,) = on.report().tuned
        assert report.kernels
        assert report.gain < 1
        assert not measured
        assert max(host.allocated) <= LIMIT + LATER
        for each in report.kernels:
            assert each.time_ms < each.baseline_ms, "the heuristic plan's time"
            assert each.parts > 1
            assert each.workspace_bytes <= LIMIT == each.headroom_bytes
        adopted = {site.problem for site in one.tuner.sites.values() if site.adopted is not None}
        assert {problem for problem in one.tuner.sites if origins(one, problem) == {Origin.PROGRAM}} == adopted
        layers = {each.problem: each for each in on.report().layers if each.planned_ms is not None}
        for each in report.kernels:
            assert layers[each.problem].configuration == each.configuration
            assert layers[each.problem].planned_ms == pytest.approx(each.time_ms), "its time in the program"
        host.forget()
        assert one.computed() == 5
        assert on.report().tuned[0].calls == report.calls, "the tuner is out of the way"
        assert max(host.allocated) <= LIMIT + LATER


@pytest.mark.parametrize("has_gate", [False, True])
def test_plans_of_tensors_that_are_copied_first_are_replaced_like_others(stated, gate_library, has_gate):
    """As in networks that concatenate: the gradient of one part is a view of that of the whole."""
    one = stated(library=gate_library if has_gate else None)

    def as_view(grad):
        whole = torch.full((len(grad), 2 * grad.shape[1], *grad.shape[2:]), float("nan"))
        whole[:, : grad.shape[1]] = grad
        return whole[:, : grad.shape[1]]

    def viewed(module, given, out):
        out.register_hook(as_view)

    one.model[2].register_forward_hook(viewed)
    one.x = torch.cat([one.x, one.x], 1)[:, :4]
    assert not one.x.is_contiguous()
    with one.enable():
        one.settle()
        sites = one.tuner.sites.values()
        assert len(sites) == 5, "none is left to its heuristic plan"
        assert all(each.baseline_ms and each.candidates for each in sites)
        adopted = [each.problem for each in sites if each.adopted is not None]
        assert len(adopted) >= 4
        assert all(origins(one, each) == {Origin.PROGRAM} for each in adopted)
        for _ in range(40):
            one.check()
        assert one.program.baseline_calls == 0


def test_training_that_begins_while_plans_are_compared_in_inference_has_the_first_ones(stated):
    one = stated()
    with one.enable():
        while one.phase is not TuningPhase.COMPARING:
            before = one.configurations
            one.infer()
        assert one.configurations != before
        one.check()
        assert one.phase is TuningPhase.WARMING
        assert {key: one.configurations[key] for key in before} == before
        one.settle()
        assert one.tuner.kernels, "and other ones in the end"


def test_the_first_plan_stays_where_nothing_is_faster(stated):
    one = stated(1 << 20)  # the fast engine computes all at once
    with one.enable() as on:
        one.settle()
        (report,) = on.report().tuned
        assert not report.kernels
        assert sum(report.outcomes.values()) >= 5, "others were tried"
        assert {origin for problem in one.tuner.sites for origin in origins(one, problem.without_bias())} == {
            Origin.RULE
        }


def test_plans_of_a_settled_program_are_saved_and_used_at_once_by_the_next_one(stated, tmp_path, measured):
    first = stated()
    with first.enable() as on:
        first.settle()
        adopted = sorted((each.problem, each.configuration) for each in on.report().layers)
    save_plans([first.handle], tmp_path / "plans.json")
    one = stated(plans=str(tmp_path / "plans.json"))
    with one.enable() as on:
        one.check()
        assert all(origins(one, problem) == {Origin.FILE} for problem in first.tuner.sites)
        assert set(adopted) >= {(each.problem, each.configuration) for each in on.report().layers}
        assert on.report().divided
        one.settle()
        assert not on.report().tuned[0].outcomes, "nothing is tried beside a plan that was asked for"
        assert not measured


def test_what_a_database_has_is_used_at_once_and_not_tried_again(stated, tmp_path, measured):
    path = str(tmp_path / "measurements.db")
    one = stated(database=path)
    settings = Settings(workspace_limit_bytes=LIMIT, database=path)
    first = Interceptor(
        lambda _: Handle.from_settings(settings, backend=one._opened(), effort=QUICK), "cpu", one.made.aten
    )
    process_overrides.use(first)
    one.check()
    before = len(measured)
    assert before, "this handle measures"
    with one.enable() as on:
        one.settle()
        assert len(measured) == before
        assert all(origins(one, problem.without_bias()) == {Origin.MEASURED} for problem in one.tuner.sites)
        assert not on.report().tuned[0].outcomes


def test_no_thread_begins_to_build_while_first_plans_are_made(stated):
    one = stated()
    usual = one.x
    with one.enable():
        while not (one.phase is TuningPhase.TRYING and one.source._goes_on.is_set()):
            one.step()
        for rows in (9, 10, 11):  # images of new sizes
            one.x = torch.randn(8, 4, rows, 6)
            one.check()
            assert not one.source._goes_on.is_set()
        one.x = usual
        for _ in range(3):  # of which one may have trials
            one.check()
        assert one.source._goes_on.is_set()
        one.settle()


def test_trials_wait_until_the_share_covers_what_new_shapes_waited_for_plans(stated):
    one = stated()
    with one.enable() as on:
        while one.phase is not TuningPhase.TRYING:
            one.check()
        plans = one.handle.plans
        plans.seconds += 1e6
        for _ in range(12):
            one.check()
            assert not one.tuner.trials
        plans.seconds -= 1e6
        one.settle()
        assert on.report().tuned[0].outcomes


def test_a_checkpoint_computes_again_by_the_plan_of_its_forward_pass(stated, monkeypatch):
    one = stated()
    part = torch.nn.Sequential(*one.model)
    one.model.forward = lambda x: checkpoint(part, x, use_reentrant=False)
    changed = noted(monkeypatch, KernelPlans, "adopt", of=lambda *_: torch._C._current_graph_task_id())
    with one.enable():
        one.settle()
        assert changed
        assert set(changed) == {-1}, "plans change outside of backward passes only"
        assert one.computed() == 6, "the output of the last layer is not needed again"


def test_new_image_sizes_wait_for_no_measurement_and_keep_the_limit(stated, host, measured):
    one = stated()
    sizes = [torch.randn(8, 4, height, 6) for height in (5, 6, 7, 8, 9)]
    shuffled = Random(0)
    with one.enable() as on:
        host.forget()
        while one.phase is not TuningPhase.SETTLED:
            one.x = shuffled.choice(sizes)
            one.check()
        assert not measured
        assert on.report().tuned[0].outcomes
        for one.x in sizes:
            one.check()
        assert max(host.allocated) <= LIMIT + LATER * 9 // 7
        assert one.program.baseline_calls == 0


def test_live_bytes_and_workspace_together_keep_a_limit_of_memory(stated, host):
    def peak_of(one, take):
        with one.enable() as on:
            host.forget()
            take(one)
            assert one.program.baseline_calls == 0
            return host.peak_bytes, on.report()

    live_only, _ = peak_of(stated(0), TunedProgram.step)
    free, _ = peak_of(stated(MIB), TunedProgram.step)
    most = live_only + 4096
    assert most < free, "the limit of each kernel alone would take more"
    one = stated(MIB, memory_bytes=MIB + most)  # of which 1 MiB is lost to rounding
    held, report = peak_of(one, TunedProgram.settle)
    assert live_only < held <= most, "trials and checks included"
    assert not one.memory.exceeded
    assert report.tuned[0].peak_bytes == one.memory.limit_bytes
    rooms = [site.headroom_bytes for site in one.tuner.sites.values()]
    assert min(rooms) < max(rooms) < MIB, "each has what live bytes leave at its calls"
    more = most - live_only  # tensors of the program take what was left for workspaces
    with one.enable():
        host._count(more)
        host.forget()
        one.check()
        host._count(-more)
    assert host.peak_bytes <= most
    assert any(each.replaced for handle in one.made.handles().values() for each in handle.report().kernels)
    assert one.program.baseline_calls == 0


def test_live_bytes_that_alone_exceed_the_limit_of_memory_are_told_and_nothing_gets_a_workspace(stated, host, caplog):
    one = stated(1 << 20, memory_bytes=1000)
    with one.enable() as on:
        host.forget()
        for _ in range(3):
            one.check()
        assert caplog.text.count("alone exceed the limit of 1000 bytes") == 1
        assert not host.allocated
        assert on.report().calls == 15, "by algorithms that need none"
