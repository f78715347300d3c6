"""The largest mini-batches of a step: those that fit, and no much larger one, within the time that is allowed."""

from dataclasses import replace

import pytest

from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.segments import segmented_bytes
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.reports.fits import CONTEXT_BYTES, largest_batches
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step

BUDGET = 12 * 2**30
STEP = open_step("vgg16_bn")


def costs_of(graph):
    return device_costs(load_device("rtx-3090"), graph)


def planned(batch):
    """Return peak and time of the fastest plan at a mini-batch."""
    sized = STEP.with_batch(batch)
    done = simulate(make_plan(sized, costs_of(sized), BUDGET - CONTEXT_BYTES, "auto"), costs_of(sized))
    return done.peak_bytes, done.step_ms


def segments(batch):
    """Return what PyTorch's allocator takes for the program as it is at a mini-batch."""
    sized = STEP.with_batch(batch)
    plan = make_plan(sized, costs_of(sized), None, "stock")
    return segmented_bytes(plan, costs_of(sized), simulate(plan, costs_of(sized)), BUDGET - CONTEXT_BYTES)


@pytest.mark.slow
def test_each_way_has_its_largest_mini_batch_and_what_it_costs():
    found = largest_batches(STEP, costs_of, BUDGET)
    plain, some, more, most = found.rows
    sized = STEP.with_batch(plain.batch)
    assert measure_liveness(sized, costs_of(sized)).peak_bytes == plain.peak_bytes
    assert plain.peak_bytes < segments(plain.batch) <= BUDGET - CONTEXT_BYTES
    with pytest.raises(BudgetError):
        segments(plain.batch + 1)
    assert plain.batch < most.batch
    assert some.batch <= more.batch <= most.batch
    for row in (some, more, most):
        assert (row.peak_bytes, row.time_ms) == planned(row.batch)
    own_ms = plain.time_ms / plain.batch
    assert [row.time_ms / row.batch / own_ms <= bound for row, bound in ((some, 1.1), (more, 1.5))] == [True, True]
    assert planned(round(1.1 * some.batch))[1] > 1.1 * round(1.1 * some.batch) * own_ms
    with pytest.raises(BudgetError):
        planned(most.batch + 1)
    [line] = found.lines()
    assert line.endswith(f"budget={BUDGET})")
    way = f"with fit, divided{most.way.removeprefix('with fit')}"
    lines = replace(found, rows=(*found.rows, replace(most, way=way))).lines()
    assert lines == [line, f"{line.replace('with fit', 'with fit, divided')[:-1]}, divide=True)"]
    assert [row[:2] for row in found.table()[1]] == [[row.way, str(row.batch)] for row in found.rows]


def test_a_way_without_a_mini_batch_says_so():
    found = largest_batches(STEP, costs_of, CONTEXT_BYTES + 2**20)
    assert {row.batch for row in found.rows} == {0}
    assert {row[1] for row in found.table()[1]} == {"none"}
    with pytest.raises(BudgetError, match="leaves nothing beside CUDA's context, 1 GiB"):
        largest_batches(STEP, costs_of, CONTEXT_BYTES)
