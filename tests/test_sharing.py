"""Processes and ranks that measure together: everything is measured once, and a process that dies costs nothing."""

import logging
import time
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.test_dispatch import FaultyBackend
from tests.test_problem import make_problem
from ucudnn import Handle
from ucudnn.backends.base import Effort
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmark import Benchmark
from ucudnn.errors import SettingsError, UnsupportedProblemError
from ucudnn.problem import DataType, Operation
from ucudnn.requests import Request
from ucudnn.sharing import WorkerOptions, Workers, open_share

ROOT = Path(__file__).parents[1]
QUICK = Effort(warmup=0, repeats=1, time_limit_ms=1)
OPTIONS = WorkerOptions(backend="cpu", effort=QUICK, exhaustive=True)


def requests(count):
    return [
        Request(problem=make_problem(batch=4, channels=2 + 2 * index), sizes=(1, 2, 4), limit_bytes=1 << 30)
        for index in range(count)
    ]


class CountedBackend(FaultyBackend):
    """The CPU backend, which tells what this process measured."""

    name = "cpu"

    def __init__(self):
        super().__init__()
        self.benches = 0

    def machine(self):
        return CpuBackend().machine()

    def bench(self, problem):
        self.benches += 1
        return super().bench(problem)


@pytest.fixture
def shared(request):
    """Return a benchmark of this process and one worker."""
    backend = CountedBackend()
    workers = Workers(backend, (0, 0), OPTIONS)
    yield Benchmark(backend, effort=QUICK, share=workers, exhaustive=True), workers, backend
    workers.close()


def names_and_sizes(benchmark, request):
    return {(each.size, each.algorithm) for each in benchmark.micro_configurations(request)}


@pytest.mark.parametrize("count", [1, 2, 7])
def test_what_is_shared_is_all_there(shared, count):
    benchmark, _, backend = shared
    benchmark.explore(requests(count))
    alone = Benchmark(CpuBackend(), effort=QUICK, exhaustive=True)
    for each in requests(count):
        assert names_and_sizes(benchmark, each) == names_and_sizes(alone, each)
    assert backend.benches <= max(1, count)
    assert benchmark.measured < alone.measured  # the rest is the worker's


def test_a_worker_that_dies_leaves_its_work_to_others(shared, caplog):
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
    """Some problems have to wait, and all are told to begin before any is measured."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits
        self.begun = []
        self.measured = []

    def prefetch(self, problems):
        assert self.begun or not self.benches
        self.begun += [problem for problem, *_ in problems]

    def is_ready(self, problem):
        return problem not in self.waits

    def bench(self, problem):
        self.measured.append(problem)
        return super().bench(problem)


def test_what_waits_for_something_is_taken_after_the_others():
    wanted = requests(6)
    backend = SlowBackend({wanted[-1].problem, wanted[-2].problem})  # the costliest, which else come first
    workers = Workers(backend, (0, 0), OPTIONS)
    workers._workers[0].close()
    try:
        Benchmark(backend, effort=QUICK, share=workers).explore(wanted)
    finally:
        workers.close()
    assert set(backend.begun) == {each.problem for each in wanted}
    assert backend.measured[-2:] == [wanted[-1].problem, wanted[-2].problem]
    assert len(backend.measured) == 6


def test_what_a_worker_cannot_compute_is_the_callers_error(shared):
    benchmark, _, _ = shared
    impossible = [
        Request(problem=make_problem(dtype=DataType.FLOAT16, batch=size), sizes=(size,), limit_bytes=1 << 20)
        for size in (2, 3, 4)
    ]
    with pytest.raises(UnsupportedProblemError, match="float16"):
        benchmark.explore([*requests(1), *impossible])


def test_devices_that_are_not_there_are_named(monkeypatch):
    with pytest.raises(SettingsError, match="names device 3, but backend cpu has 0"):
        open_share(CpuBackend(), (0, 3), OPTIONS)
    monkeypatch.setenv("UCUDNN_BENCHMARK_DEVICES", "1")
    with pytest.raises(SettingsError, match="names device 1"):
        Handle(backend="cpu")
    assert open_share(CpuBackend(), (0,), OPTIONS) is None
    assert open_share(CpuBackend(), "all", OPTIONS) is None


def test_devices_that_differ_are_refused(monkeypatch):
    backend = CountedBackend()
    backend.machine = lambda: {**CpuBackend().machine(), "device": "another GPU"}
    workers = Workers(backend, (0, 0), OPTIONS)
    try:
        with pytest.raises(SettingsError, match=r"cannot share the benchmarks: its device is .*another GPU"):
            Benchmark(backend, effort=QUICK, share=workers).explore(requests(3))
    finally:
        workers.close()


def test_ranks_need_torch_distributed():
    with pytest.raises(SettingsError, match="is not initialized: call init_process_group"):
        Handle(backend="cpu", benchmark_devices="ranks")


RANK = """
import sys
import time
import torch.distributed as distributed
from tests.test_sharing import QUICK, make_problem
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


def test_ranks_that_plan_other_problems_are_told(tmp_path):
    for _, errors, code in share(tmp_path, "differ"):
        assert code == 1
        assert "BackendError: rank" in errors
        assert "plans other problems" in errors


FAILS = """
import sys
from datetime import timedelta
import torch.distributed as distributed
from tests.test_handle import PROBLEM, direct, operands, relative
from tests.test_sharing import QUICK, CountedBackend
from ucudnn import Handle

rank, store = int(sys.argv[1]), sys.argv[2]
patience = timedelta(seconds=20)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=patience)
backend = CountedBackend()
handle = Handle(backend=backend, effort=QUICK, benchmark_devices="ranks")
x, w, y = operands(PROBLEM, 1)
expected = direct(PROBLEM, x, w, y, 1.0, 0.0)
for _ in range(2):
    y[...] = float("nan")
    handle.convolve(PROBLEM, x, w, y)
    assert relative(y, expected) <= 1e-10
    if rank == 0:
        (entry,) = handle._entries.values()
        backend.broken = set(entry.decision.configuration.parts[0].algorithms)
distributed.barrier()
distributed.destroy_process_group()
"""


def test_a_rank_whose_algorithm_fails_goes_on_without_the_others(tmp_path):
    pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    (_, errors, code), (_, other_errors, other_code) = run_ranks(FAILS, tmp_path / "store", OMP_NUM_THREADS="1")
    assert (code, other_code) == (0, 0), errors + other_errors
    assert "from now on" in errors, "one was replaced"
    assert "from now on" not in other_errors


def test_the_last_request_of_a_dying_worker_is_not_forgotten(shared):
    benchmark, workers, _ = shared
    workers.ready()
    (worker,) = workers._workers

    def die_late(request):
        time.sleep(0.5)  # this process has nothing left to do by then, and waits
        worker._alive = False

    worker._ask = die_late
    wanted = requests(2)
    benchmark.explore(wanted)
    assert all(benchmark.micro_configurations(each) for each in wanted)
