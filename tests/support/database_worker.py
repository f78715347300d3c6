"""A process that measures on NumPy and saves the measurements, for tests of many processes on one database.

    python -m tests.support.database_worker DATABASE LOG SEED SECONDS [victim | spoiled]

It goes on for some seconds, and on a slow machine until it has committed some times. It writes a line to LOG after each
commit. A victim prints a line when its last transaction is written but not committed, and waits to be killed. One that
is spoiled plans the same few problems again and again for a machine of its own, whose rows it spoils, while some of its
reads fail. It writes how many plans it made, and how many reads failed or met damage. Others that are spoiled may use
the same file, which they set aside.
"""

import logging
import os
import random
import sqlite3
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.rows import dump, key_of
from ucudnn.benchmarking.storage.sqlite_file import DatabaseFile
from ucudnn.benchmarking.storage.store import MachineStore
from ucudnn.errors import DatabaseError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Effort
from ucudnn.solvers.desirable import fastest

FEWEST_TURNS = 20
SPOILERS = [
    "UPDATE measurements SET time_ms = -1",
    "UPDATE measurements SET time_ms = 9e999",
    "UPDATE measurements SET time_ms = 'fast'",
    "UPDATE measurements SET workspace_bytes = 1.5",
    "UPDATE measurements SET samples = x'00'",
    "UPDATE measurements SET complete = 7",
    "UPDATE measurements SET status = 'measured', time_ms = 0",
    "UPDATE measurements SET notes = x'ff'",
    "DELETE FROM measurements",
    "UPDATE explorations SET sizes = '['",
    "UPDATE explorations SET names = '7'",
    "UPDATE explorations SET divisions = zeroblob(9)",
]


def problem_of(seed, turn):
    """Return a problem that no other process measures."""
    return ConvolutionProblem(
        operation=list(Operation)[turn % 3],
        batch=4,
        channels=1 + seed,
        spatial=(3 + turn // 3 % 50, 4 + turn // 150),
        filters=2,
        kernel=(2, 2),
    )


def request_of(seed, turn):
    return Request(problem=problem_of(seed, turn), sizes=(1, 2, 4), limit_bytes=1 << 30)


def spoil(path, machine, chance):
    """Spoil some rows of a machine, as people do who edit a database by hand."""
    # Another process may have set the file aside, and have begun no new one.
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path, timeout=60)) as connection, connection:
        connection.execute(f"{chance.choice(SPOILERS)} WHERE machine = ? AND abs(random()) % 3 = 0", [machine])


def plan_spoiled(path, log, seed, seconds):
    """Plan until the time is up, though rows are spoiled and reads fail."""
    chance, backend, database = random.Random(seed), CpuBackend(), Database(path)
    machine = {**backend.machine(), "spoiled": str(seed)}
    read, planned = DatabaseFile.read, 0

    def failing(file, *arguments):
        if chance.random() < 0.1:
            raise DatabaseError("database is locked")
        return read(file, *arguments)

    DatabaseFile.read = failing
    lost = []
    for module in (MachineStore.__module__, DatabaseFile.__module__):
        logging.getLogger(module).addFilter(lambda record: lost.append(record) or True)
    end = time.monotonic() + seconds
    while planned < FEWEST_TURNS or time.monotonic() < end:
        store = MachineStore(database, machine, backend.name)
        benchmark = Benchmark(backend, effort=Effort(warmup=0, repeats=1, time_limit_ms=1), storage=store)
        request = request_of(seed, planned % 5)
        plan = fastest(benchmark.micro_configurations(request), request.problem.batch)
        assert sum(part.size for part in plan.parts) == request.problem.batch
        assert 0 < plan.time_ms < 1e6
        planned += 1
        spoil(path, key_of(dump(machine)), chance)
    Path(log).write_text(f"{planned} {len(lost)}")


def main(path, log, seed, seconds, kind=""):
    if kind == "spoiled":
        plan_spoiled(path, log, int(seed), float(seconds))
        sys.stdout.write("done\n")
        return
    database = Database(path)
    backend = CpuBackend()
    end = time.monotonic() + float(seconds)
    effort = Effort(warmup=0, repeats=1, time_limit_ms=1)
    with Path(log).open("w") as file:
        for turn in range(1 << 20):
            if turn >= FEWEST_TURNS and time.monotonic() > end:
                break
            store = MachineStore(database, backend.machine(), backend.name)
            request = request_of(int(seed), turn)
            benchmark = Benchmark(backend, effort=effort, storage=store, exhaustive=True)
            items = benchmark.results(request)
            assert not store._failed
            assert len(database.load(backend.machine(), [part for part, _ in items])) >= len(items)
            file.write(f"{turn} {len(items)}\n")
            file.flush()
            os.fsync(file.fileno())
    if kind:
        items = Benchmark(backend, effort=effort, exhaustive=True).results(request_of(int(seed), 1 << 20))

        write = database.write

        def die(run):
            def and_wait(connection):
                run(connection)
                sys.stdout.write("in mid-write\n")
                sys.stdout.flush()
                time.sleep(3600)

            write(and_wait)

        database.write = die
        database.save(backend.machine(), items)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
