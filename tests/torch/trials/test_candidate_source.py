"""A source asks for candidates, and lets threads build what they need."""

from contextlib import nullcontext
from time import monotonic, sleep
from types import SimpleNamespace

from tests.support.noted import noted
from tests.support.problems import make_problem
from tests.support.ranked_backend import Ranked
from ucudnn.backends import open_backend
from ucudnn.benchmarking.unmeasured.untimed_division import computed_pieces
from ucudnn.torch.trials.candidate_list import candidates_within
from ucudnn.torch.trials.candidate_source import CandidateSource
from ucudnn.workspace.spare import own_bytes

CPU = open_backend("cpu")


def test_each_micro_batch_and_each_slab_of_a_candidate_is_built(monkeypatch):
    problem = make_problem(batch=6, spatial=(40, 10), groups=1)
    limit_bytes = min(each.workspace_bytes for each in CPU.algorithms(problem.part(1)) if each.workspace_bytes) // 2
    found = [each for _, each in candidates_within(CPU, problem, limit_bytes) if len(each.parts) > 1]
    assert any(part.slabs for each in found for part in each.parts)
    assert all(own_bytes(problem, each) <= limit_bytes for each in found)
    built = noted(monkeypatch, type(CPU), "prepare", of=lambda _, *asked, **how: asked)
    source = CandidateSource(lambda: CPU, nullcontext)
    source._answer(problem, found, source._stops, CPU)
    assert [*source.take()] == [(problem, found)]
    needed = {call for each in found for call, _ in computed_pieces(problem, each)}
    assert needed <= set(built)
    assert any(piece.spatial != problem.spatial for piece, _ in needed)


def test_what_adds_to_a_filter_gradient_is_built_for_divided_candidates_only(monkeypatch):
    problem = make_problem(batch=6, spatial=(40, 10), groups=1)
    limit_bytes = min(each.workspace_bytes for each in CPU.algorithms(problem.part(1)) if each.workspace_bytes) // 2
    within = (limit_bytes, 1 << 30)  # slabs, and the whole mini-batch
    found = [each for limit_bytes in within for _, each in candidates_within(CPU, problem, limit_bytes)]
    assert {each.calls > 1 for each in found} == {False, True}
    built = noted(monkeypatch, type(CPU), "prepare", of=lambda *_, adds: adds)
    source = CandidateSource(lambda: CPU, nullcontext)
    for each in found:
        source._answer(problem, [each], source._stops, CPU)
        assert [*source.take()] == [(problem, [each])]
        assert set(built) == {each.calls > 1}
        built.clear()


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
    built = noted(monkeypatch, type(CPU), "prepare")
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


def test_times_of_slabs_are_not_kept_and_those_of_whole_mini_batches_are():
    problem, saved = make_problem(batch=1, spatial=(40, 10), groups=1), []
    store = SimpleNamespace(save=saved.extend, load=lambda problems: [])
    limit_bytes = min(each.workspace_bytes for each in CPU.algorithms(problem) if each.workspace_bytes) // 2
    source = CandidateSource(lambda: CPU, nullcontext, lambda backend: store)
    source.open_one()
    source.ask(problem, limit_bytes)
    source.open_one()
    begin = monotonic()
    while not (found := [each for _, configurations in source.take() for each in configurations]):
        assert monotonic() - begin < 300
    in_slabs = [each for each in found if each.parts[0].slabs]
    assert in_slabs
    assert all(len(each.parts) == 1 for each in found), "there is one sample"
    source.keep([(problem, each, [1.0]) for each in found])
    source.stop()
    source.join(300)
    assert [each.algorithm.name for _, each in saved] == [
        each.parts[0].algorithm for each in found if not each.parts[0].slabs
    ]
