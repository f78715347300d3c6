"""What happens where an algorithm fails or memory runs out: the CPU backend computes, faults are put in its way."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from tests.test_handle import PROBLEM, QUICK, direct, operands, poison, relative, written
from ucudnn import Handle
from ucudnn.backends.base import ComputeBackend, PreparedCall
from ucudnn.backends.cpu import CpuBackend
from ucudnn.configuration import configuration_of
from ucudnn.errors import BackendError, StepError, UnsupportedProblemError
from ucudnn.problem import Operation


class FaultyCall(PreparedCall):
    """A call that fails from its n-th launch on."""

    def __init__(self, call, backend, algorithm):
        self._call = call
        self._backend = backend
        self._algorithm = algorithm

    def launch(self, x, w, y, **options):
        self._backend.launches += 1
        self._backend.log.append((self._algorithm, options["start"]))
        if self._algorithm in self._backend.broken and options["start"] >= self._backend.first_broken:
            raise UnsupportedProblemError(f"{self._algorithm} is broken")
        self._call.launch(x, w, y, **options)


class FaultyBackend(ComputeBackend):
    """The CPU backend with algorithms that break after they were measured, and memory that runs out."""

    def __init__(self):
        self._cpu = CpuBackend()
        self.broken = set()
        self.unprepared = set()
        self.first_broken = 0
        self.memory = 2**40
        self.current = 0
        self.followed = []
        self.launches = 0
        self.log = []

    name = "faulty"

    def conditions(self):
        return self._cpu.conditions()

    def algorithms(self, problem):
        return self._cpu.algorithms(problem)

    def bench(self, problem):
        return self._cpu.bench(problem)

    def prepare(self, problem, algorithm):
        if algorithm in self.unprepared:
            raise UnsupportedProblemError(f"{algorithm} cannot be prepared")
        return FaultyCall(self._cpu.prepare(problem, algorithm), self, algorithm)

    def allocate(self, size_bytes):
        if size_bytes > self.memory:
            raise MemoryError(f"{size_bytes} bytes are too many")
        return self._cpu.allocate(size_bytes)

    def operands(self, problem):
        return self._cpu.operands(problem)

    def elapsed_ms(self, run, lead=None):
        return self._cpu.elapsed_ms(run)

    def segment(self, buffer, offset_bytes, size_bytes):
        return self._cpu.segment(buffer, offset_bytes, size_bytes)

    def queue(self):
        return self.current

    def follow(self, queue, other):
        self.followed.append((queue, other))


@pytest.fixture
def faulty():
    return FaultyBackend()


def chosen(handle):
    (entry,) = handle._entries.values()
    return [part.algorithm for part in entry.decision.configuration.parts]


def check(handle, problem, alpha=1.0, beta=0.0, seed=0):
    x, w, y = operands(problem, seed)
    expected = direct(problem, x, w, y, alpha, beta)
    out = written(problem, x, w, y)
    poison(out, beta)
    handle.convolve(problem, x, w, y, alpha=alpha, beta=beta)
    assert relative(out, expected) < 1e-12


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("first_broken", [0, 1, 4])
@pytest.mark.parametrize("limit", ["64KiB", "1MiB"])
def test_what_fails_is_replaced_from_where_it_failed(faulty, caplog, operation, beta, first_broken, limit):
    problem = PROBLEM.with_operation(operation)
    handle = Handle(backend=faulty, policy="all", workspace_limit=limit, effort=QUICK)
    handle.get_algorithm(problem)
    handle.optimize()
    faulty.broken, faulty.first_broken = set(chosen(handle)), first_broken
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            check(handle, problem, beta=beta, seed=seed)
    failures = [message for message in caplog.messages if "is broken" in message]
    failed = any(algorithm in faulty.broken and start >= first_broken for algorithm, start in faulty.log)
    assert len(failures) == failed  # said once, however often it ran
    last = [start for _, start in faulty.log[-len(chosen(handle)) :]]
    assert last == sorted(set(last)), "no part is computed twice once a working plan is found"


def test_what_cannot_be_prepared_is_replaced(faulty, caplog):
    handle = Handle(backend=faulty, workspace_limit="1MiB", effort=QUICK)
    handle.get_algorithm(PROBLEM)
    handle.optimize()
    faulty.unprepared = set(chosen(handle))
    check(handle, PROBLEM)
    assert not set(chosen(handle)) & faulty.unprepared
    assert "cannot be prepared; from now on" in caplog.text


def test_nothing_left_is_an_error_of_the_last_failure(faulty):
    handle = Handle(backend=faulty, policy="undivided", workspace_limit=0, effort=QUICK)
    check(handle, PROBLEM)
    faulty.broken = {"IMPLICIT_GEMM"}
    x, w, y = operands(PROBLEM)
    with pytest.raises(StepError, match="IMPLICIT_GEMM failed on a micro-batch of 6: IMPLICIT_GEMM is broken"):
        handle.convolve(PROBLEM, x, w, y)


def test_what_always_fails_ends(faulty):
    handle = Handle(backend=faulty, policy="all", workspace_limit="1MiB", effort=QUICK)
    handle.get_algorithm(PROBLEM)
    handle.optimize()
    faulty.broken = {each.name for each in faulty.algorithms(PROBLEM)}
    x, w, y = operands(PROBLEM)
    with pytest.raises(BackendError, match="is broken"):
        handle.convolve(PROBLEM, x, w, y)
    assert faulty.launches < 100


def test_a_workspace_that_memory_cannot_hold_is_not_used(faulty, caplog):
    handle = Handle(backend=faulty, policy="undivided", workspace_limit="1MiB", effort=QUICK)
    handle.get_algorithm(PROBLEM)
    handle.optimize()
    (entry,) = handle._entries.values()
    needs = sorted(each.workspace_bytes for each in faulty.algorithms(PROBLEM))
    gemm = max(
        handle._benchmark.micro_configurations(PROBLEM, [PROBLEM.batch], 2**20), key=lambda each: each.workspace_bytes
    )
    entry.decide(replace(entry.decision, configuration=configuration_of([gemm])))
    faulty.memory = needs[-1] - 1
    check(handle, PROBLEM)
    assert handle.workspace_bytes <= faulty.memory
    assert "no room for a workspace of" in caplog.text


def test_a_total_workspace_that_memory_cannot_hold_is_an_error(faulty):
    handle = Handle(backend=faulty, total_workspace="1MiB", effort=QUICK)
    handle.get_algorithm(PROBLEM)
    handle.optimize()
    (entry,) = handle._entries.values()
    if not entry.limit_bytes:
        entry.limit_bytes = 64
    faulty.memory = 0
    x, w, y = operands(PROBLEM)
    with pytest.raises(BackendError, match=r"no room for a total workspace of .*: give a smaller one"):
        handle.convolve(PROBLEM, x, w, y)


def test_each_queue_has_a_workspace_of_its_own(faulty):
    handle = Handle(backend=faulty, policy="undivided", workspace_limit="1MiB", effort=QUICK)
    check(handle, PROBLEM)
    one = handle.workspace_bytes
    for faulty.current in (1, 2, 1, 0):
        check(handle, PROBLEM)
    assert handle.workspace_bytes == 3 * one
    assert faulty.followed == []


def test_a_divided_workspace_orders_the_queues_of_a_kernel(faulty):
    handle = Handle(backend=faulty, total_workspace="1MiB", effort=QUICK)
    for faulty.current in (1, 1, 2, 1):
        check(handle, PROBLEM)
    assert faulty.followed == [(2, 1), (1, 2)]


def test_a_larger_need_takes_the_place_of_a_smaller_one(faulty):
    handle = Handle(backend=faulty, policy="undivided", workspace_limit="8MiB", effort=QUICK)
    sizes = []
    for batch in (2, 6, 12, 2, 6):
        check(handle, PROBLEM.with_batch(batch))
        sizes.append(handle.workspace_bytes)
    assert sizes == sorted(sizes)
    buffers = [buffer for entry in handle._entries.values() for buffer in entry.ready.values()]
    assert all(np.shares_memory(buffers[0], other) for other in buffers if buffers[0].size and other.size)
