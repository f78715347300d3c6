"""Processes and ranks that measure together: everything is measured once, even if a process dies."""

import logging
import multiprocessing
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from tests.support.faulty_backend import CountedBackend
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from tests.support.ranks import run_ranks
from ucudnn import Handle
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_parallel
from ucudnn.benchmarking.parallel import processes as processes_module
from ucudnn.benchmarking.parallel.partition import Partition, by_operation
from ucudnn.benchmarking.parallel.processes import Processes, WorkerOptions
from ucudnn.benchmarking.parallel.ranks import Ranks
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.command_line import read_settings
from ucudnn.errors import BackendError, SettingsError, UnsupportedProblemError
from ucudnn.problem import DataType, Operation
from ucudnn.settings import Settings

ROOT = Path(__file__).parents[3]
OPTIONS = WorkerOptions(backend="cpu", effort=QUICK, exhaustive=True)


def requests(count):
    return [
        Request(problem=make_problem(batch=4, channels=2 + 2 * index), sizes=(1, 2, 4), limit_bytes=1 << 30)
        for index in range(count)
    ]


def wait_until(holds):
    """Wait for what other threads do, which have to wait for a processor on a busy machine."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < 300, "others do nothing"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def workers_begin_first(monkeypatch):
    """Let this process measure once each worker has taken something, or has ended; else it might leave them nothing."""
    begun, take, measure = set(), Partition.take, processes_module._Exploration._measure

    def noted_take(partition, index, choose):
        found = take(partition, index, choose)
        begun.add((partition, index))
        return found

    def measure_later(exploration):
        partition, threads = exploration._partition, exploration._threads
        wait_until(lambda: all((partition, at) in begun or not each.is_alive() for at, each in enumerate(threads)))
        measure(exploration)

    monkeypatch.setattr(Partition, "take", noted_take)
    monkeypatch.setattr(processes_module._Exploration, "_measure", measure_later)


@pytest.fixture
def shared(request):
    """Return a benchmark of this process and one worker."""
    backend = CountedBackend()
    workers = Processes(backend, (0, 0), OPTIONS)
    yield Benchmark(backend, effort=QUICK, parallel=workers, exhaustive=True), workers, backend
    workers.close()


def names_and_sizes(benchmark, request):
    return {(each.size, each.algorithm) for each in benchmark.micro_configurations(request)}


@pytest.mark.parametrize("count", [1, 2, 7])
def test_shared_requests_are_all_measured(shared, count):
    benchmark, _, backend = shared
    benchmark.explore(requests(count))
    alone = Benchmark(CpuBackend(), effort=QUICK, exhaustive=True)
    for each in requests(count):
        assert names_and_sizes(benchmark, each) == names_and_sizes(alone, each)
    assert backend.benches <= max(1, count)
    assert benchmark.measured < alone.measured  # the worker measured the rest


def test_others_do_the_work_of_a_worker_that_dies(shared, caplog):
    benchmark, workers, _ = shared
    benchmark.explore(requests(2))
    workers._workers[0]._process.kill()
    workers._workers[0]._process.join()
    more = [*requests(2), *(Request(problem=each.problem, sizes=(3,), limit_bytes=1 << 30) for each in requests(5))]
    with caplog.at_level(logging.WARNING):
        benchmark.explore(more)
    assert all(benchmark.micro_configurations(each) for each in more)
    assert "has ended; going on without it" in caplog.text


class SlowBackend(CountedBackend):
    """Makes some problems wait, and remembers what was begun, and how many problems were measured by then.

    Args:
        waits: problems that are not ready.
        until: measures nothing before this holds.
    """

    def __init__(self, waits, until=lambda: True):
        super().__init__()
        self.waits = waits
        self.until = until
        self.begun = []
        self.measured = []
        self.drops = 0

    def prefetch(self, problems):
        self.begun += [(problem, len(self.measured)) for problem, *_ in problems]

    def drop(self):
        self.drops += 1

    def is_ready(self, problem):
        return problem not in self.waits

    def bench(self, problem):
        self.measured.append(problem)
        return super().bench(problem)

    def names(self, problem, sizes):
        wait_until(self.until)
        return super().names(problem, sizes)


class InThread(Thread):
    """A worker in a thread of this process, so that tests can see what it does."""

    def __init__(self, target, args, daemon):
        super().__init__(target=target, args=args, daemon=daemon)

    def kill(self):
        """Do nothing, because the thread ends with its connection."""


def pipe():
    """Return the two ends of a pipe; closing the second one does nothing, as it is used by a thread."""
    ours, theirs = multiprocessing.Pipe()
    return ours, SimpleNamespace(send=theirs.send, recv=theirs.recv, close=lambda: None)


@contextmanager
def in_threads(own, *others):
    """Return processes whose workers are threads, each with one of the other backends."""
    left = list(others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes_module, "open_backend", lambda name, **options: left.pop(0))
        context = SimpleNamespace(Pipe=pipe, Process=InThread)
        patch.setattr(multiprocessing, "get_context", lambda kind: context)
        workers = Processes(own, (0,) * (1 + len(others)), replace(OPTIONS, exhaustive=False))
        try:
            workers.ready()
            yield workers
        finally:
            workers.close()


def problems_of(share):
    return [group.problem for group in share]


def test_a_problem_that_has_to_wait_is_taken_after_the_others():
    wanted = requests(6)
    own = problems_of(by_operation(wanted, 2)[1])
    backend = SlowBackend(set(own[:1]))  # the costliest problem, which would come first
    other = SlowBackend(set(), until=lambda: len(backend.measured) >= len(own))
    with in_threads(backend, other) as workers:
        Benchmark(backend, effort=QUICK, parallel=workers).explore(wanted)
    assert backend.measured[: len(own)] == [*own[1:], own[0]]


def test_a_worker_takes_problems_first_that_need_not_wait():
    wanted = requests(6)
    theirs = problems_of(by_operation(wanted, 2)[0])
    other = SlowBackend(set(theirs[:-1]))
    backend = SlowBackend(set(), until=lambda: len(other.measured) >= len(theirs))
    with in_threads(backend, other) as workers:
        Benchmark(backend, effort=QUICK, parallel=workers).explore(wanted)
    assert other.measured[:3] == [theirs[2], theirs[0], theirs[1]]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_process_begins_with_anothers_problem_only_when_it_is_next(slow):
    wanted = requests(8)
    shares = [problems_of(share) for share in reversed(by_operation(wanted, 2))]  # this process, the worker
    backends = [SlowBackend(set()), SlowBackend(set())]
    backends[slow].until = lambda: len(backends[1 - slow].measured) > len(shares[1 - slow]) + 1
    with in_threads(*backends) as workers:
        Benchmark(backends[0], effort=QUICK, parallel=workers).explore(wanted)
    assert sorted(map(str, backends[0].measured + backends[1].measured)) == sorted(str(each.problem) for each in wanted)
    for backend, own in zip(backends, shares, strict=True):
        at_first = [problem for problem, measured in backend.begun if not measured]
        assert set(at_first) == set(own)
        for problem in backend.measured[len(own) + 1 :]:  # taken from the other, except for the first
            begun = min(measured for each, measured in backend.begun if each == problem)
            assert len(own) <= begun < backend.measured.index(problem), "it begins while the problem before is measured"
    assert len(backends[1 - slow].measured) > len(shares[1 - slow]) + 1
    assert backends[1].drops == 1, "it drops what it began of the other's share"


def test_sizes_without_algorithms_do_not_stop_a_divided_request():
    limits = [Request(problem=requests(1)[0].problem, sizes=(1, 2, 4), limit_bytes=1 << power) for power in (29, 30)]

    class Small(SlowBackend):
        def algorithms(self, problem):
            if problem.batch > 2:
                raise UnsupportedProblemError("too large")
            return super().algorithms(problem)

    alone = Benchmark(Small(set()), effort=QUICK, exhaustive=True)
    for first in (0, 1):
        backends = [Small(set()), Small(set()), Small(set())]
        with in_threads(*backends) as workers:
            benchmark = Benchmark(backends[0], effort=QUICK, parallel=workers, exhaustive=True)
            benchmark.explore(limits[first:])
        for each in limits[first:]:
            assert names_and_sizes(benchmark, each) == names_and_sizes(alone, each)


def test_requests_with_discarded_algorithms_are_explored_without_workers():
    wanted = [Request(problem=each.problem, sizes=(4,), limit_bytes=1 << 30) for each in requests(4)]
    backend, other = SlowBackend(set()), SlowBackend(set())
    with in_threads(backend, other) as workers:
        benchmark = Benchmark(backend, effort=QUICK, parallel=workers)
        benchmark.explore(wanted)
        for each in wanted:
            benchmark.discard(each.problem, benchmark.micro_configurations(each)[0].algorithm)
        before = len(other.measured)
        benchmark.explore(wanted)
    assert len(other.measured) == before
    for each in wanted:
        assert set(benchmark.exploration(each).names) < set(backend.names(each.problem, (4,)))


@pytest.mark.parametrize("error", [None, RuntimeError("can't start new thread")])
def test_workers_warm_up_before_they_are_ready_and_continue_if_that_fails(error):
    class Warm(SlowBackend):
        warm = False

        def warm_up(self):
            self.warm = True
            if error is not None:
                raise error

    wanted = requests(4)
    backend, other = Warm(set()), Warm(set())
    with in_threads(backend, other) as workers:  # they are ready
        assert other.warm
        assert not backend.warm, "this process has other things to do"
        Benchmark(backend, effort=QUICK, parallel=workers).explore(wanted)
    assert other.measured
    assert sorted(map(str, backend.measured + other.measured)) == sorted(str(each.problem) for each in wanted)


def test_a_worker_that_has_ended_has_no_share():
    wanted = requests(6)
    backend, other, gone = SlowBackend(set()), SlowBackend(set()), SlowBackend(set())
    with in_threads(backend, other, gone) as workers:
        workers.ready()
        workers._workers[1].close()
        Benchmark(backend, effort=QUICK, parallel=workers).explore(wanted)
    begun = [problem for problem, measured in backend.begun + other.begun if not measured]
    assert set(begun) == {each.problem for each in wanted}
    assert not gone.begun


def test_a_worker_whose_answer_cannot_be_unpickled_counts_as_ended(caplog):
    backend, other = SlowBackend(set()), SlowBackend(set())
    wanted = requests(4)
    with in_threads(backend, other) as workers, caplog.at_level(logging.WARNING):
        workers.ready()
        other.bench = lambda problem: unreadable()
        benchmark = Benchmark(backend, effort=QUICK, parallel=workers)
        benchmark.explore(wanted)
        assert all(benchmark.micro_configurations(each) for each in wanted)
    assert "cannot be understood" in caplog.text


def unreadable():
    raise UnreadableError(1, 2)


class UnreadableError(Exception):
    """An exception that can be pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


def test_the_caller_gets_the_error_of_a_problem_that_no_worker_can_compute(shared):
    benchmark, _, _ = shared
    impossible = [
        Request(problem=make_problem(dtype=DataType.BFLOAT16, batch=size), sizes=(size,), limit_bytes=1 << 20)
        for size in (2, 3, 4)
    ]
    with pytest.raises(UnsupportedProblemError, match="bfloat16"):
        benchmark.explore([*requests(1), *impossible])


def devices(given):
    return Settings(benchmark_devices=given)


def test_the_error_names_devices_that_do_not_exist(monkeypatch):
    with pytest.raises(SettingsError, match="names device 3, but backend cpu has 0"):
        open_parallel(CpuBackend(), devices((0, 3)), QUICK)
    monkeypatch.setenv("UCUDNN_BENCHMARK_DEVICES", "1")
    with pytest.raises(SettingsError, match=r"^UCUDNN_BENCHMARK_DEVICES names device 1"):
        Handle(backend="cpu")
    with pytest.raises(SettingsError, match=r"^--devices names device 2"):
        open_parallel(CpuBackend(), read_settings({"--devices": "0,2"}), QUICK)
    with pytest.raises(SettingsError, match=r"^benchmark_devices names device 4"):
        Handle(backend="cpu", benchmark_devices=4)
    with pytest.raises(SettingsError, match=r"^--devices=ranks: torch.distributed is not initialized"):
        open_parallel(CpuBackend(), read_settings({"--devices": "ranks"}), QUICK)
    assert open_parallel(CpuBackend(), devices((0,)), QUICK) is None
    assert open_parallel(CpuBackend(), devices("all"), QUICK) is None


def test_devices_that_differ_are_refused(monkeypatch):
    backend = CountedBackend()
    backend.machine = lambda: {**CpuBackend().machine(), "device": "another GPU"}
    workers = Processes(backend, (0, 0), replace(OPTIONS, devices_name="--devices"))
    try:
        with pytest.raises(SettingsError, match=r"its device is .*another GPU; name identical ones in --devices"):
            Benchmark(backend, effort=QUICK, parallel=workers).explore(requests(3))
    finally:
        workers.close()


def test_ranks_need_torch_distributed():
    with pytest.raises(SettingsError, match="is not initialized: call init_process_group"):
        Handle(backend="cpu", benchmark_devices="ranks")


class OneRank:
    """torch.distributed of one rank."""

    def is_initialized(self):
        return True

    def get_world_size(self):
        return 1

    def get_rank(self):
        return 0

    def all_gather_object(self, gathered, mine):
        gathered[0] = mine


def test_ranks_begin_only_with_problems_of_their_share_that_are_unknown(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.distributed", OneRank())
    wanted = requests(4)
    costly = problems_of(by_operation(wanted, 1)[0])
    for known in (0, 3, 4):
        backend = SlowBackend({costly[0]})
        store = open_store(str(tmp_path / "measurements.db"), backend)
        Benchmark(backend, effort=QUICK, storage=store).explore(wanted[:known])
        backend.begun.clear()
        backend.measured.clear()
        benchmark = Benchmark(backend, effort=QUICK, storage=store, parallel=Ranks())
        benchmark.explore(wanted)
        assert {problem for problem, _ in backend.begun} == {each.problem for each in wanted[known:]}
        if not known:
            assert backend.measured == [*costly[1:], costly[0]], "the problem that has to wait comes last"
        assert all(benchmark.micro_configurations(each) for each in wanted)
        (tmp_path / "measurements.db").unlink()


def test_ranks_explore_a_request_together_once_whatever_one_of_them_discards(monkeypatch):
    asked = []
    distributed = OneRank()
    distributed.all_gather_object = lambda gathered, mine: (asked.append(mine[0]), gathered.__setitem__(0, mine))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    benchmark = Benchmark(SlowBackend(set()), effort=QUICK, parallel=Ranks())
    one, other = (Request(problem=each.problem, sizes=(4,), limit_bytes=1 << 30) for each in requests(2))
    benchmark.explore([one])
    first = benchmark.micro_configurations(one)[0].algorithm
    benchmark.discard(one.problem, first)
    benchmark.explore([one, other])
    again = replace(one, limit_bytes=1 << 29)
    benchmark.explore([again])
    assert asked == [[one], [other], [again]]
    for request in (one, again):
        left = {each.algorithm for each in benchmark.micro_configurations(request)}
        assert left
        assert first not in left | {*benchmark.exploration(request).names}


def test_the_other_ranks_hear_of_a_rank_that_cannot_begin(monkeypatch):
    told = []
    distributed = OneRank()
    distributed.all_gather_object = lambda gathered, mine: (told.append(mine[1]), gathered.__setitem__(0, mine))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    backend = SlowBackend(set())
    backend.prefetch = lambda problems: unready()
    with pytest.raises(BackendError, match="rank 0 failed to measure: another GPU is current"):
        Benchmark(backend, effort=QUICK, parallel=Ranks()).explore(requests(2))
    assert told == ["another GPU is current"], "the others would wait without it"


def unready():
    raise BackendError("another GPU is current")


RANK = """
import sys
import time
import torch.distributed as distributed
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn import Handle
from ucudnn.problem import Operation

rank, world, store, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
database = f"{store}.db" if rank == 0 and case == "warm" else "off"
problems = [make_problem(batch=8, operation=operation) for operation in Operation]
if database != "off":  # one rank knows something already
    alone = Handle(backend="cpu", effort=QUICK, database=database)
    alone.get_algorithm(problems[0])
    alone.optimize()
handle = Handle(backend="cpu", effort=QUICK, database=database, benchmark_devices="ranks")
if case == "differ" and rank:
    problems = problems[:1]
for problem in problems:
    handle.get_algorithm(problem)
try:
    handle.optimize()
except Exception as error:
    distributed.destroy_process_group()
    sys.exit(f"{type(error).__name__}: {error}")
distributed.destroy_process_group()
for kernel in handle.report().kernels:
    print(kernel)
print("measured", handle._benchmark.measured, file=sys.stderr)
"""


def share(tmp_path, case, world=2):
    pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    return run_ranks(RANK, world, tmp_path / case, case, world=world, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_ranks_share_the_work_and_end_with_the_same_plans(tmp_path, case):
    (first, errors, code), (second, other_errors, other_code) = share(tmp_path, case)
    assert (code, other_code) == (0, 0), errors + other_errors
    assert first == second
    assert first.count("KernelReport") == len(Operation)
    measured = [int(text.rsplit("measured", 1)[1]) for text in (errors, other_errors)]
    assert min(measured) > 0


def test_ranks_that_plan_different_problems_get_an_error(tmp_path):
    for _, errors, code in share(tmp_path, "differ"):
        assert code == 1
        assert "BackendError: rank" in errors
        assert "plans other problems" in errors


FAILS = """
import sys
from datetime import timedelta
import torch.distributed as distributed
from tests.support.faulty_backend import CountedBackend
from tests.support.operands import PROBLEM, QUICK, direct, operands, relative
from ucudnn import Handle

rank, store = int(sys.argv[1]), sys.argv[2]
patience = timedelta(seconds=120)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=patience)
backend = CountedBackend()
handle = Handle(backend=backend, effort=QUICK, benchmark_devices="ranks")


def check(problem, layer):
    x, w, y = operands(problem, 1)
    expected = direct(problem, x, w, y, 1.0, 0.0)
    y[...] = float("nan")
    handle.convolve(problem, x, w, y, layer=layer)
    assert relative(y, expected) <= 1e-10
    return next(entry for (name, *_), entry in handle._entries.items() if name == layer)


for _ in range(2):
    entry = check(PROBLEM, "a")
    if rank == 0:
        backend.broken |= set(entry.decision.configuration.parts[0].algorithms)
twin = check(PROBLEM, "b")  # the same problem in another layer
check(PROBLEM.with_batch(4), "c")  # both ranks must still agree on what they explore together
assert rank or not backend.broken & {each.algorithm for each in twin.decision.configuration.parts}
distributed.barrier()
distributed.destroy_process_group()
"""


def test_a_rank_replaces_a_failing_algorithm_without_the_others(tmp_path):
    pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    (_, errors, code), (_, other_errors, other_code) = run_ranks(FAILS, tmp_path / "store", OMP_NUM_THREADS="1")
    assert (code, other_code) == (0, 0), errors + other_errors
    assert "from now on" in errors, "an algorithm was replaced"
    assert "from now on" not in other_errors


UNSENDABLE = """
import sys
from datetime import timedelta
import torch.distributed as distributed
from tests.support.faulty_backend import CountedBackend
from tests.support.operands import PROBLEM, QUICK, operands
from ucudnn import Handle

rank, store = int(sys.argv[1]), sys.argv[2]
patience = timedelta(seconds=120)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=patience)
backend = CountedBackend()


def fail(problem):
    error = ValueError("it cannot be sent")
    error.cause = lambda: None  # what cannot be pickled
    raise error


if rank == 0:
    backend.bench = fail
handle = Handle(backend=backend, effort=QUICK, benchmark_devices="ranks")
try:
    handle.convolve(PROBLEM, *operands(PROBLEM))
finally:
    distributed.destroy_process_group()
"""


def test_an_error_that_cannot_be_sent_reaches_all_ranks(tmp_path):
    pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    for _, errors, code in run_ranks(UNSENDABLE, tmp_path / "store", OMP_NUM_THREADS="1"):
        assert code == 1
        assert "BackendError: rank 0 failed to measure: ValueError: it cannot be sent" in errors


def test_the_last_request_of_a_dying_worker_is_measured(shared):
    benchmark, workers, _ = shared
    workers.ready()
    (worker,) = workers._workers

    def die_late(what, about):
        time.sleep(0.5)  # by then, this process has nothing left to do and waits
        worker.alive = False
        return

    worker._ask = die_late
    wanted = requests(2)
    benchmark.explore(wanted)
    assert all(benchmark.micro_configurations(each) for each in wanted)
