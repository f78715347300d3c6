"""Workspaces of the CPU backend follow each other in one buffer, whatever sizes the problems have."""

import logging
import sqlite3
from contextlib import closing

from hypothesis import given

from tests.support.faulty_backend import check
from tests.support.operands import QUICK
from tests.support.problems import make_problem, problems
from ucudnn import Handle
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.problem import DataType, Operation

BACKEND = CpuBackend()


@given(problems())
def test_every_workspace_is_a_multiple_of_the_unit(problem):
    found = BACKEND.algorithms(problem)
    assert {each.workspace_bytes % BACKEND.workspace_unit for each in found} == {0}
    for each in found:  # and the call needs no more than is stated
        assert BACKEND.prepare(problem, each.name).workspace_bytes == each.workspace_bytes


ODD = [
    make_problem(
        operation=operation, batch=3, channels=5, spatial=(7, 9), filters=7, kernel=(3, 3), padding=(1, 1),
        groups=1, dtype=DataType.FLOAT64,
    )
    for operation in Operation
]  # fmt: skip


def divided(path):
    """Return a handle that divides a workspace among kernels of odd sizes."""
    handle = Handle(backend="cpu", total_workspace="1MiB", policy="all", effort=QUICK, database=path)
    for problem in ODD:
        handle.get_algorithm(problem, layer=problem.operation.value)
    handle.optimize()
    return handle


def assert_runs_what_it_decided(handle, caplog, least):
    planned = [kernel.configuration for kernel in handle.report().kernels]
    assert sum(kernel.workspace_bytes > 0 for kernel in handle.report().kernels) >= least
    with caplog.at_level(logging.WARNING):
        for problem in ODD:
            check(handle, problem, layer=problem.operation.value)
    assert caplog.messages == []
    assert [kernel.configuration for kernel in handle.report().kernels] == planned


def test_a_division_of_odd_sizes_runs_what_it_decided_and_rows_of_odd_sizes_do_no_harm(tmp_path, caplog):
    path = tmp_path / "times.db"
    assert_runs_what_it_decided(divided(path), caplog, 2)  # so that segments follow each other
    with closing(sqlite3.connect(path)) as connection:
        changed = connection.execute(
            "UPDATE measurements SET workspace_bytes = workspace_bytes - 13 WHERE workspace_bytes > 0"
        ).rowcount
        connection.commit()
    assert changed > 20
    assert_runs_what_it_decided(divided(path), caplog, 1)
