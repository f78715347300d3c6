"""A bias on the CPU: added once to each element of the output, whatever the algorithm, the parts and the layout."""

import numpy as np
import pytest

from tests.support.operands import QUICK, operands, relative
from tests.support.problems import LAYOUTS, make_problem
from tests.support.reference import scaled_reference
from ucudnn import Handle
from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import Offset, Scaling
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cpu.bench import CpuBench
from ucudnn.benchmarking.storage.database import Database
from ucudnn.errors import BackendError, InvalidProblemError
from ucudnn.policy import powers_of_two
from ucudnn.problem import DataType
from ucudnn.slabs import pieces_of, slabs_by_problem

CPU = CpuBackend()


def drawn(problem):
    """Return x, w, the bias and a poisoned y, and what y should become."""
    x, w, y = operands(problem)
    bias = np.random.default_rng(5).uniform(-4, 4, problem.filters).astype(problem.dtype.value)
    added = bias if problem.layout.channels_last else bias.reshape(-1, *[1] * len(problem.spatial))
    expected = scaled_reference(problem, x, w, y) + added.astype(np.float64)
    y.fill(np.nan)
    return x, w, bias, y, expected


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64], ids=lambda each: each.value)
@pytest.mark.parametrize("layout", [each for both in LAYOUTS.values() for each in both], ids=lambda each: each.value)
def test_each_algorithm_adds_it_once_to_each_part(layout, dtype):
    sides = layout.dimensions
    problem = make_problem(
        spatial=(7, 6, 5)[:sides], kernel=(3,) * sides, layout=layout, dtype=dtype, biased=True, batch=6
    )
    x, w, bias, y, expected = drawn(problem)
    for each in CPU.algorithms(problem.part(2)):
        y.fill(np.nan)
        call = CPU.prepare(problem.part(2), each.name)
        for start in (0, 2, 4):
            call.launch(x, BiasedFilters(w, bias), y, CPU.allocate(each.workspace_bytes), Offset(start))
        assert relative(y, expected) < {2: 2e-3, 4: 1e-5, 8: 1e-12}[dtype.itemsize], each.name


@pytest.mark.parametrize("last", [False, True])
def test_slabs_get_it_once(last):
    problem = make_problem(batch=1, padding=(1, 1), layout=LAYOUTS[2][last], biased=True)
    x, w, bias, y, expected = drawn(problem)
    for _, slabs in slabs_by_problem(problem, 3):
        for piece in pieces_of(problem, 1, slabs):
            call = CPU.prepare(piece.problem, "IMPLICIT_GEMM")
            call.launch(x, BiasedFilters(w, bias), y, CPU.allocate(0), Offset(0, piece.first_rows))
    assert relative(y, expected) < 1e-5


def test_it_is_not_scaled():
    problem = make_problem(biased=True, dtype=DataType.FLOAT64)
    x, w, bias, y, expected = drawn(problem)
    y[...] = before = np.random.default_rng(3).uniform(-1, 1, y.shape)
    call = CPU.prepare(problem, "IMPLICIT_GEMM")
    call.launch(x, BiasedFilters(w, bias), y, CPU.allocate(0), scaling=Scaling(0.5, 2.0))
    added = bias.reshape(-1, 1, 1)
    assert relative(y, 0.5 * (expected - added) + 2.0 * before + added) < 1e-12


@pytest.mark.parametrize("bias", [np.zeros(3, np.float32), np.zeros(4, np.float64)])
def test_a_bias_that_does_not_fit_is_refused_before_anything_is_written(bias):
    problem = make_problem(biased=True)
    x, w, _, y, _ = drawn(problem)
    with pytest.raises(BackendError, match="needs one float32 for each of 4 filters"):
        CPU.prepare(problem, "IMPLICIT_GEMM").launch(x, BiasedFilters(w, bias), y, CPU.allocate(0))
    assert np.isnan(y).all()


def test_a_handle_measures_it_with_a_key_of_its_own(tmp_path, monkeypatch):
    problem = make_problem(spatial=(16, 16), batch=16, groups=1)
    x, w, bias, y, expected = drawn(problem)
    file = tmp_path / "ucudnn.db"
    undivided = next(each.workspace_bytes for each in CPU.algorithms(problem) if each.name == "GEMM")
    settings = {"backend": "cpu", "workspace_limit": undivided // 3, "database": file, "effort": QUICK}
    with Handle(**settings) as handle:
        handle.forward(x, w, y, bias=bias)
        assert relative(y, expected) < 1e-5
        plain = np.full_like(y, np.nan)
        handle.forward(x, w, plain)
        assert relative(plain + bias.reshape(-1, 1, 1), expected) < 1e-5
        (asked,) = (each for each in handle.saved_plans() if each.kernel.problem.biased)
        assert [each.kernel.problem.biased for each in handle.saved_plans()] == [True, False]
    part = asked.kernel.problem.part(asked.configuration.parts[0].size)
    # Which sizes of the plain problem are measured depends on times: slow ones are left out.
    parts = [part, *(problem.part(size) for size in powers_of_two(problem.batch))]
    found = Database(file).load(CPU.machine(), parts)
    assert {problem.biased for problem, _ in found} == {True, False}
    monkeypatch.setattr(CpuBench, "measure", None)  # with all in the database, nothing is measured
    with Handle(**settings) as again:
        again.forward(x, w, y, bias=bias)
    assert relative(y, expected) < 1e-5


def test_a_bias_beside_a_beta_or_under_the_output_is_refused():
    x, w, bias, y, _ = drawn(make_problem(groups=1))
    memory = np.full(y.size + 4, np.nan, np.float32)
    with Handle(backend="cpu", effort=QUICK) as handle:
        with pytest.raises(InvalidProblemError, match=r"beta is 0\.5"):
            handle.forward(x, w, y, bias=bias, beta=0.5)
        with pytest.raises(InvalidProblemError, match="lies over the bias"):
            handle.forward(x, w, memory[:-4].reshape(y.shape), bias=memory[-8:-4])
    assert np.isnan(y).all()
