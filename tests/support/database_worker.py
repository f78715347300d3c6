"""A process that measures on NumPy and saves the measurements, for tests of many processes on one database.

    python -m tests.support.database_worker DATABASE LOG SEED SECONDS [victim]

It goes on for some seconds, and on a slow machine until it has committed some times. It writes a line to LOG after each
commit. A victim prints a line when its last transaction is written but not committed, and waits to be killed.
"""

import os
import sys
import time
from pathlib import Path

from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import MachineStore
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Effort

FEWEST_TURNS = 20


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


def main(path, log, seed, seconds, victim=""):
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
    if victim:
        items = Benchmark(backend, effort=effort, exhaustive=True).results(request_of(int(seed), 1 << 20))

        write = database._file.write

        def die(run):
            def and_wait(connection):
                run(connection)
                sys.stdout.write("in mid-write\n")
                sys.stdout.flush()
                time.sleep(3600)

            write(and_wait)

        database._file.write = die
        database.save(backend.machine(), items)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
