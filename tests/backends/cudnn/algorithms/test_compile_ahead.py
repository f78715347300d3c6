"""Threads that ask heuristics: who asks for a list does not wait for one that has yet to begin."""

from contextlib import nullcontext
from gc import collect
from threading import Event, current_thread, main_thread
from threading import enumerate as enumerate_threads
from time import sleep
from types import SimpleNamespace
from weakref import ref

import pytest

from ucudnn.backends.cudnn.algorithms import compile_ahead
from ucudnn.errors import CudnnError
from ucudnn.problem import ConvolutionProblem, Operation

PROBLEM = ConvolutionProblem(
    operation=Operation.FORWARD, batch=8, channels=3, spatial=(9, 9), filters=5, kernel=(3, 3)
)  # fmt: skip
PARTS = [PROBLEM.part(size) for size in (8, 4, 2)]
OWN = 17
"""The handle of whoever asks; those of threads are others."""


class Graph:
    """Stands for an operation graph, which a CPU cannot make: says who asked for it, with which handle."""

    asked: list[tuple[int, int, bool]]

    def __init__(self, library, handle, part):
        self._what = part.batch, handle

    def ask(self):
        Graph.asked.append((*self._what, current_thread() is main_thread()))

    def algorithms(self):
        return [SimpleNamespace(name=f"eng{self._what[0]}", compiles=False)]


@pytest.fixture
def made():
    """Hold what was made, until it has ended."""
    return []


@pytest.fixture
def make(monkeypatch, made):
    """Return what makes threads whose handles come once the event that is passed to it is set."""
    monkeypatch.setattr(compile_ahead, "exchange_capture_mode", int)
    monkeypatch.setattr(compile_ahead, "listing_graph", Graph)
    Graph.asked = []

    def start(ready, error=None):
        def handle(library):
            assert ready.wait(30)
            if error is not None:
                raise error
            return SimpleNamespace(address=1000 + len(made))

        monkeypatch.setattr(compile_ahead, "OwnedHandle", handle)
        device = SimpleNamespace(use=nullcontext, failures=(CudnnError,))
        made.append(compile_ahead.AheadCompiler(SimpleNamespace(), device))
        return made[-1]

    yield start
    for each in made:
        each.stop()


def listed(threads, part):
    """Return the names that are listed for a part, for whoever has that handle."""
    found = threads.listed(part, OWN)
    return None if found is None else [each.name for each in found]


def test_what_no_thread_has_come_to_is_listed_by_whoever_asks(make):
    ready = Event()
    threads = make(ready)
    threads.begin(PARTS, 1 << 20)
    assert not threads.is_ready(PROBLEM)
    assert [listed(threads, part) for part in PARTS] == [["eng8"], ["eng4"], ["eng2"]]
    assert Graph.asked == [(8, OWN, True), (4, OWN, True), (2, OWN, True)]
    assert threads.is_ready(PROBLEM)
    assert listed(threads, PROBLEM) is None  # it was not begun again
    ready.set()
    threads.stop()
    assert len(Graph.asked) == len(PARTS)  # no thread lists them once more


def test_what_threads_listed_is_taken_from_them(make):
    ready = Event()
    ready.set()
    threads = make(ready)
    threads.begin(PARTS, 1 << 20)
    threads.settle()
    assert [listed(threads, part) for part in PARTS] == [["eng8"], ["eng4"], ["eng2"]]
    assert sorted(batch for batch, _, _ in Graph.asked) == [2, 4, 8]
    assert all(handle != OWN and not main for _, handle, main in Graph.asked)


def test_threads_without_a_handle_end_nothing(make):
    ready = Event()
    ready.set()
    threads = make(ready, CudnnError(4004))
    threads.begin(PARTS, 1 << 20)
    threads.settle()
    assert [listed(threads, part) for part in PARTS] == [None] * 3  # the caller lists them, and hears why
    threads.begin(PARTS, 1 << 20)  # and threads go on
    threads.settle()
    assert not Graph.asked


def test_what_promises_nothing_any_more_is_not_built_but_may_begin_again(make, monkeypatch):
    ready, planned, answers = Event(), [], iter([True, False])
    ready.set()
    algorithm = SimpleNamespace(name="eng19", compiles=True, workspace_bytes=0)
    monkeypatch.setattr(Graph, "algorithms", lambda self: [algorithm])
    monkeypatch.setattr(Graph, "plan", lambda self, name: planned.append(name), raising=False)
    threads = make(ready)

    def begin(promises):
        threads.begin([PROBLEM], 1 << 20, promises)
        while not threads.is_ready(PROBLEM):
            sleep(0.001)
        threads.listed(PROBLEM, OWN)

    begin(lambda name: False)
    assert not planned, "it was not when it was listed"
    begin(lambda name: next(answers))
    assert not planned, "it is not when its turn comes"
    assert next(answers, None) is None, "it was asked both times"
    threads.build(PROBLEM, "eng19")
    while not threads.is_ready(PROBLEM):
        sleep(0.001)
    assert planned == ["eng19"]


@pytest.mark.parametrize("error", [None, CudnnError(4004)])
def test_threads_that_were_warmed_up_have_handles_and_nothing_else(make, monkeypatch, error):
    ready, operations = Event(), []
    ready.set()
    threads = make(ready, error)

    def graph(library, handle, part):
        operations.append(part.operation)
        return Graph(library, handle, part)

    monkeypatch.setattr(compile_ahead, "listing_graph", graph)
    threads.warm_up()
    assert set(operations) == (set() if error else set(Operation))
    while not all(threads.is_ready(each) for each in compile_ahead.SMALL):
        sleep(0.001)
    assert listed(threads, compile_ahead.SMALL[0]) is None
    threads.begin(PARTS, 1 << 20)  # and threads go on
    threads.settle()
    assert [listed(threads, part) for part in PARTS] == ([None] * 3 if error else [["eng8"], ["eng4"], ["eng2"]])


def test_threads_end_with_what_began_them(make, made):
    ready = Event()
    ready.set()
    before = enumerate_threads()
    threads = make(ready)
    threads.begin(PARTS, 1 << 20)
    threads.settle()
    started = [each for each in enumerate_threads() if each not in before]
    assert started
    gone = ref(threads)
    made.clear()
    del threads
    for _ in range(1000):  # they may still end what they did last
        collect()
        if gone() is None:
            break
        sleep(0.01)
    assert gone() is None, "threads do not hold it"
    for each in started:
        each.join(30)
        assert not each.is_alive()
