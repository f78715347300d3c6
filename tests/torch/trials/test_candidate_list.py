"""Candidates of a kernel: whole mini-batches, micro-batches and slabs; those of 16 bits add up in float32."""

from dataclasses import replace

import pytest

from tests.support.problems import make_problem
from tests.support.ranked_backend import Ranked
from ucudnn.backends import open_backend
from ucudnn.configuration import Float32Sum
from ucudnn.problem import DataType, Operation
from ucudnn.torch.trials.candidate_list import candidates_within
from ucudnn.workspace.spare import own_bytes, tail_bytes

CPU = open_backend("cpu")


def configurations_within(*arguments, **others):
    """Return the configurations that are offered; each is of the algorithm that comes with it."""
    found = list(candidates_within(*arguments, **others))
    assert all(algorithm.name in each.parts[0].algorithm for algorithm, each in found)
    return [each for _, each in found]


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.FLOAT32])
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_FILTER])
def test_divided_filter_gradients_of_16_bits_have_a_float32_sum(operation, dtype):
    problem = make_problem(operation=operation, dtype=dtype, batch=64)
    limit_bytes = max(each.workspace_bytes for each in CPU.algorithms(problem)) // 3
    found = configurations_within(CPU, problem, limit_bytes)
    divided = [each for each in found if len(each.parts) > 1]
    assert divided
    assert all(own_bytes(problem, each) <= limit_bytes for each in found)
    sums = operation is Operation.BACKWARD_FILTER and dtype is DataType.FLOAT16
    assert {each.float32_sum is not None for each in divided} == {sums}
    assert all(each.float32_sum is None for each in found if len(each.parts) == 1)


def test_a_sum_that_leaves_no_room_is_left_out(monkeypatch):
    problem = make_problem(operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, batch=64)
    limit_bytes = max(each.workspace_bytes for each in CPU.algorithms(problem)) // 3
    monkeypatch.setattr(type(CPU), "float32_sum", lambda self, asked: Float32Sum(size_bytes=limit_bytes, time_ms=1.0))
    divided = [each for each in configurations_within(CPU, problem, limit_bytes) if len(each.parts) > 1]
    assert divided
    assert all(each.float32_sum is None for each in divided)


@pytest.mark.parametrize(("times", "whole", "divided"), [(1, 4, 2), (3, 12, 9)])
def test_a_costly_kernel_has_more_candidates(times, whole, divided):
    backend, problem = Ranked(*[10, 0] * 20), make_problem(batch=8)
    found = configurations_within(backend, problem, 40, 2, times)
    kinds = [len(each.parts) for each in found]
    assert (kinds.count(1), kinds.count(2)) == (min(whole, 10), divided), "of the first 20, every other one fits"
    names = [int(each.parts[0].algorithm[1:]) for each in found]
    listed = names[: len(names) - (divided - 2 * times)]  # behind them come those that are offered for a micro-batch
    assert listed == sorted(listed)
    assert backend.lists <= divided, "only a part of a mini-batch is looked up"


def test_all_algorithms_are_looked_at_where_the_first_ones_give_nothing():
    backend, problem = Ranked(*[1 << 20] * 25, 0), make_problem(batch=8)
    assert [str(each) for each in configurations_within(backend, problem, 8)] == ["1x8 A25"]


@pytest.mark.parametrize(("times", "whole"), [(1, 2), (3, 8)])
def test_all_algorithms_of_a_costly_kernel_are_looked_at_where_few_of_the_first_ones_fit(times, whole):
    backend, problem = Ranked(0, 0, *[1 << 20] * 18, *[0] * 6), make_problem(batch=8)
    found = [each.parts[0].algorithm for each in configurations_within(backend, problem, 8, 0, times)]
    assert found == [f"A{number}" for number in (0, 1, *range(20, 26))][:whole]
    assert backend.lists == (times > 1)


@pytest.mark.parametrize(("small", "kept"), [(256, {"A0"}), (16, {"A0", "A1"})])
def test_algorithms_without_tensor_cores_are_no_candidates_of_large_kernels(small, kept):
    class Noted(Ranked):
        def leading(self, problem, most):
            first, *others = super().leading(problem, most)
            return [replace(first, notes=("TENSOR_CORE",)), *others]

        def algorithm(self, problem, name):
            return next(each for each in self.leading(problem, 20) if each.name == name)

    problem = make_problem(batch=8, channels=64, filters=64, spatial=(small, small), kernel=(3, 3), groups=1)
    found = configurations_within(Noted(10, 0), problem, 40)
    assert {each.parts[0].algorithm for each in found} == kept
    found = configurations_within(Noted(10, 0), problem, 40, now_ms=1e9)
    (slow,) = (each.time_ms for each in found if "A1" in str(each))
    for now_ms, is_tried in ((1.01 * slow, True), (0.99 * slow, kept == {"A0", "A1"})):
        found = configurations_within(Noted(10, 0), problem, 40, now_ms=now_ms)
        assert ("A1" in {each.parts[0].algorithm for each in found}) is is_tried, "the kernel may be slow now"
    assert configurations_within(Ranked(10, 0), problem, 40)[-1].parts[0].algorithm == "A1", "there are no tensor cores"


@pytest.mark.parametrize(
    ("operation", "batch", "dtype", "is_offered"),
    [
        (Operation.BACKWARD_FILTER, 4, DataType.FLOAT32, True),
        (Operation.BACKWARD_FILTER, 4, DataType.FLOAT16, False),
        (Operation.BACKWARD_FILTER, 1, DataType.FLOAT32, False),
        (Operation.BACKWARD_FILTER, 16, DataType.FLOAT32, False),
        (Operation.FORWARD, 4, DataType.FLOAT32, False),
    ],
)
def test_a_filter_gradient_of_few_samples_is_also_offered_sample_by_sample(operation, batch, dtype, is_offered):
    problem = make_problem(operation=operation, batch=batch, dtype=dtype)
    found = [str(each) for each in configurations_within(Ranked(0, 0), problem, 20)]
    single = [f"{batch}x1 A0"] * is_offered
    assert found == [f"1x{batch} A0", *single, f"1x{batch} A1"], "by the first one only"


def test_single_samples_that_need_more_than_there_is_room_for_are_not_offered():
    class Larger(Ranked):
        def algorithm(self, problem, name):
            return replace(super().algorithm(problem, name), workspace_bytes=21)

    problem = make_problem(operation=Operation.BACKWARD_FILTER, batch=4)
    assert [str(each) for each in configurations_within(Larger(0), problem, 20)] == ["1x4 A0"]


@pytest.mark.parametrize(
    ("name", "is_direct"), [("eng0", True), ("eng0_k1=2", True), ("eng0+added", True), ("eng01", False)]
)
def test_the_direct_engine_is_no_candidate_where_it_cannot_be_faster_than_the_kernel_now(name, is_direct):
    class Direct(Ranked):
        def leading(self, problem, most):
            return [replace(each, name=name) for each in super().leading(problem, most)]

    problem = make_problem(batch=8, channels=64, filters=64, spatial=(64, 64), kernel=(3, 3), groups=1)
    least_ms = problem.multiplications / 1.2e9
    for now_ms, is_tried in ((0.0, True), (1.01 * least_ms, True), (0.99 * least_ms, not is_direct)):
        assert bool(configurations_within(Direct(0), problem, 0, now_ms=now_ms)) is is_tried


class Parted(Ranked):
    """Offers A0 and A1 for the whole mini-batch of 8, and others first for a micro-batch."""

    def leading(self, problem, most):
        listed = super().leading(problem, 20)
        numbers = (0, 1, 7, 8, 9, 10) if problem.batch == 8 else (2, 1, 3, 4, 5, 6)
        return [listed[each] for each in numbers]


def test_a_costly_kernel_has_algorithms_that_are_offered_for_a_micro_batch_only():
    def offered(times, **others):
        backend = Parted(10, 10, 10, 1 << 20, 10, 10, 10, 0, 0, 0, 0)
        return [str(each) for each in configurations_within(backend, make_problem(batch=8, **others), 40, 2, times)]

    assert [each for each in offered(1) if "x8" not in each] == ["2x4 A0", "2x4 A1"]
    found = offered(3)
    assert [each for each in found if each.startswith("2x4")] == [f"2x4 A{number}" for number in (0, 1, 2, 4, 5)]
    assert found[-3:] == ["2x4 A2", "2x4 A4", "2x4 A5"], "half as many, those that fit and are not there yet"
    rounded = offered(3, operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16)
    assert not any(each.startswith("2x4 A2") for each in rounded), "each part would round"
    assert "2x4 A2" not in offered(3, biased=True), "the whole list would be asked for"


@pytest.mark.parametrize("times", [1, 3])
def test_a_costly_kernel_is_also_divided_into_equal_parts_beside_parts_of_several_sizes(times):
    class Tail(Ranked):
        """A division has a larger part first, because the tail of its output is workspace."""

        def algorithm(self, problem, name):
            return replace(super().algorithm(problem, name), workspace_bytes=1000 * (problem.batch > 1) + 10)

    problem = make_problem(batch=8, filters=64, spatial=(16, 16))
    assert tail_bytes(problem)[4] > 1010, "the output of four samples is workspace of the first ones"
    found = configurations_within(Tail(1 << 20, 0), problem, 40, 2, times)
    (mixed,) = (number for number, each in enumerate(found) if len({part.size for part in each.parts}) > 1)
    equal = [number for number, each in enumerate(found) if str(each) == "8x1 A0"]
    assert equal == [mixed + 1] * (times > 1), "right behind"
    assert all(own_bytes(problem, each) <= 40 for each in found)
