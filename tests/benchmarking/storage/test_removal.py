"""Rows are removed by network, problem and age, and no request stays finished that refers to what is gone."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime

import pytest

from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.problem import DataType, Layout, Operation

ONE = make_problem(batch=6, channels=12, spatial=(14, 14), filters=12, kernel=(3, 3), groups=1)
OTHER = make_problem(batch=6, channels=12, spatial=(13, 14), filters=12, kernel=(3, 3), groups=1)
FUTURE = "9999-01-01"


def request(problem, limit=1 << 20, rows=()):
    return Request(problem=problem, sizes=(1, 2, 6), limit_bytes=limit, rows=rows)


def benchmark(path, **options):
    return Benchmark(CpuBackend(), effort=QUICK, storage=open_store(str(path), CpuBackend()), **options)


@pytest.fixture
def path(tmp_path):
    """Return a database with two problems in several types and operations."""
    path = tmp_path / "times.db"
    variants = [ONE, ONE.with_operation(Operation.BACKWARD_FILTER), OTHER]
    variants.append(make_problem(**fields(ONE) | {"dtype": DataType.FLOAT64, "layout": Layout.NHWC}))
    benchmark(path).explore([request(each) for each in variants])
    return path


def fields(problem):
    names = ("batch", "channels", "spatial", "filters", "kernel", "groups")
    return {name: getattr(problem, name) for name in names}


def left(path):
    """Return the numbers of problems, measurements and explorations."""
    with closing(sqlite3.connect(path)) as connection:
        tables = ("problems", "measurements", "explorations")
        return [connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables]


def test_a_problem_goes_with_all_its_types_operations_and_sizes(path):
    before = left(path)
    assert before[2] == 4
    gone = Database(path).prune(None, problems=[ONE.with_batch(99)])
    after = left(path)
    assert after[2] == 1
    assert after[1] == before[1] - gone
    assert gone > after[1] > 0
    assert benchmark(path).micro_configurations(request(OTHER))
    again = benchmark(path)
    again.explore([request(OTHER)])
    assert again.measured == 0
    again.explore([request(ONE)])
    assert again.measured > 0


def test_a_text_selects_problems_by_their_names(path):
    assert Database(path).prune(None, texts=["no such problem"]) == 0
    assert left(path)[2] == 4
    assert Database(path).prune(None, texts=["x13X14 *"]) > 0
    assert left(path)[2] == 3
    assert Database(path).prune(None, texts=["backwardfilter 6x"]) > 0  # and its smaller micro-batches
    assert left(path)[2] == 2


def test_an_age_holds_beside_a_problem(path):
    assert Database(path).prune("2001-01-01", problems=[ONE]) == 0
    assert left(path)[2] == 4
    assert Database(path).prune(FUTURE, problems=[OTHER]) > 0
    assert left(path)[2] == 3


def test_a_request_is_not_finished_without_the_measurements_that_it_refers_to(path):
    """A request that reused old measurements is newer than they are."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE measurements SET measured_at = '2020-01-01T00:00:00+00:00'")
        connection.commit()
    benchmark(path).explore([request(ONE, limit=1 << 19)])
    assert Database(path).prune(datetime.now(UTC).replace(year=2021).isoformat()) > 0
    assert left(path)[1:] == [0, 0]
    again = benchmark(path)
    assert again.micro_configurations(request(ONE, limit=1 << 19))
    assert again.measured > 0


def test_slabs_go_with_their_problem(tmp_path):
    path = tmp_path / "slabs.db"
    benchmark(path, exhaustive=True).explore([request(ONE, limit=1 << 13, rows=(6, 3))])
    with closing(sqlite3.connect(path)) as connection:
        (divisions,) = connection.execute("SELECT divisions FROM explorations").fetchone()
    assert divisions != "[]"
    Database(path).prune(None, problems=[ONE])
    assert left(path) == [0, 0, 0]


def test_what_is_measured_again_replaces_what_was_kept(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE measurements SET time_ms = 719.0, spread_ms = 0.0")
        connection.commit()
    asked = [request(ONE), request(OTHER)]
    stale = benchmark(path)
    assert {micro.time_ms for each in asked for micro in stale.micro_configurations(each)} == {719.0}
    fresh = benchmark(path, remeasure=True)
    times = {micro.time_ms for each in asked for micro in fresh.micro_configurations(each)}
    assert 719.0 not in times
    count = fresh.measured
    assert count > 0
    fresh.explore([request(ONE)])
    assert fresh.measured == count, "once in a process is enough"
    kept = benchmark(path)
    assert {micro.time_ms for each in asked for micro in kept.micro_configurations(each)} == times
    assert kept.measured == 0
    with closing(sqlite3.connect(path)) as connection:  # other operations keep theirs
        assert connection.execute("SELECT COUNT(*) FROM measurements WHERE time_ms = 719.0").fetchone() > (0,)


def test_one_request_is_measured_again_on_demand():
    asked = request(ONE)
    own = Benchmark(CpuBackend(), effort=QUICK)
    own.explore([asked])
    count = own.measured
    own.remeasure([asked])
    assert own.measured > count
    assert own.micro_configurations(asked)


@pytest.mark.parametrize("text", ["'{'", "x'ff'", "7", "'[]'"])
def test_rows_that_make_no_sense_keep_no_others_from_being_removed(path, text):
    before = left(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE problems SET problem = {text} WHERE key = (SELECT min(key) FROM problems)")
        connection.execute("UPDATE explorations SET divisions = '['")
    database = Database(path)
    assert database.prune(None, problems=[ONE], texts=["nothing"]) > 0
    database.forget(CpuBackend().machine(), [OTHER])
    assert left(path)[1] < before[1] / 2
