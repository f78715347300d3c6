"""Benchmarks of cuDNN on the host: what is listed, built and compiled, when, and by which thread."""

import threading
import time
from dataclasses import replace
from threading import Barrier, Lock, current_thread, main_thread
from time import perf_counter, sleep
from weakref import ref

import pytest

from tests.support.host_gpu import PROBLEM
from tests.support.noted import noted
from tests.support.operands import QUICK
from ucudnn.backends.base import ACCUMULATE, OVERWRITE
from ucudnn.backends.bench import PrefetchRequest
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.legacy_call import ALGORITHMS
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.algorithms.prepare import Preparer
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor
from ucudnn.backends.cudnn.api.enums import Attribute, DescriptorType
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.backends.cudnn.gpu.base import Timed
from ucudnn.handle import Handle
from ucudnn.problem import MathMode, Operation
from ucudnn.torch.device.gpu import TorchGpu


@pytest.fixture
def compiling(monkeypatch):
    """Let each engine need a compiler."""
    monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.operation_graph.RUNTIME_COMPILATION", 0)
    numbers = BackendDescriptor.numbers
    monkeypatch.setattr(
        BackendDescriptor,
        "numbers",
        lambda self, attribute, *rest: (
            [0] if attribute == Attribute.ENGINE_BEHAVIOR_NOTE else numbers(self, attribute, *rest)
        ),
    )


def wait_for(backend):
    begin = perf_counter()
    while not backend.is_ready(PROBLEM):
        assert perf_counter() - begin < 300
        sleep(0.001)


def fits(backend, size, name, limit_bytes):
    return backend.algorithm(PROBLEM.part(size), name).workspace_bytes <= limit_bytes


@pytest.mark.parametrize("math", MathMode)
def test_legacy_algorithms_that_the_graph_api_lacks_are_measured(host, calls, monkeypatch, math):
    # The stand-in has two algorithms of each API; let the graph API lack the second.
    monkeypatch.setattr("ucudnn.backends.candidates._TRANSFORMS", {"IMPLICIT_PRECOMP_GEMM"})
    problem = replace(PROBLEM, math=math)
    wanted = {"IMPLICIT_PRECOMP_GEMM"} if math is MathMode.FMA else set()
    backends = {
        each: CudnnBackend(candidates=each, library_path=host.stub._name, device=TorchGpu(0))
        for each in (Candidates.BEST, Candidates.GRAPH, Candidates.LEGACY)
    }
    names = {each: {algorithm.name for algorithm in backend.algorithms(problem)} for each, backend in backends.items()}
    assert wanted < names[Candidates.LEGACY]
    assert names[Candidates.BEST] == names[Candidates.GRAPH] | wanted
    assert [each.name for each in backends.values()] == ["cudnn", "cudnn:graph", "cudnn:legacy"]
    calls()
    own = Handle(backend=backends[Candidates.BEST], effort=QUICK, policy="powerOfTwo", workspace_limit="1MiB")
    own.get_algorithm(problem)
    own.optimize()
    plain = ALGORITHMS[problem.operation]["IMPLICIT_GEMM"]  # the reference for the others
    legacy = {call.algorithm for call in calls() if call.api} - {plain}
    assert legacy == {ALGORITHMS[problem.operation][name] for name in wanted}


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("adds", [False, True])
def test_only_filter_gradients_that_add_have_a_second_plan(backend, monkeypatch, operation, adds):
    asked = noted(monkeypatch, Preparer, "prepare", of=lambda *call: call[3])
    problem = replace(PROBLEM, operation=operation)
    backend.prepare(problem, backend.algorithms(problem)[0].name, adds=adds)
    filters = operation is Operation.BACKWARD_FILTER
    assert asked == [(OVERWRITE, ACCUMULATE) if adds and filters else (OVERWRITE,)]


def test_plans_are_built_once_while_the_gpu_is_busy(backend, monkeypatch):
    queued, timed, wait_ms = [], TorchGpu.timed, Timed.wait_ms
    built = noted(monkeypatch, Preparer, "prepare_for_bench", of=lambda _, *call: (call[0], call[1].name, bool(queued)))

    def counted_timed(self, run, lead=None):
        queued.append(timed(self, run, lead))
        return queued[-1]

    def counted_wait(self):
        if self in queued:
            queued.remove(self)
        return wait_ms(self)

    monkeypatch.setattr(TorchGpu, "timed", counted_timed)
    monkeypatch.setattr(Timed, "wait_ms", counted_wait)
    own = Handle(backend=backend, effort=QUICK, policy="powerOfTwo", workspace_limit=3000)
    own.get_algorithm(PROBLEM)
    own.optimize()
    assert len(built) == len({each[:2] for each in built})
    assert sum(busy for *_, busy in built) > len(built) / 2, "but for the first, and what follows on a vain hope"


@pytest.mark.parametrize("compiles", [False, True])
def test_plans_do_not_share_compiled_engines(backend, monkeypatch, compiling, compiles):
    made = noted(monkeypatch, OperationGraph, "_new", of=lambda graph, kind: kind)
    if not compiles:
        monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.operation_graph.RUNTIME_COMPILATION", -1)
    graph = OperationGraph(backend.library, backend.cudnn_handle, PROBLEM, OVERWRITE)
    for _ in range(3):
        assert graph.named("eng1").compiles == compiles
        graph.plan("eng1")
    assert made.count(DescriptorType.ENGINE) == (3 if compiles else 1)


@pytest.mark.parametrize("limit_bytes", [100, 800, 3000])
def test_an_engine_compiled_in_the_background_is_measured_without_another_build(
    host, calls, monkeypatch, compiling, limit_bytes
):
    by_main = lambda: current_thread() is main_thread()  # noqa: E731
    built = noted(monkeypatch, OperationGraph, "plan", of=lambda graph, name: (graph.problem.batch, name, by_main()))
    host.stream = 7
    backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
    backend.prefetch([PrefetchRequest(PROBLEM, (1, 2, 4, 8), limit_bytes, lambda name: False)])
    wait_for(backend)
    assert not built, "nothing is worth it"
    backend.stop()
    backend.prefetch([PrefetchRequest(PROBLEM, (1, 2, 4, 8), limit_bytes)])
    wait_for(backend)
    ahead = {(batch, name) for batch, name, _ in built}
    # At the largest size that fits, of that where measuring begins, its half, and so on.
    assert ahead == {
        (size, name)
        for name in ("eng0", "eng1")
        for size in [next((s for s in (2, 1) if fits(backend, s, name, limit_bytes)), None)]
        if size is not None
    }
    assert not any(main for *_, main in built)
    calls()
    with backend.bench(PROBLEM) as bench:
        for size, name in sorted(ahead):
            algorithm = backend.algorithm(PROBLEM.part(size), name)
            assert algorithm.compiles
            assert bench.measure(size, algorithm, QUICK).measured
        assert len(built) == len(ahead), "nothing is built twice"
        bench.announce(4, backend.algorithm(PROBLEM.part(4), "eng0"))
        wait_for(backend)
        assert bench.measure(4, backend.algorithm(PROBLEM.part(4), "eng0"), QUICK).measured
    assert built[len(ahead) :] == [(4, "eng0", False)]
    made = [call for call in calls() if not call.api]
    assert {(call.batch, f"eng{call.algorithm}") for call in made} == {*ahead, (4, "eng0")}
    assert {call.stream for call in made} == {host.stream}
    assert backend.cudnn_handle not in {call.handle for call in made}, (
        "plans are executed by those they were built with"
    )
    backend.stop()


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_waits_for_a_busy_thread_is_built_by_the_main_thread(host, monkeypatch, compiling, begun):
    threads = noted(monkeypatch, OperationGraph, "plan", of=lambda *_: current_thread())
    monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.compile_ahead._MOST_BUILDING", 1)
    backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
    running, held = Barrier(2), Lock()

    def work():
        running.wait()
        with held:
            pass

    held.acquire()
    backend._compiler._building.submit(work)
    running.wait()
    part = PROBLEM.part(4)
    if begun:
        backend._compiler.build(part, "eng0")
        assert not backend.is_ready(PROBLEM)
    with backend.bench(PROBLEM) as bench:
        assert bench.measure(4, backend.algorithm(part, "eng0"), QUICK).measured
    assert {*threads} == {main_thread()}
    assert backend.is_ready(PROBLEM)
    backend._compiler.build(part, "eng1")
    backend.drop()
    assert backend.is_ready(PROBLEM)
    assert backend._compiler._plans == {}
    held.release()
    backend.stop()


def test_nothing_is_built_after_all_requests_were_dropped(host, monkeypatch, compiling):
    running, held = threading.Event(), Lock()
    ask = OperationGraph.ask

    def slow(self):
        running.set()
        with held:
            return ask(self)

    monkeypatch.setattr(OperationGraph, "ask", slow)
    for dropped in (True, False):
        backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
        with held:
            backend.prefetch([PrefetchRequest(PROBLEM, (1, 2, 4, 8), 1 << 30)])
            running.wait()
            dropping = threading.Thread(target=backend.drop)  # it waits for the lists that are being made
            if dropped:
                dropping.start()
                while not backend._compiler._drops:
                    time.sleep(0.001)
        if dropped:
            dropping.join()
        wait_for(backend)
        assert bool(backend._compiler._plans) != dropped
        backend.stop()


def test_the_number_of_plans_that_are_kept_is_bounded(backend, monkeypatch, compiling):
    monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.compile_ahead._MOST_KEPT", 3)
    kept = []
    for size in (1, 2, 3, 4, 5, 6, 7, 8):
        backend._compiler.build(PROBLEM.part(size), "eng0")
        wait_for(backend)
        built = backend._compiler.built(PROBLEM.part(size), "eng0")
        kept.append(ref(built.handle))
        del built
    assert sum(each() is not None for each in kept) == 3
    backend.stop()
    assert all(each() is None for each in kept)
