"""The CPU backend limits the threads of NumPy's BLAS where it is told to, and only while it computes."""

import os

import numpy as np
import pytest

from tests.support.faulty_backend import check
from tests.support.operands import PROBLEM, QUICK, operands
from ucudnn import Handle
from ucudnn.backends.cpu import blas_threads as module
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cpu.blas_threads import blas_threads
from ucudnn.backends.cpu.gemm import Gemm

needs_openblas = pytest.mark.skipif(module._functions() is None, reason="NumPy has another BLAS than its wheels bring")


def threads():
    get, _ = module._functions()
    return get()


@needs_openblas
def test_a_context_sets_the_number_and_restores_it():
    before = threads()
    with blas_threads(2):
        with blas_threads(1):
            assert threads() == 1
            with blas_threads(None):
                assert threads() == 1
        assert threads() == 2
    assert threads() == before
    with pytest.raises(ZeroDivisionError), blas_threads(1):
        raise ZeroDivisionError
    assert threads() == before


@needs_openblas
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="this process shares no processors with others")
def test_tests_that_run_beside_others_have_as_many_threads_as_their_environment_says():
    assert threads() == int(os.environ["OPENBLAS_NUM_THREADS"])


@needs_openblas
def test_calls_and_measurements_of_a_limited_backend_have_one_thread(monkeypatch):
    seen = []
    compute = Gemm.compute

    def watched(self, *arguments, **options):
        seen.append(threads())
        compute(self, *arguments, **options)

    monkeypatch.setattr(Gemm, "compute", watched)
    with blas_threads(2):
        handle = Handle(backend=CpuBackend(threads=1), workspace_limit="1MiB", effort=QUICK, database="off")
        check(handle)
        assert seen
        assert set(seen) == {1}
        seen.clear()
        backend = CpuBackend()
        call = backend.prepare(PROBLEM, "GEMM")
        call.launch(*operands(PROBLEM), backend.allocate(call.workspace_bytes))
        assert seen == [2]


def test_measurements_with_and_without_a_limit_are_kept_apart():
    assert CpuBackend(threads=1).machine()["blas_threads"] == "1"
    assert "blas_threads" not in CpuBackend().machine()


def test_another_blas_is_left_alone(monkeypatch):
    monkeypatch.setattr(module, "_functions", lambda: None)
    with blas_threads(1):
        assert np.ones((2, 2)).sum() == 4
