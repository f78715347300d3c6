"""Divisions by one algorithm: they keep the limit, use the tail of the output, and take slabs where no sample fits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.problems import make_problem, problems
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.request import request_of
from ucudnn.benchmarking.unmeasured.untimed_division import (
    MOST_CALLS,
    assumed_ms,
    computed_pieces,
    direct_ms,
    divided_by,
    equal_parts,
    in_slabs,
    least_ms,
    plain_ms,
)
from ucudnn.configuration import MicroConfiguration
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType, MathMode, Operation
from ucudnn.profiles.format import load_profile
from ucudnn.profiles.measurement import Algorithm
from ucudnn.settings import Settings
from ucudnn.slabs import row_count, slabs_of
from ucudnn.workspace.spare import own_bytes, parts_in_tail

CPU = CpuBackend()


def request(problem, limit, **fields):
    return request_of(problem, Settings(policy=BatchSizePolicy.POWER_OF_TWO, **fields), limit)


def divided(sample_bytes, limit, **fields):
    """Return how an algorithm is divided that needs some bytes of workspace for each sample."""
    problem = make_problem(**fields)
    return divided_by(CountingBackend({"A": sample_bytes}), request(problem, limit, slabs=False), "A")


@given(problems(), st.integers(1, 40), st.integers(0, 1 << 16), st.data())
def test_a_division_covers_the_mini_batch_by_one_algorithm_within_the_limit(problem, batch, limit, data):
    problem = problem.with_batch(batch)
    names = [each.name for each in CPU.algorithms(problem)]
    name = data.draw(st.sampled_from(names))
    found = divided_by(CPU, request(problem, limit), name)
    if found is None:
        return
    assert found.size == batch
    assert found.calls <= MOST_CALLS
    assert own_bytes(problem, found) <= limit
    assert {each for part in found.parts for each in part.algorithms} <= {name, *CPU.slab_names(name)}
    for (piece, algorithm), slabs in computed_pieces(problem, found):
        known = CPU.algorithm(piece, algorithm)
        assert known is not None
        whole = [part.workspace_bytes for part in found.parts if not part.slabs and part.size == piece.batch]
        in_slab = [own.workspace_bytes for part in found.parts for own in part.slabs if own.slab in slabs]
        assert known.workspace_bytes in (in_slab if slabs else whole)
    for part in found.parts:
        if part.slabs:
            assert sum(each.slab.rows for each in part.slabs) == row_count(problem.part(part.size))


@pytest.mark.parametrize(
    ("limit", "batch", "expected"),
    [(40, 8, "2x4 A"), (79, 8, "2x4 A"), (10, 3, "3x1 A"), (20, 7, "3x2 A + 1x1 A"), (9, 8, None), (10, 65, None)],
)
def test_filter_gradients_have_the_largest_micro_batches_that_fit(limit, batch, expected):
    found = divided(10, limit, batch=batch, operation=Operation.BACKWARD_FILTER)
    assert (None if found is None else str(found)) == expected


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_the_tail_of_the_output_holds_larger_micro_batches(operation):
    problem = make_problem(operation=operation, batch=16, channels=64, filters=64, spatial=(40, 40))
    sample = problem.y_sample if operation is Operation.FORWARD else problem.x_sample
    found = divided(4 * sample, 4 * sample, batch=16, operation=operation, channels=64, filters=64, spatial=(40, 40))
    sizes = [part.size for part in found.parts]
    assert sizes[0] > 1
    assert sizes[-1] == 1
    assert own_bytes(problem, found) == 4 * sample
    assert parts_in_tail(problem, found)[0]
    gapped = replace(problem, y_batch_stride=problem.y_batch_stride + 64, x_batch_stride=problem.x_batch_stride + 64)
    backend = CountingBackend({"A": 4 * sample})
    assert str(divided_by(backend, request(gapped, 4 * sample, slabs=False), "A")) == "16x1 A"


def test_the_smallest_micro_batches_are_divided_into_the_fewest_slabs_where_no_sample_fits(hungry):
    problem = make_problem(batch=2, spatial=(40, 10), groups=1)
    name = max(hungry.algorithms(problem.part(1)), key=lambda each: each.workspace_bytes).name
    limit = hungry.algorithm(problem.part(1), name).workspace_bytes - 1
    found = divided_by(hungry, request(problem, limit), name)
    assert [part.size for part in found.parts] == [1, 1]
    slabs = found.parts[0].slabs
    assert len(slabs) == 2
    assert all(each.workspace_bytes <= limit for each in slabs)
    assert divided_by(hungry, request(problem, limit, slabs=False), name) is None


def test_slabs_are_in_the_order_of_their_rows_and_none_is_taken_that_cannot_be_measured(monkeypatch):
    problem = make_problem(batch=1, spatial=(40, 10), groups=1, padding=(1, 0))
    asked = []

    def first(piece):
        asked.append(piece)
        return MicroConfiguration(size=1, algorithm="A", time_ms=1.0, workspace_bytes=0)

    found = in_slabs(CPU, problem, [20, 10], first)
    assert [each.slab for each in found.slabs] == [*slabs_of(problem, 20)]
    monkeypatch.setattr(CPU, "knows_slab", lambda piece, part: False, raising=False)
    assert in_slabs(CPU, problem, [20, 10], first) is None
    assert in_slabs(CpuBackend(), problem, [20, 10], lambda piece: None) is None


def test_equal_parts_say_what_each_of_them_needs():
    problem = make_problem(batch=8)
    (algorithm,) = CountingBackend({"A": 10}).algorithms(problem.part(2))
    found = equal_parts(problem, 2, algorithm)
    assert str(found) == "4x2 A"
    assert found.workspace_bytes == 20


PLAIN, TENSOR = (
    Algorithm(name="A", workspace_bytes=0, api="graph", notes=notes)
    for notes in ((), ("NONDETERMINISTIC", "TENSOR_CORE"))
)


def large(channels=64, batch=8, **fields):
    return make_problem(
        channels=channels, filters=64, spatial=(256, 256), kernel=(3, 3), groups=1, batch=batch, **fields
    )


@given(problems(), st.integers(0, 100), st.booleans())
def test_no_algorithm_is_assumed_to_beat_the_bound_or_an_earlier_one_of_its_kind(problem, rank, tensor):
    algorithm = TENSOR if tensor else PLAIN
    bound_ms = plain_ms(problem) if algorithm is PLAIN else least_ms(replace(problem, dtype=DataType.FLOAT16))
    assert 0 < bound_ms <= assumed_ms(problem, algorithm, 0) < assumed_ms(problem, algorithm, rank + 1)
    assert assumed_ms(problem, PLAIN, 0) == plain_ms(problem)


@pytest.mark.parametrize("fields", [{"math": MathMode.FMA}, {"dtype": DataType.FLOAT64}])
def test_the_bound_knows_which_problems_have_no_tensor_cores(fields):
    assert least_ms(large()) < plain_ms(large())
    assert least_ms(large(**fields)) == plain_ms(large(**fields))


@given(problems(), st.integers(1, 4))
def test_parts_take_longer_in_sum_than_the_whole(problem, parts):
    whole = problem.with_batch(problem.batch * parts)
    for algorithm in (PLAIN, TENSOR):
        assert parts * assumed_ms(problem, algorithm, 0) >= assumed_ms(whole, algorithm, 0)


@pytest.mark.parametrize("operation", Operation)
def test_tensor_cores_are_faster_unless_they_have_few_channels(operation):
    for channels, faster in ((64, True), (3, False)):
        problem = large(channels, operation=operation)
        assert (assumed_ms(problem, TENSOR, 0) < assumed_ms(problem, PLAIN, 0)) is faster
    grouped = replace(large(operation=operation), groups=64)
    assert assumed_ms(grouped, TENSOR, 0) > assumed_ms(grouped, PLAIN, 0)


def test_micro_batches_with_tensor_cores_beat_a_whole_mini_batch_without_where_each_of_them_has_enough_to_do():
    assert 8 * assumed_ms(large(256).part(1), TENSOR, 0) < assumed_ms(large(256), PLAIN, 0)
    assert 8 * assumed_ms(large(8).part(1), TENSOR, 0) > assumed_ms(large(8), PLAIN, 0)


def test_no_recorded_time_of_the_direct_engine_is_less_than_the_least_that_is_assumed():
    recorded = [
        (direct_ms(problem, each.algorithm), each.time_ms)
        for recording in load_profile("h200").recordings.values()
        for problem, measured in recording.items()
        for each in measured
    ]
    direct = [(least, took) for least, took in recorded if least]
    assert len(direct) > 1000
    assert all(least < took for least, took in direct)
    assert sum(2 * least < took for least, took in direct) > len(direct) / 2, "most take far longer"
