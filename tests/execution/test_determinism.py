"""Results that must repeat do, in every process: no timing, no database and no free memory changes a plan."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from tests.support.faulty_backend import FaultyBackend
from tests.support.operands import PROBLEM, QUICK, operands
from tests.support.ranks import run_ranks
from ucudnn.errors import BackendError, StepError, UnsupportedProblemError
from ucudnn.handle import Handle
from ucudnn.planning.choices import Origin

pytestmark = pytest.mark.slow  # many processes compute the same
PROGRAM = """
import hashlib
import sys
import numpy as np
from tests.support.operands import QUICK
from tests.support.poisoned import poison_times
from ucudnn.handle import Handle

poison_times()
options = eval(sys.argv[2])
handle = Handle(backend="cpu", effort=QUICK, policy="all", **options)
random = np.random.default_rng(7)
made = hashlib.sha256()
for batch, channels, size in ((6, 5, 12), (7, 4, 9), (4, 8, 16)):
    x, w, y = (random.standard_normal(shape, np.float32) for shape in (
        (batch, channels, size, size), (8, channels, 3, 3), (batch, 8, size, size)))
    for operation, tensors in (
        (handle.forward, (x, w, y)), (handle.backward_data, (w, y, x)), (handle.backward_filter, (x, y, w))
    ):
        operation(*tensors, padding=1, deterministic=sys.argv[3] == "1")
        made.update(tensors[-1].tobytes())
if sys.argv[1] == "0" and len(sys.argv) > 4:
    handle.save_plans(sys.argv[4])
print(made.hexdigest(), sorted(str(entry.decision.configuration) for entry in handle._entries.values()))
"""


def outcomes(world, options, *arguments):
    """Return what processes print, in which every measurement ends with a random time."""
    ended = run_ranks(PROGRAM, repr(options), *arguments, world=world, OMP_NUM_THREADS="1")
    assert [status for *_, status in ended] == [0] * world, ended
    return [output for output, *_ in ended]


LIMITS = [{"workspace_limit": "64KiB"}, {"total_workspace": "256KiB"}]


@pytest.mark.parametrize("limits", LIMITS, ids=["WR", "WD"])
def test_six_processes_without_a_database_give_the_same_bits(limits):
    assert len(set(outcomes(6, {**limits, "database": "off"}, 1))) == 1


@pytest.mark.parametrize("limits", LIMITS, ids=["WR", "WD"])
def test_rows_of_a_database_do_not_matter(tmp_path, limits):
    path = tmp_path / "times.sqlite"
    (alone,) = outcomes(1, {**limits, "database": "off"}, 1)
    outcomes(1, {**limits, "database": str(path)}, 0)  # which measures, and keeps random times
    with closing(sqlite3.connect(path)) as database:
        (rows,) = database.execute("SELECT count(*) FROM measurements").fetchone()
    assert rows > 20
    assert outcomes(2, {**limits, "database": str(path)}, 1) == [alone] * 2


@pytest.mark.parametrize("limits", LIMITS, ids=["WR", "WD"])
def test_loaded_plans_give_the_same_bits_in_every_process(tmp_path, limits):
    path = str(tmp_path / "plans.json")
    (first,) = outcomes(1, {**limits, "database": "off"}, 0, path)  # planned by random times
    (other,) = outcomes(1, {**limits, "database": "off"}, 0)
    assert other != first  # else the rest would show nothing
    found = set(outcomes(3, {**limits, "database": "off", "plans": path}, 0))
    # Under WD, the process that saved the plans had others until it knew all kernels.
    assert found == {first} if "workspace_limit" in limits else len(found) == 1


def deterministic(backend, **options):
    """Return a handle on a backend, and a function that computes the problem so that it repeats."""
    handle = Handle(backend=backend, effort=QUICK, database="off", workspace_limit=100_000, **options)
    x, w, y = operands(PROBLEM)

    def run(**scaling):
        handle.forward(x, w, y, padding=1, deterministic=True, **scaling)
        return y.copy()

    return handle, run


def test_a_full_memory_is_an_error_and_not_another_plan():
    backend = FaultyBackend()
    handle, run = deterministic(backend)
    backend.memory = 1000
    with pytest.raises(BackendError, match="no room for a workspace of"):
        run()
    (entry,) = handle._entries.values()
    planned = entry.decision
    assert planned.workspace_bytes > 1000
    backend.memory = 2**40
    run()
    assert entry.decision is planned


def test_a_failure_that_may_pass_is_an_error_and_not_another_plan():
    backend = FaultyBackend()
    handle, run = deterministic(backend)
    expected = run()
    (entry,) = handle._entries.values()
    planned = entry.decision
    backend.broken, backend.error = {planned.configuration.parts[0].algorithm}, BackendError
    for scaling in ({}, {"alpha": 0.5}):
        backend.log.clear()
        with pytest.raises(StepError, match="is broken"):
            run(**scaling)
        assert len(backend.log) == 1, "no other algorithm computes it"
    backend.broken = set()
    assert entry.decision is planned
    np.testing.assert_array_equal(run(), expected)


def test_an_algorithm_that_cannot_be_prepared_is_replaced_by_the_rule():
    usual, run = deterministic(FaultyBackend())
    run()
    (entry,) = usual._entries.values()
    taken = {part.algorithm for part in entry.decision.configuration.parts}
    backend = FaultyBackend()
    backend.unprepared = taken
    handle, run = deterministic(backend)
    found = run()
    (entry,) = handle._entries.values()
    assert entry.decision.origin is Origin.RULE
    assert not taken & {part.algorithm for part in entry.decision.configuration.parts}
    (told,) = handle.report().kernels[0].replaced
    assert "was replaced by" in told
    assert "predicted" not in told
    again = FaultyBackend()
    again.unprepared = taken
    np.testing.assert_array_equal(deterministic(again)[1](), found)


def test_a_loaded_plan_that_fails_is_an_error(tmp_path):
    handle, run = deterministic(FaultyBackend())
    run()
    handle.save_plans(tmp_path / "plans.json")
    (part, *_) = next(iter(handle._entries.values())).decision.configuration.parts
    backend = FaultyBackend()
    backend.broken = {part.algorithm}
    _, run = deterministic(backend, plans=tmp_path / "plans.json")
    with pytest.raises(StepError) as failed:
        run()
    assert isinstance(failed.value.__cause__, UnsupportedProblemError)


def test_a_saved_rule_has_no_times(tmp_path):
    handle, run = deterministic(FaultyBackend())
    run()
    handle.save_plans(tmp_path / "plans.json")
    (plan,) = json.loads((tmp_path / "plans.json").read_bytes())["plans"]
    assert {time for _, _, time, *_ in plan["parts"]} == {None}
    (kernel,) = handle.report().kernels
    assert (kernel.micro_batched_ms, kernel.undivided_ms, kernel.speedup, kernel.origin) == (None, None, None, "rule")
    assert "not measured: 1 by heuristic mode, without a time" in str(handle.report())
    assert "predicted" not in str(handle.report())
    _, run = deterministic(FaultyBackend(), plans=tmp_path / "plans.json")
    run()
