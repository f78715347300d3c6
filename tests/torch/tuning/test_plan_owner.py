"""Which heuristic plans leave it to a check of the host whether others are tried."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.support.problems import make_problem
from ucudnn.configuration import Configuration, Float32Sum, MicroConfiguration
from ucudnn.torch.device.memory_limit import StatedHeadroom
from ucudnn.torch.tuning.plan_owner import PlanOwner


def plan(*sizes, algorithm="eng65_k2=1", total=None):
    parts = (MicroConfiguration(size=each, algorithm=algorithm, time_ms=1.0, workspace_bytes=0) for each in sizes)
    return Configuration(parts=tuple(parts), float32_sum=total)


def owner_of(*plans, groups=1):
    """Return the owner of plans of a problem with 8 samples, and of a kernel that has none."""
    problem = make_problem(batch=8, channels=4 * groups, filters=4 * groups, groups=groups)
    entries = [
        SimpleNamespace(kernel=SimpleNamespace(problem=problem), decision=each and SimpleNamespace(configuration=each))
        for each in (*plans, None)
    ]
    backend = SimpleNamespace(lock=nullcontext())
    handle = SimpleNamespace(backend=backend, plans=SimpleNamespace(entries=dict(enumerate(entries))))
    return PlanOwner(lambda: handle, StatedHeadroom(0))


@pytest.mark.parametrize(
    ("plans", "groups", "expected"),
    [
        ([plan(8)], 1, True),
        ([plan(8), plan(8, algorithm="eng0")], 1, True),
        ([plan(8, total=Float32Sum(size_bytes=1, time_ms=1.0))], 1, True),
        ([plan(8), plan(4, 4)], 1, False),
        ([plan(8), plan(8, algorithm="eng0")], 4, False),  # a launch for each group
        ([plan(8, algorithm="eng0_k2=1")], 4, False),
        ([plan(8)], 4, True),
    ],
)
def test_the_host_is_checked_where_no_plan_launches_many_kernels(plans, groups, expected):
    assert owner_of(*plans, groups=groups).checks_host(gated=True, steps=1) is expected


def test_the_gate_is_awaited_for_a_while_because_calls_in_python_bound_the_host():
    owner = owner_of(plan(8))
    assert owner.checks_host(gated=None, steps=1) is None
    assert owner.checks_host(gated=None, steps=1000) is False
    assert owner.checks_host(gated=False, steps=1) is False


def test_ranks_are_not_delayed_in_steps_of_their_own(monkeypatch):
    owner = owner_of(plan(8))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert owner.checks_host(gated=True, steps=1) is False
