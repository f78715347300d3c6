"""Background threads that ask heuristics: a caller never waits for a list that no thread has begun."""

from contextlib import nullcontext
from gc import collect
from threading import Event, Thread, current_thread, main_thread
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
"""The caller's handle; threads have other handles."""


class Graph:
    """Stands for an operation graph, which needs a GPU: it records the thread and the handle that asked."""

    asked: list[tuple[int, int, bool]]

    def __init__(self, library, handle, part):
        self._what = part.batch, handle

    def ask(self):
        Graph.asked.append((*self._what, current_thread() is main_thread()))

    def algorithms(self):
        return [SimpleNamespace(name=f"eng{self._what[0]}", compiles=False)]


@pytest.fixture
def made():
    """Keep the compilers of a test, and stop them after it."""
    return []


@pytest.fixture
def make(monkeypatch, made):
    """Return a maker of compilers whose threads get their handles when an event is set, by default at once."""
    monkeypatch.setattr(compile_ahead, "exchange_capture_mode", int)
    monkeypatch.setattr(compile_ahead, "listing_graph", Graph)
    Graph.asked = []

    def start(ready=None, error=None):
        def handle(library):
            assert ready is None or ready.wait(300)
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
    """Return the names that are listed for a part, as a caller with that handle gets them."""
    found = threads.listed(part, OWN)
    return None if found is None else [each.name for each in found]


def wait_for(threads, problem):
    while not threads.is_ready(problem):
        sleep(0.001)


def test_a_list_that_no_thread_has_begun_is_made_by_the_caller(make):
    ready = Event()
    threads = make(ready)
    threads.begin(PARTS, 1 << 20)
    assert not threads.is_ready(PROBLEM)
    assert [listed(threads, part) for part in PARTS] == [["eng8"], ["eng4"], ["eng2"]]
    assert Graph.asked == [(8, OWN, True), (4, OWN, True), (2, OWN, True)]
    assert threads.is_ready(PROBLEM)
    assert listed(threads, PROBLEM) is None  # it was not asked for again
    ready.set()
    threads.stop()
    assert len(Graph.asked) == len(PARTS)  # no thread lists them again


def test_no_list_is_being_made_when_the_program_goes_on(make, monkeypatch):
    began, goes_on, dropped = Event(), Event(), Event()

    def ask(graph):
        began.set()
        assert goes_on.wait(300)

    monkeypatch.setattr(Graph, "ask", ask)
    threads = make()
    threads.begin(PARTS, 1 << 20)
    assert began.wait(300)
    caller = Thread(target=lambda: (threads.drop(), dropped.set()))
    caller.start()
    assert not dropped.wait(0.2), "heuristics capture a stream, so that nobody may wait for the device meanwhile"
    goes_on.set()
    assert dropped.wait(300)
    caller.join()


def test_the_caller_takes_lists_from_threads(make):
    threads = make()
    threads.begin(PARTS, 1 << 20)
    threads.settle()
    assert [listed(threads, part) for part in PARTS] == [["eng8"], ["eng4"], ["eng2"]]
    assert sorted(batch for batch, _, _ in Graph.asked) == [2, 4, 8]
    assert all(handle != OWN and not main for _, handle, main in Graph.asked)


def test_a_plan_that_is_no_longer_worth_it_is_not_built_but_may_begin_again(make, monkeypatch):
    planned, answers = [], iter([True, False])
    algorithm = SimpleNamespace(name="eng19", compiles=True, workspace_bytes=0)
    monkeypatch.setattr(Graph, "algorithms", lambda self: [algorithm])
    monkeypatch.setattr(Graph, "plan", lambda self, name: planned.append(name), raising=False)
    threads = make()

    def begin(promises):
        threads.begin([PROBLEM], 1 << 20, promises)
        wait_for(threads, PROBLEM)
        threads.listed(PROBLEM, OWN)

    begin(lambda name: False)
    assert not planned, "it was not when it was listed"
    begin(lambda name: next(answers))
    assert not planned, "it is not when its turn comes"
    assert next(answers, None) is None, "it was asked both times"
    threads.build(PROBLEM, "eng19")
    wait_for(threads, PROBLEM)
    assert planned == ["eng19"]


@pytest.mark.parametrize("error", [None, CudnnError(4004)])
def test_warming_up_creates_handles_and_keeps_no_lists(make, monkeypatch, error):
    operations = []
    threads = make(error=error)

    def graph(library, handle, part):
        operations.append(part.operation)
        return Graph(library, handle, part)

    monkeypatch.setattr(compile_ahead, "listing_graph", graph)
    threads.warm_up()
    assert set(operations) == (set() if error else set(Operation))
    for each in compile_ahead.SMALL:
        wait_for(threads, each)
    assert listed(threads, compile_ahead.SMALL[0]) is None
    threads.begin(PARTS, 1 << 20)  # and threads continue
    threads.settle()
    # Where a thread has no handle, the caller lists the parts, and gets the error.
    assert [listed(threads, part) for part in PARTS] == ([None] * 3 if error else [["eng8"], ["eng4"], ["eng2"]])
    assert not (error and Graph.asked)


def test_threads_end_with_their_compiler(make, made):
    before = enumerate_threads()
    threads = make()
    threads.begin(PARTS, 1 << 20)
    threads.settle()
    started = [each for each in enumerate_threads() if each not in before]
    assert started
    gone = ref(threads)
    made.clear()
    del threads
    for _ in range(1000):  # threads may still finish their last work
        collect()
        if gone() is None:
            break
        sleep(0.01)
    assert gone() is None, "threads do not hold it"
    for each in started:
        each.join(300)
        assert not each.is_alive()
