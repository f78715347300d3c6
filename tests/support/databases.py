"""Small databases with real rows, for tests of what becomes of their files."""

import sqlite3
from contextlib import closing
from dataclasses import replace

from tests.support.problems import make_problem
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.profiles.measurement import Algorithm, Measurement

MACHINE = {"device": "a GPU", "cudnn": "9.19.0"}
PROBLEM = make_problem(batch=4)
REQUEST = Request(problem=PROBLEM, sizes=(1, 2, 4), limit_bytes=1000)
PARTS = [PROBLEM.part(size) for size in REQUEST.sizes]
EXPLORATION = Exploration(names=("eng1_k2=3", "eng2"), sizes=(1, 2, 4))


def measurement(name="eng1_k2=3", time_ms=1.25, **options):
    notes = ("TENSOR_CORE", "NONDETERMINISTIC")
    algorithm = Algorithm(name=name, workspace_bytes=512, api="graph", notes=notes, compiles=True)
    return replace(Measurement.of(algorithm, [time_ms]), **{"samples": 6} | options)


def rows(time_ms=1.25):
    """Return two measurements for each size of the request, one of them failed."""
    failed = Measurement.failed(replace(measurement().algorithm, name="eng2"), "CUDNN_STATUS_NOT_SUPPORTED")
    return [(part, each) for part in PARTS for each in (measurement(time_ms=time_ms), failed)]


def fill(path, time_ms=1.25):
    """Write the rows and the exploration to a database, and close it."""
    with closing(Database(path)) as database:
        database.save(MACHINE, rows(time_ms))
        database.save_exploration(MACHINE, "cudnn", REQUEST, EXPLORATION)


def edit(path, statements):
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA writable_schema = ON; {statements}")


def files_set_aside(path):
    return [file for file in path.parent.iterdir() if "damaged" in file.name and file.name[-4:] not in ("-wal", "-shm")]
