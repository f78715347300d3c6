"""Processes and ranks that measure together: everything is measured once, even if a process dies."""

import json
import logging
import multiprocessing
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from tests.support.faulty_backend import CountedBackend
from tests.support.forked_ranks import run_forked_ranks
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn import Handle
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_parallel
from ucudnn.benchmarking.measurer import Measurer
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
    begun, take, groups = set(), Partition.take, Partition.groups
    work = processes_module._Worker.work

    def noted_take(partition, index, choose):
        found = take(partition, index, choose)
        begun.add((partition, index))
        return found

    def noted_work(worker, partition, index):
        try:
            return work(worker, partition, index)
        finally:
            begun.add((partition, index))

    def groups_later(partition, index, begin, choose):
        if isinstance(choose.__self__, Measurer):  # it is this process, not a worker
            wait_until(lambda: all((partition, at) in begun for at in range(index)))
        yield from groups(partition, index, begin, choose)

    monkeypatch.setattr(Partition, "take", noted_take)
    monkeypatch.setattr(processes_module._Worker, "work", noted_work)
    monkeypatch.setattr(Partition, "groups", groups_later)


@pytest.fixture
def shared():
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


@pytest.mark.parametrize("own", [True, False], ids=["this process", "a worker"])
def test_a_problem_that_has_to_wait_is_taken_after_the_others(own):
    wanted = requests(6)
    share = problems_of(by_operation(wanted, 2)[own])  # the costliest problem comes first
    waiting = SlowBackend(set(share[:-1]) if len(share) > 2 else set(share[:1]))
    other = SlowBackend(set(), until=lambda: len(waiting.measured) >= len(share))
    backends = (waiting, other) if own else (other, waiting)
    with in_threads(*backends) as workers:
        Benchmark(backends[0], effort=QUICK, parallel=workers).explore(wanted)
    assert waiting.measured[: len(share)] == [
        *(each for each in share if each not in waiting.waits),
        *(each for each in share if each in waiting.waits),
    ]


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
        other.bench = lambda problem: failing(UnreadableError(1, 2))
        benchmark = Benchmark(backend, effort=QUICK, parallel=workers)
        benchmark.explore(wanted)
        assert all(benchmark.micro_configurations(each) for each in wanted)
    assert "cannot be understood" in caplog.text


def failing(error):
    raise error


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
    with pytest.raises(SettingsError, match="is not initialized: call init_process_group"):
        Handle(backend="cpu", benchmark_devices="ranks")
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


@pytest.fixture
def gathered(monkeypatch):
    """Make this process the one rank of torch.distributed, and return the requests and answers that it sent."""
    told = []
    distributed = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 1,
        get_rank=lambda: 0,
        all_gather_object=lambda into, mine: (told.append(mine), into.__setitem__(0, mine)),
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    return told


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("known", [0, 3, 4])
def test_ranks_begin_only_with_problems_of_their_share_that_are_unknown(tmp_path, known):
    wanted = requests(4)
    costly = problems_of(by_operation(wanted, 1)[0])
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


def test_ranks_explore_a_request_together_once_whatever_one_of_them_discards(gathered):
    benchmark = Benchmark(SlowBackend(set()), effort=QUICK, parallel=Ranks())
    one, other = (Request(problem=each.problem, sizes=(4,), limit_bytes=1 << 30) for each in requests(2))
    benchmark.explore([one])
    first = benchmark.micro_configurations(one)[0].algorithm
    benchmark.discard(one.problem, first)
    benchmark.explore([one, other])
    again = replace(one, limit_bytes=1 << 29)
    benchmark.explore([again])
    assert [asked for asked, _ in gathered] == [[one], [other], [again]]
    for request in (one, again):
        left = {each.algorithm for each in benchmark.micro_configurations(request)}
        assert left
        assert first not in left | {*benchmark.exploration(request).names}


def test_the_other_ranks_hear_of_a_rank_that_cannot_begin(gathered):
    backend = SlowBackend(set())
    backend.prefetch = lambda problems: failing(BackendError("another GPU is current"))
    with pytest.raises(BackendError, match="rank 0 failed to measure: another GPU is current"):
        Benchmark(backend, effort=QUICK, parallel=Ranks()).explore(requests(2))
    assert [answer for _, answer in gathered] == ["another GPU is current"], "the others would wait without it"


RANK = """
import json
import sys
from datetime import timedelta
import torch.distributed as distributed
from tests.support.faulty_backend import CountedBackend, check
from tests.support.operands import PROBLEM, QUICK
from tests.support.problems import make_problem
from ucudnn import Handle
from ucudnn.problem import Operation

PROBLEMS = [make_problem(batch=8, operation=operation) for operation in Operation]
rank, store = int(sys.argv[1]), sys.argv[2]
patience = timedelta(seconds=120)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=patience)


def planned(problems, database="off", **devices):
    handle = Handle(backend="cpu", effort=QUICK, database=database, **devices)
    for problem in problems:
        handle.get_algorithm(problem)
    try:
        handle.optimize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [str(kernel) for kernel in handle.report().kernels], handle._benchmark.measured


def convolved(handle, problem, layer=""):
    check(handle, problem, seed=1, layer=layer)
    return next(entry for (name, *_), entry in handle._entries.items() if name == layer)


def failing(problem):
    error = ValueError("it cannot be sent")
    error.cause = lambda: None  # what cannot be pickled
    raise error


database = "off" if rank else f"{store}.db"
told = {"cold": planned(PROBLEMS, benchmark_devices="ranks")}
planned([] if rank else PROBLEMS[:1], database)  # one rank knows something already
told["warm"] = planned(PROBLEMS, database, benchmark_devices="ranks")
told["other problems"] = planned(PROBLEMS[: 1 if rank else None], benchmark_devices="ranks")

backend = CountedBackend()
handle = Handle(backend=backend, effort=QUICK, benchmark_devices="ranks")
for _ in range(2):
    entry = convolved(handle, PROBLEM, "a")
    if rank == 0:
        backend.broken |= set(entry.decision.configuration.parts[0].algorithms)
twin = convolved(handle, PROBLEM, "b")  # the same problem in another layer
convolved(handle, PROBLEM.with_batch(4), "c")  # both ranks must still agree on what they explore together
assert rank or not backend.broken & {each.algorithm for each in twin.decision.configuration.parts}

backend = CountedBackend()
if rank == 0:
    backend.bench = failing
try:
    convolved(Handle(backend=backend, effort=QUICK, database="off", benchmark_devices="ranks"), PROBLEM)
except Exception as error:
    told["unsendable"] = f"{type(error).__name__}: {error}"
distributed.barrier()
distributed.destroy_process_group()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return what two ranks told, and their errors."""
    pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    ended = run_forked_ranks(RANK, tmp_path_factory.mktemp("ranks") / "store")
    assert [status for *_, status in ended] == [0, 0], ended
    return [(json.loads(output), errors) for output, errors, _ in ended]


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_ranks_share_the_work_and_end_with_the_same_plans(two_ranks, case):
    (first, measured), (second, other_measured) = (told[case] for told, _ in two_ranks)
    assert first == second
    assert len(first) == len(Operation)
    assert min(measured, other_measured) > 0


def test_ranks_that_plan_different_problems_get_an_error(two_ranks):
    for told, _ in two_ranks:
        assert re.match("BackendError: rank .* plans other problems", told["other problems"])


def test_a_rank_replaces_a_failing_algorithm_without_the_others(two_ranks):
    assert ["from now on" in errors for _, errors in two_ranks] == [True, False]


def test_an_error_that_cannot_be_sent_reaches_all_ranks(two_ranks):
    error = "BackendError: rank 0 failed to measure: ValueError: it cannot be sent"
    assert [told["unsendable"][: len(error)] for told, _ in two_ranks] == [error] * 2


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
