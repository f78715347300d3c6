"""Forks while other threads are at work: the child can convolve, plan and write, and nothing waits for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.operands import PROBLEM, QUICK
from tests.support.paths import ROOT
from ucudnn.backends import fork_locks
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.fork_locks import LockLevel, call_in_child, new_lock
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

PROGRAM = """
import faulthandler, os, sys, threading, time, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of each fork with threads
from tests.support.faulty_backend import FaultyBackend
from tests.support.operands import PROBLEM, QUICK, direct, operands, relative
from ucudnn import Handle

busy, release = threading.Event(), threading.Event()
backend = FaultyBackend()
handle = Handle(backend=backend, effort=QUICK, workspace_limit="1MiB", database=sys.argv[1])
x, w, y = operands(PROBLEM, 1)
expected = direct(PROBLEM, x, w, y, 1.0, 0.0)


def convolve(problem=PROBLEM):
    y[...] = float("nan")
    handle.convolve(problem, x, w, y)
    return relative(y, expected) <= 1e-10


def hold():
    busy.set()
    release.wait(600)


def in_child(check):
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(120, exit=True)
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def new_shape():
    return relative(*both(PROBLEM.with_batch(4))) <= 1e-10


def both(problem):
    a, b, c = operands(problem, 2)
    out = direct(problem, a, b, c, 1.0, 0.0)
    c[...] = float("nan")
    handle.convolve(problem, a, b, c)
    return c, out
"""

IN_A_CONVOLUTION = """
waits = sys.argv[2] == "waits"
if not waits:
    from ucudnn.backends import fork_locks
    fork_locks.PATIENCE_S = 0.2
assert convolve()
backend.prepare_hook = hold  # the next plan stays inside the backend's lock until it is let go
other = threading.Thread(target=both, args=(PROBLEM.with_batch(3),))
other.start()
busy.wait()
backend.prepare_hook = lambda: None
if waits:
    threading.Timer(1.0, release.set).start()
status = in_child(lambda: convolve() and new_shape())
assert waits or not release.is_set()
release.set()
other.join()
print(status, convolve(), new_shape())
"""

OFTEN = """
assert convolve()
ends = threading.Event()


def again():
    while not ends.is_set():
        both(PROBLEM)


threads = [threading.Thread(target=again) for _ in range(2)]
for each in threads:
    each.start()
statuses = [in_child(convolve) for _ in range(24)]
ends.set()
for each in threads:
    each.join()
print(*sorted(set(statuses)), convolve(), new_shape())
"""


@pytest.fixture
def children(monkeypatch):
    """Return the methods that children call, without those of objects of other tests."""
    found = {}
    monkeypatch.setattr(fork_locks, "_children", found)
    return found


@pytest.mark.parametrize(
    ("way", "patience"), [(IN_A_CONVOLUTION, "waits"), (IN_A_CONVOLUTION, "longer than a fork waits"), (OFTEN, "")]
)
def test_a_child_that_is_forked_while_threads_convolve_convolves_too(tmp_path, way, patience):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + way, str(tmp_path / "measurements.db"), patience],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.stdout == "0 True True\n", ended.stderr


def test_a_fork_takes_the_outermost_locks_first_and_gives_all_back():
    inner, outer = new_lock(LockLevel.INNERMOST), new_lock(LockLevel.OVERRIDES)
    fork_locks._before()
    taken, left = fork_locks._held.locks
    assert taken.index(outer) < taken.index(inner)
    assert left == []
    owned = [each._is_owned() for each in taken]
    fork_locks._release()
    assert all(owned)
    assert not any(each._is_owned() for each in taken)


def test_locks_that_nobody_uses_any_more_are_forgotten():
    lock = new_lock(LockLevel.STORAGE)
    count = len(fork_locks._locks)
    del lock
    assert len(fork_locks._locks) == count - 1


def test_a_thread_that_holds_a_lock_may_fork():
    lock = new_lock(LockLevel.BACKEND)
    with lock:
        fork_locks._before()
        fork_locks._release()
        assert lock._is_owned()
    assert not lock._is_owned()


def test_all_locks_of_the_package_are_known_to_forks():
    package = Path(fork_locks.__file__).parents[1]
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith(("from threading import", "import threading")) and "Lock" in line
    }
    assert users == {"backends/fork_locks.py"}


def test_a_method_is_called_in_children_only_while_its_object_lives(children):
    calls = []

    class Owner:
        def call(self):
            calls.append(1)

    owner = Owner()
    call_in_child(owner.call)
    fork_locks._before()
    fork_locks._in_child()
    assert calls == [1]
    del owner
    assert children == {}


def test_a_child_measures_without_the_others(children):
    asked = []

    class Others:
        collective = True

        def explore(self, requests, own):
            asked.append(requests)
            return [own.find(each) for each in requests]

    benchmark = Benchmark(CpuBackend(), effort=QUICK, parallel=Others())
    wanted = [Request(problem=PROBLEM, sizes=(size,), limit_bytes=1 << 20) for size in (2, 6)]
    benchmark.explore(wanted[:1])
    (hook,) = children.values()
    assert hook() == benchmark._measure_alone
    fork_locks._before()
    fork_locks._in_child()
    benchmark.explore(wanted)
    assert asked == [wanted[:1]]
    assert all(benchmark.micro_configurations(each) for each in wanted)
