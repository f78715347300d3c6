"""Small databases with real rows, for tests of what becomes of their files."""

from contextlib import closing
from dataclasses import replace

from tests.support.problems import make_problem
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.profiles.measurement import Algorithm, Measurement

MACHINE = {"device": "a GPU", "cudnn": "9.19.0"}
PROBLEM = make_problem(batch=4)
REQUEST = Request(problem=PROBLEM, sizes=(1, 2, 4), limit_bytes=1000)
EXPLORATION = Exploration(names=("eng1_k2=3", "eng2"), sizes=(1, 2, 4))


def measurement(name="eng1_k2=3", time_ms=1.25):
    algorithm = Algorithm(name=name, workspace_bytes=512, api="graph", notes=("TENSOR_CORE",), compiles=True)
    return replace(Measurement.of(algorithm, [time_ms]), samples=6)


def rows(time_ms=1.25):
    """Return two measurements for each size of the request, one of them failed."""
    failed = Measurement.failed(replace(measurement().algorithm, name="eng2"), "CUDNN_STATUS_NOT_SUPPORTED")
    return [(PROBLEM.part(size), each) for size in REQUEST.sizes for each in (measurement(time_ms=time_ms), failed)]


def fill(path, time_ms=1.25):
    """Write the rows and the exploration to a database, and close it."""
    with closing(Database(path)) as database:
        database.save(MACHINE, rows(time_ms))
        database.save_exploration(MACHINE, "cudnn", REQUEST, EXPLORATION)
