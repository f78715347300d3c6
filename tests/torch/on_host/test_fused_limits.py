"""Engines that add a bias within a stated limit: tried against the heuristic plan, adopted, gated, saved and loaded."""

from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.host_gpu import assert_near
from tests.support.tuned_program import LATER, LIMIT, product, python_calls, taken
from ucudnn.handle import save_plans
from ucudnn.planning.choices import Origin
from ucudnn.problem import WITH_BIAS
from ucudnn.torch.calls.fused_call import is_fused
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps import step_comparison
from ucudnn.torch.steps.phase import TuningPhase

CALLS = 5
"""Kernels of a step."""


def biased_site(one):
    """Return what is known of the only kernel with a bias."""
    (found,) = (site for problem, site in one.tuner.sites.items() if problem.biased)
    return found


def fused_calls(one):
    """Return how many calls the handle has computed by engines that add the bias; None if it has no such plan."""
    found = [each for each in one.handle.report().kernels if str(each.problem).endswith(WITH_BIAS)]
    assert len(found) < 2
    return found[0].calls if found else None


def additions(one):
    """Take a step, which is checked, and return how many operators added a bias."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        out = one.model(one.x)
    assert_near([out], [one._by_matrices()[0]])
    return sum(each.name == "aten::add_" for each in found.events())


def test_an_engine_that_adds_the_bias_replaces_the_first_plan_within_the_limit(stated, host):
    one = stated()
    with one.enable() as on:
        host.forget()
        one.check()
        assert fused_calls(one) is None
        assert additions(one) == 1, "the heuristic plan is the one without the bias"
        one.settle()
        site = biased_site(one)
        assert site.adopted.configuration.parts[0].size < 8, "divided to fit the limit"
        assert one.handle.plans.origins(site.problem) == {Origin.PROGRAM}
        assert one.handle.plans.origins(site.problem.without_bias()) == {Origin.RULE}, "for calls without a bias"
        assert additions(one) == 0
        calls = fused_calls(one)
        assert one.computed() == CALLS
        assert fused_calls(one) == calls + 1
        assert 0 < site.adopted.workspace_bytes <= LIMIT
        assert max(host.allocated) <= LIMIT + LATER, "trials included"
        assert one.program.baseline_calls == 0
        layer = next(each for each in on.report().layers if each.problem.endswith(WITH_BIAS))
        assert layer.layer == "0", "the name of the module"
        x = torch.randn_like(one.x)
        weight, bias = one.model[0].weight.detach(), one.model[0].bias.detach()
        plain = torch.conv2d(x, weight, None, padding=1)
        assert fused_calls(one) == calls + 1, "a call without a bias has its own plan"
        shifted = torch.empty(7)[1:].copy_(bias)
        found = torch.conv2d(x, weight, shifted, padding=1)
        assert fused_calls(one) == calls + 1, "the engine cannot read a bias that is not aligned"
        expected = product(x.double(), weight.double())
        assert_near([plain, found], [expected.float(), (expected + bias.double()[:, None, None]).float()])
        added = next(each for each in site.candidates if not is_fused(each.configuration))
        with one.handle.backend.lock:
            one.handle.plans.adopt(site.problem, added.configuration)
        assert additions(one) == 1, "by PyTorch, because cuDNN's kernel would add it once for each part"


def test_where_no_set_is_chosen_the_bias_is_added_apart_again(stated, monkeypatch):
    monkeypatch.setattr(step_comparison, "_WORTH_KEEPING", 0.0)
    one = stated()
    with one.enable():
        one.until(lambda: one.phase is TuningPhase.COMPARING)
        seen = set()
        while one.phase is TuningPhase.COMPARING:
            uses = biased_site(one).problem in one.tuner._comparison.running
            seen.add((uses, additions(one)))
            one.check()
        assert seen == {(True, 0), (False, 1)}
        assert not one.tuner.kernels
        assert one.handle.plans.origins(biased_site(one).problem) == set()
        assert additions(one) == 1


def test_without_such_an_engine_the_plan_without_the_bias_is_replaced(stated, stub):
    stub.stub_refuse_bias(1)
    one = stated()
    with one.enable():
        one.settle()
        site = biased_site(one)
        assert one.handle.plans.origins(site.problem) == set()
        assert one.handle.plans.origins(site.problem.without_bias()) == {Origin.PROGRAM}
        assert fused_calls(one) is None
        assert additions(one) == 1
        one.check()


def test_a_saved_plan_with_a_bias_is_used_at_once_and_a_file_without_it_takes_its_place(stated, tmp_path):
    first = stated()
    with first.enable():
        first.check()
        save_plans([first.handle], tmp_path / "plain.json")
        first.settle()
        assert additions(first) == 0
        save_plans([first.handle], tmp_path / "fused.json")
        adopted = biased_site(first).adopted.configuration.parts
    one = stated(plans=str(tmp_path / "fused.json"))
    with one.enable():
        assert additions(one) == 0
        assert fused_calls(one) == 1
        (problem,) = (each for each in one.planned.problems() if each.biased)
        assert one.handle.plans.origins(problem) == {Origin.FILE}
        (saved,) = (each for each in one.handle.saved_plans() if each.kernel.problem == problem)
        alike = [(each.size, each.algorithm, each.workspace_bytes) for each in adopted]
        assert [(each.size, each.algorithm, each.workspace_bytes) for each in saved.configuration.parts] == alike
        one.settle()
        assert biased_site(one).candidates is None, "nothing is tried beside a plan that was asked for"
        slow = replace(saved.configuration, parts=(replace(adopted[0], size=1),) * 8)
        with one.handle.backend.lock:
            one.handle.plans.adopt(problem, slow)
        assert additions(one) == 0, "another plan takes the place of a loaded one"
        assert one.handle.plans.origins(problem) == {Origin.PROGRAM}
        one.handle.load_plans(tmp_path / "plain.json")
        assert additions(one) == 1
        assert one.handle.plans.origins(problem) == set()
        one.handle.load_plans(tmp_path / "fused.json")
        assert additions(one) == 0


def test_such_engines_are_not_tried_among_deterministic_algorithms_or_in_a_capture(stated, host, monkeypatch):
    one = stated()
    with one.enable():
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            for _ in range(8):
                assert additions(one) == 1
        assert not any(problem.biased for problem in one.tuner.sites)
        one.settle()
        assert additions(one) == 0
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            assert additions(one) == 1, "by the fixed rule, as before"
        one.handle.plans.epoch += 1  # as if other plans had come
        with host.elsewhere(captures=True):
            assert additions(one) == 0
        assert one.handle.captured, "and its plan is kept"


def test_an_engine_that_fails_is_replaced_and_the_bias_is_added_once(stated, host):
    one = stated()
    with one.enable():
        one.settle()
        assert additions(one) == 0
        host.forget()
        one.model[0].bias.data = one.model[0].bias.data.clone()  # elsewhere, so that the call is not bound
        with host.failing(0):
            out = one.model(one.x)
        assert_near([out], [one._by_matrices()[0]])
        one.check()
        assert max(host.allocated, default=0) <= LIMIT + LATER


def test_the_gate_computes_by_engines_that_add_the_bias(stated, gate_library, monkeypatch, host):
    one = stated(library=gate_library)
    with one.enable():
        one.until(lambda: one.is_final)
        in_python = python_calls(monkeypatch)
        process_overrides.use(process_overrides.interceptor)  # registers its methods again
        one.until(lambda: not taken(in_python))
        calls = fused_calls(one)
        host.forget()
        assert additions(one) == 0
        one.check()
        assert not in_python
        assert fused_calls(one) == calls + 2
        with torch.no_grad():
            one.model[0].bias.data = torch.empty(7)[1:].copy_(one.model[0].bias)
        assert additions(one) == 1, "the engine cannot read a bias that is not aligned"
        assert len(taken(in_python)) == 1
        one.model[0].bias.data = one.model[0].bias.data.clone()
        site = biased_site(one)
        handle = one.handle
        with handle.backend.lock:
            handle.plans.adopt(site.problem, site.adopted.configuration)
        assert additions(one) == 0
        assert len(in_python) == 1, "a changed plan is seen at once"
        one.until(lambda: not taken(in_python))
        assert one.program.baseline_calls == 0
