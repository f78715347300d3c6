"""Candidates of the tuner: whole mini-batches, micro-batches and slabs; those of 16 bits add up in float32."""

from contextlib import nullcontext
from dataclasses import replace
from time import monotonic, sleep

import pytest

pytest.importorskip("torch")

from tests.support.counting_backend import CountingBackend
from tests.support.problems import make_problem
from ucudnn.backends import open_backend
from ucudnn.benchmarking.untimed_division import computed_pieces
from ucudnn.configuration import Float32Sum
from ucudnn.problem import DataType, Operation
from ucudnn.torch.tuning.candidate_source import CandidateSource, candidates_within
from ucudnn.workspace.spare import own_bytes

CPU = open_backend("cpu")


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.FLOAT32])
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_FILTER])
def test_divided_filter_gradients_of_16_bits_have_a_float32_sum(operation, dtype):
    problem = make_problem(operation=operation, dtype=dtype, batch=64)
    room = max(each.workspace_bytes for each in CPU.algorithms(problem)) // 3
    found = list(candidates_within(CPU, problem, room))
    divided = [each for each in found if len(each.parts) > 1]
    assert divided
    assert all(own_bytes(problem, each) <= room for each in found)
    sums = operation is Operation.BACKWARD_FILTER and dtype is DataType.FLOAT16
    assert {each.float32_sum is not None for each in divided} == {sums}
    assert all(each.float32_sum is None for each in found if len(each.parts) == 1)


def test_a_sum_that_leaves_no_room_is_left_out(monkeypatch):
    problem = make_problem(operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, batch=64)
    room = max(each.workspace_bytes for each in CPU.algorithms(problem)) // 3
    monkeypatch.setattr(type(CPU), "float32_sum", lambda self, asked: Float32Sum(size_bytes=room, time_ms=1.0))
    divided = [each for each in candidates_within(CPU, problem, room) if len(each.parts) > 1]
    assert divided
    assert all(each.float32_sum is None for each in divided)


class Ranked(CountingBackend):
    """Lists many algorithms, of which it finds the first ones without a list."""

    def __init__(self, *workspaces):
        super().__init__({f"A{number}": size for number, size in enumerate(workspaces)})
        self.lists, self.lock = 0, nullcontext()

    def algorithms(self, problem):
        self.lists += 1
        return super().algorithms(problem)

    def leading(self, problem, most):
        return super().algorithms(problem)[: min(most, 20)]

    def float32_sum(self, problem):
        return None


@pytest.mark.parametrize(("times", "whole", "divided"), [(1, 4, 2), (3, 12, 6)])
def test_a_costly_kernel_has_more_candidates(times, whole, divided):
    backend, problem = Ranked(*[10, 0] * 20), make_problem(batch=8)
    found = [*candidates_within(backend, problem, 40, 2, times)]
    kinds = [len(each.parts) for each in found]
    assert (kinds.count(1), kinds.count(2)) == (min(whole, 10), divided), "of the first 20, every other one fits"
    assert [each.parts[0].algorithm for each in found] == sorted(
        (each.parts[0].algorithm for each in found), key=lambda name: int(name[1:])
    )
    assert backend.lists <= divided, "only a part of a mini-batch is looked up"


def test_all_algorithms_are_looked_at_where_the_first_ones_give_nothing():
    backend, problem = Ranked(*[1 << 20] * 25, 0), make_problem(batch=8)
    assert [str(each) for each in candidates_within(backend, problem, 8)] == ["1x8 A25"]


@pytest.mark.parametrize(("times", "whole"), [(1, 2), (3, 8)])
def test_all_algorithms_of_a_costly_kernel_are_looked_at_where_few_of_the_first_ones_fit(times, whole):
    backend, problem = Ranked(0, 0, *[1 << 20] * 18, *[0] * 6), make_problem(batch=8)
    found = [each.parts[0].algorithm for each in candidates_within(backend, problem, 8, 0, times)]
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
    found = [*candidates_within(Noted(10, 0), problem, 40)]
    assert {each.parts[0].algorithm for each in found} == kept
    (slow,) = (each.time_ms for each in candidates_within(Noted(10, 0), problem, 40, now_ms=1e9) if "A1" in str(each))
    for now_ms, is_tried in ((1.01 * slow, True), (0.99 * slow, kept == {"A0", "A1"})):
        found = [*candidates_within(Noted(10, 0), problem, 40, now_ms=now_ms)]
        assert ("A1" in {each.parts[0].algorithm for each in found}) is is_tried, "the kernel may be slow now"
    assert [*candidates_within(Ranked(10, 0), problem, 40)][-1].parts[0].algorithm == "A1", "there are no tensor cores"


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
    found = [str(each) for each in candidates_within(Ranked(0, 0), problem, 20)]
    single = [f"{batch}x1 A0"] * is_offered
    assert found == [f"1x{batch} A0", *single, f"1x{batch} A1"], "by the first one only"


def test_single_samples_that_need_more_than_there_is_room_for_are_not_offered():
    class Larger(Ranked):
        def algorithm(self, problem, name):
            return replace(super().algorithm(problem, name), workspace_bytes=21)

    problem = make_problem(operation=Operation.BACKWARD_FILTER, batch=4)
    assert [str(each) for each in candidates_within(Larger(0), problem, 20)] == ["1x4 A0"]


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
        assert bool([*candidates_within(Direct(0), problem, 0, now_ms=now_ms)]) is is_tried


def test_each_micro_batch_and_each_slab_of_a_candidate_is_built(monkeypatch):
    problem = make_problem(batch=6, spatial=(40, 10), groups=1)
    room = min(each.workspace_bytes for each in CPU.algorithms(problem.part(1)) if each.workspace_bytes) // 2
    found = [each for each in candidates_within(CPU, problem, room) if len(each.parts) > 1]
    assert any(part.slabs for each in found for part in each.parts)
    assert all(own_bytes(problem, each) <= room for each in found)
    built = []
    prepare = type(CPU).prepare
    monkeypatch.setattr(type(CPU), "prepare", lambda self, *asked: built.append(asked) or prepare(self, *asked))
    source = CandidateSource(lambda: CPU, nullcontext)
    assert source._build(CPU, problem, found, source._stops) == found
    needed = {call for each in found for call, _ in computed_pieces(problem, each)}
    assert needed <= set(built)
    assert any(piece.spatial != problem.spatial for piece, _ in needed)


def test_a_source_asks_for_more_candidates_of_a_costly_kernel():
    backend = Ranked(*[0] * 20)
    asked = []
    for costly in (False, True):
        source = CandidateSource(lambda: backend, nullcontext)
        source.open_one()
        source._answer = lambda problem, found, *_: asked.append(len(found))
        source.ask(make_problem(batch=8), 0, costly=costly)
        source._work.get()(backend)
    assert asked == [4, 12]


def test_a_paused_source_begins_no_other_engine_and_is_not_busy(monkeypatch):
    built = []
    prepare = type(CPU).prepare
    monkeypatch.setattr(type(CPU), "prepare", lambda self, *asked: built.append(asked) or prepare(self, *asked))
    source = CandidateSource(lambda: CPU, nullcontext)
    source.open_one()
    source.open_one()
    source.pause(paused=True)
    problem = make_problem(batch=64)
    source.ask(problem, 1 << 40)
    assert not source.is_busy
    sleep(0.05)
    assert not built
    source.pause(paused=False)
    begin = monotonic()
    while not (found := list(source.take())):
        assert monotonic() - begin < 300
    ((asked, configurations),) = found
    assert asked == problem
    assert len(configurations) == len(built) > 1
    source.pause(paused=True)
    assert not source.is_busy
    assert source.was_busy(), "since the last call"
    assert not source.was_busy()
    source.ask(problem, 1 << 40)
    source.stop()
    source.join(300)
    assert not any(each.is_alive() for each in source._threads), "a paused thread ends, too"
