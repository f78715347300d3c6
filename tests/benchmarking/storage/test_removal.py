"""Rows are removed by age, and measured again on demand. No request stays finished that refers to what is gone."""

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from sqlite3 import connect

import pytest

from tests.support.databases import edit
from tests.support.operands import QUICK
from tests.support.problems import DENSE, make_problem
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.problem import Operation

ONE = make_problem(batch=6, channels=12, spatial=(14, 14), filters=12, kernel=(3, 3), groups=1)
OTHER = replace(ONE, spatial=(13, 14), **DENSE)


def request(problem, limit=1 << 20, rows=()):
    return Request(problem=problem, sizes=(1, 2, 6), limit_bytes=limit, rows=rows)


def benchmark(path, **options):
    return Benchmark(CpuBackend(), effort=QUICK, storage=open_store(str(path), CpuBackend()), **options)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "times.db"
    benchmark(path).explore([request(each) for each in (ONE, ONE.with_operation(Operation.BACKWARD_FILTER), OTHER)])
    return path


def count(path, table="measurements", where="1"):
    with closing(connect(path)) as connection:
        return connection.execute(f"SELECT COUNT(*) FROM {table} WHERE {where}").fetchone()[0]


def test_a_request_is_not_finished_without_the_measurements_that_it_refers_to(path):
    """A request that reused old measurements is newer than they are."""
    edit(path, "UPDATE measurements SET measured_at = '2020-01-01T00:00:00+00:00'")
    benchmark(path).explore([request(ONE, limit=1 << 19)])
    assert Database(path).prune("2019-01-01") == 0
    assert count(path, "explorations") == 4
    assert Database(path).prune(datetime.now(UTC).replace(year=2021).isoformat()) > 0
    assert [count(path, table) for table in ("machines", "problems", "measurements", "explorations")] == [0] * 4
    again = benchmark(path)
    assert again.micro_configurations(request(ONE, limit=1 << 19))
    assert again.measured > 0


def test_slabs_are_forgotten_with_their_problem(tmp_path):
    path = tmp_path / "slabs.db"
    benchmark(path, exhaustive=True).explore([request(ONE, limit=1 << 13, rows=(6, 3))])
    assert count(path, "explorations", "divisions <> '[]'") == 1
    Database(path).forget(CpuBackend().machine(), [ONE.with_batch(3)])
    assert count(path) == count(path, "explorations") == 0


def test_what_is_measured_again_replaces_what_was_kept(path):
    edit(path, "UPDATE measurements SET time_ms = 719.0, spread_ms = 0.0")
    asked = [request(ONE), request(OTHER)]
    stale = benchmark(path)
    assert {micro.time_ms for each in asked for micro in stale.micro_configurations(each)} == {719.0}
    fresh = benchmark(path, remeasure=True)
    times = {micro.time_ms for each in asked for micro in fresh.micro_configurations(each)}
    assert 719.0 not in times
    measured = fresh.measured
    assert measured > 0
    fresh.explore([request(ONE)])
    assert fresh.measured == measured, "once in a process is enough"
    kept = benchmark(path)
    assert {micro.time_ms for each in asked for micro in kept.micro_configurations(each)} == times
    assert kept.measured == 0
    assert count(path, where="time_ms = 719.0") > 0  # other operations keep theirs
    kept.remeasure([request(ONE)])  # on demand
    measured = kept.measured
    assert measured > 0
    kept.explore([request(ONE.with_operation(Operation.BACKWARD_FILTER))])
    assert kept.measured == measured, "what is not forgotten is still read from the file"


@pytest.mark.parametrize("text", ["'{'", "x'ff'", "7", "'[]'"])
def test_rows_that_make_no_sense_keep_no_others_from_being_removed(path, text):
    before = count(path)
    edit(path, f"UPDATE problems SET problem = {text} WHERE key = (SELECT min(key) FROM problems)")
    edit(path, "UPDATE explorations SET divisions = '['")
    database = Database(path)
    database.forget(CpuBackend().machine(), [ONE, OTHER])
    assert 0 < count(path) < before * 3 / 4
    assert database.prune(None) > 0
    assert count(path) == 0
