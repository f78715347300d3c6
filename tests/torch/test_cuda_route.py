"""The whole way of PyTorch's CUDA convolutions on the host: `TorchGpu` over tensors of the CPU, a stand-in for cuDNN.

What cannot be told without a GPU, streams and captures, is what a test sets; what memory is asked for is counted.
"""

import ctypes
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Barrier, Lock, current_thread, main_thread
from time import perf_counter, sleep
from types import SimpleNamespace
from weakref import finalize, ref

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch as switch  # noqa: E402
from tests.support.operands import QUICK  # noqa: E402
from tests.support.paths import NATIVE  # noqa: E402
from tests.support.torch_cases import CASES, assert_close, modules, outcome  # noqa: E402
from ucudnn.backends.base import OVERWRITE  # noqa: E402
from ucudnn.backends.candidates import Candidates  # noqa: E402
from ucudnn.backends.cudnn.algorithms.legacy_call import ALGORITHMS  # noqa: E402
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph  # noqa: E402
from ucudnn.backends.cudnn.algorithms.prepare import Preparer  # noqa: E402
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor  # noqa: E402
from ucudnn.backends.cudnn.api.enums import Attribute, DescriptorType  # noqa: E402
from ucudnn.backends.cudnn.backend import CudnnBackend  # noqa: E402
from ucudnn.backends.cudnn.gpu.base import Timed  # noqa: E402
from ucudnn.backends.prefetch import PrefetchRequest  # noqa: E402
from ucudnn.configuration import Configuration, MicroConfiguration  # noqa: E402
from ucudnn.execution.launcher import BoundKernel  # noqa: E402
from ucudnn.handle import Handle  # noqa: E402
from ucudnn.problem import ConvolutionProblem, MathMode, Operation  # noqa: E402
from ucudnn.torch.gpu import TorchGpu  # noqa: E402
from ucudnn.torch.interceptor import Interceptor  # noqa: E402
from ucudnn.torch.kernel_call import IN_CAPTURE, KernelCall  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

F = torch.nn.functional


class Host:
    """PyTorch as the package sees it, with a GPU that is the host's memory.

    Attributes:
        stream: address of the current stream.
        captures: whether it is being captured.
        most_bytes: the largest allocation that there is room for.
        refused_bytes: of the next that there is no room for, by its size.
        allocated: bytes of each workspace.
        live_bytes: of all that is allocated, outputs too.
        peak_bytes: the most of them since `forget`.
    """

    def __init__(self, stub):
        self.stub = stub
        self.stream = 0
        self.captures = False
        self.most_bytes = 1 << 40
        self.refused_bytes = 0
        self.live_bytes = 0
        self.forget()
        properties = SimpleNamespace(name="host", major=0, minor=0)
        self.cuda = SimpleNamespace(
            Event=lambda **options: Event(stub),
            current_stream=lambda device: SimpleNamespace(wait_event=lambda event: None),
            device=lambda ordinal: nullcontext(),
            device_count=lambda: 1,
            empty_cache=lambda: None,
            get_device_properties=lambda ordinal: properties,
        )

    def __getattr__(self, name):
        return getattr(torch, name)

    def forget(self):
        self.allocated = []
        self.peak_bytes = self.live_bytes

    def held_by(self, run):
        """Return what a call returns, and how much it had allocated besides at most, as PyTorch's statistics say."""
        self.forget()
        before = self.live_bytes
        found = run()
        return found, self.peak_bytes - before - sum(each.nbytes for each in found)

    def device(self, kind, ordinal=0):
        return torch.device("cpu")

    def empty_strided(self, size, strides, **options):
        if options["dtype"] is torch.uint8:
            if size[0] > self.most_bytes or size[0] == self.refused_bytes:
                self.refused_bytes = 0
                raise torch.OutOfMemoryError(f"Tried to allocate {size[0]} bytes. Of no interest")
            self.allocated.append(size[0])
        made = torch.empty_strided(size, strides, **options)
        self._count(made.nbytes)
        finalize(made, self._count, -made.nbytes)
        return made

    def empty_here(self, size, strides, dtype):
        return self.empty_strided(size, strides, dtype=dtype)

    def _count(self, size_bytes):
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def as_tensor(self, memory, device):
        told = memory.__cuda_array_interface__
        (size,), (address, _) = told["shape"], told["data"]
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


class Event:
    """The clock of the stand-in."""

    def __init__(self, stub):
        self._stub = stub
        self.time = 0

    def record(self, stream):
        self.time = self._stub.stub_clock()

    def synchronize(self):
        pass

    def query(self):
        return True  # it computes as it is called

    def elapsed_time(self, end):
        return (end.time - self.time) / 1e3


class Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("api", "operation", "batch", "algorithm")),
        *((name, ctypes.c_double) for name in ("alpha", "beta")),
        *((name, ctypes.c_void_p) for name in ("x", "w", "y", "workspace", "handle", "stream")),
    )


@pytest.fixture(scope="module")
def stub(toolchain):
    path = toolchain.folder / "libcudnn_torch.so.9"
    toolchain.compile(NATIVE / "stub_cudnn.cpp", path, "-shared", "-fPIC")
    loaded = ctypes.CDLL(str(path))
    loaded.stub_clock.restype = ctypes.c_int64
    return loaded


@pytest.fixture
def host(stub, monkeypatch):
    found = Host(stub)
    monkeypatch.setattr("ucudnn.torch.gpu.torch", found)
    monkeypatch.setattr("ucudnn.torch.kernel_call.torch", found)
    monkeypatch.setattr("ucudnn.torch.kernel_call.empty_of", lambda device_type: found.empty_here)
    monkeypatch.setattr("ucudnn.torch.gpu._current_device", lambda: 0)
    monkeypatch.setattr("ucudnn.torch.gpu._current_stream", lambda ordinal: found.stream)
    monkeypatch.setattr("ucudnn.torch.gpu._is_capturing", lambda: found.captures)
    monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.compile_ahead.exchange_capture_mode", lambda mode: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0, raising=False)
    yield found
    process_overrides.clear()
    process_overrides._kept.clear()


@pytest.fixture
def calls(stub):
    """Return a function that returns what the stand-in has computed since it was asked last."""

    def taken():
        room = (Call * 4096)()
        return room[: stub.stub_calls(room, len(room))]

    return taken


def enable(host, **options):
    def open_handle(ordinal):
        backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(ordinal))
        return Handle(backend=backend, effort=QUICK, **options)

    made = Interceptor(open_handle, "cpu", process_overrides.aten_kernels("cpu"))
    before = process_overrides.interceptor
    process_overrides.use(made)
    return switch.Enabled(made, before)


def test_of_a_gpu_that_is_not_the_current_one(host, monkeypatch):
    current = [1]

    @contextmanager
    def entered(ordinal):
        current.append(ordinal)
        yield
        current.pop()

    monkeypatch.setattr("ucudnn.torch.gpu._current_device", lambda: current[-1])
    monkeypatch.setattr(host.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered(device.index or 0))
    monkeypatch.setattr(host, "empty_here", lambda *form: pytest.fail("of the GPU that is the current one"))
    module, x = torch.nn.Conv2d(3, 4, 3).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    expected = outcome(module, x)
    with enable(host) as on:
        for _ in range(3):
            assert_close(outcome(module, x), expected)
    assert (on.report().left, on.report().calls) == ({}, 9)


@pytest.mark.parametrize("index", CASES)
def test_outputs_and_gradients_are_pytorchs(host, index):
    module, shape = modules()[index]
    module, x = module.double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = outcome(module, x)
    for options in ({"workspace_limit": "1KiB", "policy": "all"}, {"total_workspace": "64KiB"}):
        with enable(host, **options) as on:
            for _ in range(2):
                assert_close(outcome(module, x), expected)
        assert on.report().left == {}
        assert on.report().calls == 6


def convolution(x, w):
    """Return output and gradients of input and weight, by operators that PyTorch calls."""
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = torch.convolution(x, w, None, *rest)
    return out, *torch.ops.aten.convolution_backward.default(out.cos(), x, w, None, *rest, [True, True, False])[:2]


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def operands():
    torch.manual_seed(0)
    return torch.randn(8, 4, 7, 6), torch.randn(6, 4, 3, 3)


PROBLEM = ConvolutionProblem(
    operation=Operation.FORWARD, batch=8, channels=4, spatial=(7, 6), filters=6, kernel=(3, 3), padding=(1, 1)
)


@pytest.mark.parametrize("math", MathMode)
def test_what_the_graph_api_lacks_is_measured_and_runs(host, calls, monkeypatch, math):
    # The stand-in has two algorithms of either API; the second is to be the one that the graph API lacks.
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
    plain = ALGORITHMS[problem.operation]["IMPLICIT_GEMM"]  # what others are checked by
    legacy = {call.algorithm for call in calls() if call.api} - {plain}
    assert legacy == {ALGORITHMS[problem.operation][name] for name in wanted}


def test_plans_are_built_once_while_the_gpu_is_busy(host, monkeypatch):
    built, queued = [], []
    prepare, timed, wait_ms = Preparer.prepare_for_bench, TorchGpu.timed, Timed.wait_ms

    def counted(self, problem, algorithm):
        built.append((problem, algorithm.name, bool(queued)))
        return prepare(self, problem, algorithm)

    def counted_timed(self, run, lead=None):
        queued.append(timed(self, run, lead))
        return queued[-1]

    def counted_wait(self):
        if self in queued:
            queued.remove(self)
        return wait_ms(self)

    monkeypatch.setattr(Preparer, "prepare_for_bench", counted)
    monkeypatch.setattr(TorchGpu, "timed", counted_timed)
    monkeypatch.setattr(Timed, "wait_ms", counted_wait)
    backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
    own = Handle(backend=backend, effort=QUICK, policy="powerOfTwo", workspace_limit=3000)
    own.get_algorithm(PROBLEM)
    own.optimize()
    assert len(built) == len({each[:2] for each in built})
    assert sum(busy for *_, busy in built) > len(built) / 2, "but for the first, and what follows on a vain hope"


@pytest.fixture
def compiling(monkeypatch):
    """Let all engines need a compiler."""
    monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.operation_graph.RUNTIME_COMPILATION", 0)
    numbers = BackendDescriptor.numbers
    monkeypatch.setattr(
        BackendDescriptor,
        "numbers",
        lambda self, attribute, *rest: (
            [0] if attribute == Attribute.ENGINE_BEHAVIOR_NOTE else numbers(self, attribute, *rest)
        ),
    )


@pytest.mark.parametrize("compiles", [False, True])
def test_compiled_engines_are_not_shared_by_plans(host, monkeypatch, compiling, compiles):
    made = []
    new = OperationGraph._new
    monkeypatch.setattr(OperationGraph, "_new", lambda self, kind: made.append(kind) or new(self, kind))
    if not compiles:
        monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.operation_graph.RUNTIME_COMPILATION", -1)
    backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
    graph = OperationGraph(backend.library, backend.cudnn_handle, PROBLEM, OVERWRITE)
    for _ in range(3):
        assert graph.configuration("eng1").compiles == compiles
        graph.plan("eng1")
    assert made.count(DescriptorType.ENGINE) == (3 if compiles else 1)


@pytest.mark.parametrize("limit_bytes", [100, 800, 3000])
def test_what_is_compiled_in_the_background_is_measured_as_it_is(host, calls, monkeypatch, compiling, limit_bytes):
    built = []
    plan = OperationGraph.plan

    def counted(self, name):
        built.append((self.problem.batch, name, current_thread() is main_thread()))
        return plan(self, name)

    monkeypatch.setattr(OperationGraph, "plan", counted)
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
    assert not any(by_main for *_, by_main in built)
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
def test_what_waits_for_a_thread_is_built_without_it(host, monkeypatch, compiling, begun):
    threads = []
    plan = OperationGraph.plan
    monkeypatch.setattr(OperationGraph, "plan", lambda self, name: threads.append(current_thread()) or plan(self, name))
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


def test_what_is_listed_when_all_is_dropped_begins_with_nothing(host, monkeypatch, compiling):
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
            if dropped:
                backend.drop()
        wait_for(backend)
        assert bool(backend._compiler._plans) != dropped
        backend.stop()


def test_no_more_plans_are_kept_than_that(host, monkeypatch, compiling):
    monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.compile_ahead._MOST_KEPT", 3)
    backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
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


def wait_for(backend):
    begin = perf_counter()
    while not backend.is_ready(PROBLEM):
        assert perf_counter() - begin < 30
        sleep(0.001)


def fits(backend, size, name, limit_bytes):
    return backend.algorithm(PROBLEM.part(size), name).workspace_bytes <= limit_bytes


def test_what_is_computed_is_divided_and_within_the_limit(host, calls):
    x, w = operands()
    expected = convolution(x, w)
    with enable(host, workspace_limit=3000) as on:
        convolution(x, w)
        calls()
        found, held = host.held_by(lambda: convolution(x, w))
        assert_near(found, expected)
    taken = calls()
    assert [(each.operation, each.batch) for each in taken] == [(0, 4)] * 2 + [(2, 8)] + [(1, 4)] * 2
    assert all(each.workspace for each in taken)
    assert len(host.allocated) == 3, "a workspace for each call, and nothing else"
    assert host.allocated[1] <= 3000 + x.nbytes, "of the filter gradient, before there is the other one"
    assert max(host.allocated[0], host.allocated[2], held) <= 3000
    assert on.report().left == {}


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_a_filter_gradient_has_the_room_of_the_other_gradient(host, last):
    x, w = operands()
    if last:
        x, w = (each.contiguous(memory_format=torch.channels_last) for each in (x, w))
    expected = convolution(x, w)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    with enable(host, workspace_limit=600) as on:
        convolution(x, w)
        for _ in range(2):
            found, held = host.held_by(lambda: convolution(x, w))
            assert_near(found, expected)
            assert held <= 600
        taken = host.allocated[1]
        assert 600 < taken <= 600 + x.nbytes
        (layer,) = [each for each in on.report().layers if each.operation == "BackwardFilter"]
        assert layer.workspace_bytes == 0
        assert layer.spare_bytes == taken
        assert "spare" in str(on.report())
        # Where the other gradient is not wanted, there is no such room, and the limit holds.
        for _ in range(2):
            host.forget()
            alone = torch.ops.aten.convolution_backward.default(found[0].cos(), x, w, None, *rest, [False, True, False])
            torch.testing.assert_close(alone[1], expected[2], rtol=1e-4, atol=1e-5)
        assert host.allocated
        assert max(host.allocated) <= 600
    assert on.report().left == {}


def test_that_room_is_of_each_call_though_kernels_are_shared(host):
    torch.manual_seed(0)
    wide, narrow, w = torch.randn(8, 16, 14, 14), torch.randn(8, 2, 14, 14), torch.randn(2, 16, 3, 3)
    rest = (None, [1, 1], [1, 1], [1, 1])
    mask = [True, True, False]

    def plain():
        return torch.ops.aten.convolution_backward.default(narrow, wide, w, *rest, False, [0, 0], 1, mask)[:2]

    def transposed():
        return torch.ops.aten.convolution_backward.default(wide, narrow, w, *rest, True, [0, 0], 1, mask)[:2]

    with enable(host, workspace_limit=2000):
        for each in (plain, transposed):  # one filter gradient, with another input's gradient after it
            each()
            _, held = host.held_by(each)
            assert held <= 2000


def test_where_that_room_is_not_there_it_takes_less(host):
    x, w = operands()
    expected = convolution(x, w)
    with enable(host, workspace_limit=600) as on:
        convolution(x, w)
        host.forget()
        convolution(x, w)
        host.refused_bytes = refused = host.allocated[1]
        assert refused > 1200
        assert_near(convolution(x, w), expected)
        assert host.refused_bytes == 0
        for _ in range(2):
            host.forget()
            assert_near(convolution(x, w), expected)
            assert max(host.allocated) <= refused // 2, "it was not there once, and is not tried again"
    assert on.report().left == {}


def test_an_output_lends_its_tail(host, calls):
    x, w = operands()
    expected = convolution(x, w)
    with enable(host, workspace_limit=3000) as on:
        convolution(x, w)
        (handle,) = on._interceptor.handles().values()
        entries = [entry for entry in handle._entries.values() if entry.kernel.fresh]
        for entry in entries:
            (name,) = {part.algorithm for part in entry.decision.configuration.parts}
            problem, sizes = entry.kernel.problem, (2, 2, 1, 1, 1, 1)
            needs = [handle.backend.algorithm(problem.part(size), name).workspace_bytes for size in sizes]
            parts = [
                MicroConfiguration(size=size, algorithm=name, time_ms=1.0, workspace_bytes=need)
                for size, need in zip(sizes, needs, strict=True)
            ]
            entry.decide(replace(entry.decision, configuration=Configuration(parts=tuple(parts))))
        for _ in range(2):
            host.forget()
            calls()
            found = convolution(x, w)
            assert_near(found, expected)
            taken = calls()
            for operation, out in ((0, found[0]), (1, found[1])):
                first, *_, last = [each for each in taken if each.operation == operation]
                behind = out[2:]
                assert first.batch == 2
                assert behind.data_ptr() <= first.workspace < behind.data_ptr() + behind.nbytes
                assert not out.data_ptr() <= last.workspace < out.data_ptr() + out.nbytes
            assert max(host.allocated[0], host.allocated[-1]) < max(needs)
    assert len(entries) == 2
    forward, data = (each for each in on.report().layers if each.operation != "BackwardFilter")
    assert forward.spare_bytes > forward.workspace_bytes > 0
    assert data.spare_bytes > data.workspace_bytes > 0
    assert ", spare" in str(on.report())


@pytest.mark.parametrize("refuses", [0, 1], ids=["takes gaps", "refuses gaps"])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_a_volume_that_is_alone_in_its_batch_is_computed_in_slabs(host, stub, refuses, last):
    torch.manual_seed(1)
    module = torch.nn.Conv3d(3, 4, 3, padding=1).double()
    x = torch.randn(1, 3, 16, 6, 5, dtype=torch.float64)
    if last:
        module, x = module.to(memory_format=torch.channels_last_3d), x.to(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    expected = outcome(module, x)
    stub.stub_rows(16)
    stub.stub_refuse_gaps(refuses)
    try:
        sample = x.numel() * x.element_size()
        limit = sample * 3 // 4 if refuses else sample // 3  # copies need room beside the workspace
        with enable(host, workspace_limit=limit, policy="all") as on:
            for _ in range(2):
                host.forget()
                assert_close(outcome(module, x), expected)
            assert max(host.allocated[0], host.allocated[2]) <= limit
            assert host.allocated[1] <= limit + sample
        configurations = [kernel.configuration for kernel in on.report().layers]
        assert on.report().left == {}
        assert any("rows eng1" in each for each in configurations)
    finally:
        stub.stub_rows(0)
        stub.stub_refuse_gaps(0)


def test_each_call_goes_to_the_stream_that_is_current(host, calls):
    x, w = operands()
    with enable(host):
        for stream in (0, 0x40, 0x40, 0x80, 0):
            host.stream = stream
            convolution(x, w)
            assert {each.stream or 0 for each in calls()} == {stream}


@pytest.fixture
def recurring(monkeypatch):
    """Let each lane write the same tensor each time; return what bound calls answered."""
    kept, answers = {}, []
    new, bound = KernelCall.new, BoundKernel.__call__
    monkeypatch.setattr(
        KernelCall, "new", lambda self: kept.get(self) if self in kept else kept.setdefault(self, new(self))
    )
    monkeypatch.setattr(BoundKernel, "__call__", lambda self: answers.append(bound(self)) or answers[-1])
    return answers


def forward(x, w):
    return torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def reference(x, w):
    """Return the output in float64, by no convolution."""
    columns = F.unfold(x.double(), 3, padding=1)
    return (w.double().flatten(1) @ columns).view(len(x), len(w), *x.shape[2:]).float()


@pytest.mark.parametrize("limit", [0, 3000])
def test_what_recurs_is_bound_and_holds_nothing(host, recurring, limit):
    x, w = operands()
    with enable(host, workspace_limit=limit) as on:
        out = forward(x, w)  # planned
        forward(x, w)  # and bound, for it recurs
        host.forget()
        before = host.live_bytes
        for turn in range(1, 4):
            x.normal_()
            w.normal_()
            out.fill_(float("nan"))
            assert forward(x, w) is out
            assert_near([out], [reference(x, w)])
            assert recurring == [True] * turn
            assert host.live_bytes == before, "no workspace is kept"
        assert on.report().calls == 5
        assert len(host.allocated) == (3 if limit else 0), "a workspace for each call, or what the output lends"
    assert on.report().left == {}


def test_a_filter_gradient_with_the_room_of_the_other_gradient_is_bound(host, recurring):
    x, w = operands()
    out, *expected = convolution(x, w)
    grad, rest = out.cos(), (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    with enable(host, workspace_limit=600) as on:
        for turn in range(4):
            host.forget()
            assert_near(torch.ops.aten.convolution_backward.default(grad, x, w, *rest)[:2], expected)
            assert recurring == [True, True] * max(0, turn - 1)
            assert 600 < host.allocated[0] <= 600 + x.nbytes, "of the filter gradient, which comes first"
        assert on.report().calls == 8
    assert on.report().left == {}


def test_what_is_bound_gives_way_elsewhere_and_in_a_capture(host, calls, recurring):
    x, w = operands()
    with enable(host, workspace_limit=3000) as on:
        out = forward(x, w)
        forward(x, w)
        for stream, captures, answer in (
            (0, False, True),
            (0x40, False, False),
            (0x40, False, True),
            (0x40, True, False),
            (0x40, False, True),
            (0, False, False),
        ):
            host.stream, host.captures = stream, captures
            calls()
            out.fill_(float("nan"))
            assert_near([forward(x, w)], [reference(x, w)])
            assert recurring[-1] == answer
            assert {each.stream or 0 for each in calls()} == {stream}
        assert on.report().calls == 8
    assert on.report().left == {}


def test_what_is_bound_gives_way_where_memory_runs_short(host, recurring, caplog):
    x, w = operands()
    with enable(host, workspace_limit="1MiB") as on:
        out = forward(x, w)
        forward(x, w)
        host.most_bytes = 3000
        for answer in (False, True):
            out.fill_(float("nan"))
            assert_near([forward(x, w)], [reference(x, w)])
            assert recurring[-1] == answer
        assert 0 < on.report().workspace_bytes < 3000
    assert caplog.text.count("no room for a workspace") == 1
    assert on.report().left == {}


def test_what_is_bound_and_fails_is_computed_another_way(host, stub, recurring, caplog):
    x, w = operands()
    with enable(host, workspace_limit=3000) as on:
        out = forward(x, w)
        forward(x, w)
        (before,) = on.report().layers
        assert "eng1" in before.configuration
        stub.stub_fail_from(1)  # after the first micro-batch
        try:
            out.fill_(float("nan"))
            assert_near([forward(x, w)], [reference(x, w)])
        finally:
            stub.stub_fail_from(-1)
        for _ in range(2):  # the first plans what is left
            out.fill_(float("nan"))
            assert_near([forward(x, w)], [reference(x, w)])
        assert recurring == [False, True]
        (after,) = on.report().layers
        assert "eng1" not in after.configuration
    assert caplog.text.count("eng1 failed") == 1
    assert on.report().left == {}


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_memory_that_is_less_aligned(host, offset):
    x, w = operands()
    x = torch.cat([torch.zeros(offset), x.flatten()])[offset:].view_as(x)
    expected = convolution(x, w)
    with enable(host) as on:
        assert_near(convolution(x, w), expected)
    assert on.report().left == {}


def test_a_capture_uses_what_was_planned_and_keeps_it(host):
    x, w = operands()
    with enable(host, workspace_limit=3000) as on:
        host.stream, host.captures = 0x40, True
        convolution(x, w)
        assert on.report().left == {IN_CAPTURE: 2}
        host.captures = False
        convolution(x, w)
        host.captures = True
        for one, other in zip(convolution(x, w), convolution(x.double(), w.double()), strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
        assert on.report().calls == 6
    assert on._interceptor in process_overrides._kept


def test_memory_that_runs_short(host, caplog):
    x, w = operands()
    expected = convolution(x, w)
    with enable(host, workspace_limit="1MiB") as on:
        convolution(x, w)
        assert on.report().workspace_bytes == 8 * 672
        host.most_bytes = 3000
        found = convolution(x, w)
        assert on.report().workspace_bytes < 3000
    assert_near(found, expected)
    assert "no room for a workspace" in caplog.text
    assert on.report().left == {}


def test_without_room_to_plan_pytorch_computes(host):
    x, w = operands()
    expected = convolution(x, w)
    host.most_bytes = 100
    with enable(host) as on:
        assert_close(convolution(x, w), expected)
        assert on.report().calls == 0
        host.most_bytes = 1 << 40
        for _ in range(2):
            convolution(x, w)
    assert on.report().calls == 3


def test_an_error_of_pytorchs_while_planning_leaves_the_call_to_pytorch(host, monkeypatch, caplog):
    def fails(*arguments, **options):
        raise RuntimeError("CUDA error: unknown\nof many lines")

    x, w = operands()
    expected = convolution(x, w)
    monkeypatch.setattr(host, "as_tensor", fails)
    with enable(host) as on:
        assert_close(convolution(x, w), expected)
    assert on.report().left == {"RuntimeError: CUDA error: unknown": 2}
    assert "CUDA error: unknown" in caplog.text


@pytest.mark.parametrize("may", [True, False])
def test_the_cache_is_emptied_where_pytorchs_own_benchmarks_would(host, monkeypatch, may):
    emptied = []
    host.cuda.empty_cache = lambda: emptied.append(1)
    monkeypatch.setattr("ucudnn.torch.gpu._may_empty", lambda: may)
    with enable(host):
        convolution(*operands())
    assert bool(emptied) is may


def test_copies_within_the_gpu(host):
    gpu = TorchGpu(0)
    for element in (1, 2, 4, 8):
        source = torch.arange(96 * element, dtype=torch.uint8)
        to = torch.zeros(200 * element, dtype=torch.uint8)
        gpu.copy_runs(to.data_ptr(), 16 * element, source.data_ptr(), 8 * element, 5 * element, 10)
        expected = torch.zeros_like(to)
        for run in range(10):
            expected[16 * element * run :][: 5 * element] = source[8 * element * run :][: 5 * element]
        assert torch.equal(to, expected)
