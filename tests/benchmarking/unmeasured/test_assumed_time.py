"""Assumed times: they order kinds of algorithms and divisions as measured times mostly do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import make_problem, problems
from ucudnn.benchmarking.unmeasured.untimed_division import assumed_ms, direct_ms, least_ms, plain_ms
from ucudnn.problem import DataType, MathMode, Operation
from ucudnn.profiles.format import load_profile
from ucudnn.profiles.measurement import Algorithm

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
