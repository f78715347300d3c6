"""The cost of one measurement, on a simulated host and GPU with their own clocks."""

from dataclasses import replace
from itertools import chain, cycle, repeat
from weakref import ref

import pytest

from tests.support.machine import Machine
from tests.support.problems import make_problem
from ucudnn.backends.cudnn.bench import bench as benches
from ucudnn.backends.cudnn.bench import call_timer
from ucudnn.backends.cudnn.bench.bench import CudnnBench
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.errors import BackendError
from ucudnn.profiles.measurement import Algorithm, Effort, MeasurementStatus
from ucudnn.slabs import pieces_of

PROBLEM = make_problem(batch=8)


class Gpu(Machine):
    """A machine whose algorithms take some milliseconds for each sample, and some to build."""

    failures = (BackendError,)
    workspace_bytes = 0

    def __init__(self, rates, build_ms=0.0, host_ms=0.02):
        super().__init__(cycle([host_ms] if isinstance(host_ms, float) else host_ms), 0.0)
        self.rates = rates
        self.build_ms = build_ms
        self.announced = []
        self.built = []
        self.launched = []

    def fill(self, buffer, dtype, seed):
        pass

    def release(self):
        pass

    def build(self, part, name):
        self.announced.append((part.batch, name))

    def prepare(self, part, algorithm):
        self.built.append((part.batch, algorithm.name))
        self.now += self.build_ms
        if algorithm.name == "BROKEN":
            raise BackendError("no plan")
        return Prepared(self, part, algorithm.name)


class Prepared:
    workspace_bytes = 0

    def __init__(self, gpu, part, name):
        self.gpu, self.part, self.name = gpu, part, name

    def bind(self, x, w, y, workspace, offset, scaling):
        def launch():
            self.gpu.launched.append((self.part.batch, self.name))
            self.gpu.gpu_ms = self.gpu.rates[self.name] * self.part.batch
            self.gpu.launch(x, w, y, None, offset)

        return launch


def algorithm(name, api="graph", **options):
    return Algorithm(name=name, workspace_bytes=0, api=api, **options)


@pytest.fixture
def opened(monkeypatch):
    def open_bench(*arguments, known=(), **options):
        gpu = Gpu(*arguments, **options)
        for module in (benches, call_timer):
            monkeypatch.setattr(module, "perf_counter", lambda: gpu.now / 1e3)
        bench = CudnnBench(PROBLEM, gpu, lambda size: DeviceBuffer(256, size), gpu.prepare, None, 0, gpu.build)
        bench._check = lambda *arguments, **options: None  # these algorithms compute nothing
        for name in known:
            bench.measure(8, algorithm(name), Effort())
        return gpu, bench

    return open_bench


def test_an_algorithm_that_is_too_slow_is_launched_once(opened):
    gpu, bench = opened({"FAST": 0.1, "SLOW": 10.0})
    assert bench.measure(4, algorithm("FAST"), Effort()).complete
    gpu.launched.clear()
    found = bench.measure(4, algorithm("SLOW"), Effort(), worth_ms=0.4)
    assert gpu.launched == [(4, "SLOW")]
    assert not found.complete
    assert 0.4 < found.time_ms <= 40.0


@pytest.mark.parametrize("first", [True, False])
def test_a_legacy_call_takes_at_least_the_hosts_time(opened, first):
    stalls = [0.08] * 40 + [9.0]  # of another thread, from time to time
    _, bench = opened({"SHORT": 0.005, "LONG": 0.05}, host_ms=stalls)
    for name in [] if first else ["SHORT", "LONG"]:
        assert bench.measure(8, algorithm(name), Effort()).complete
    for name, size, graph_ms, legacy_ms in (("SHORT", 4, 0.02, 0.08), ("LONG", 4, 0.2, 0.2), ("LONG", 1, 0.05, 0.08)):
        for api, time_ms in (("legacy", legacy_ms), ("graph", graph_ms)):
            found = bench.measure(size, algorithm(name, api), Effort())
            assert found.complete
            assert found.time_ms == pytest.approx(time_ms)
    assert not bench.measure(4, algorithm("SHORT", "legacy"), Effort(), worth_ms=0.04).complete


def test_one_sample_of_a_legacy_call_has_the_hosts_time_too(opened):
    gpu, bench = opened({"SHORT": 0.005}, host_ms=0.08)
    for api, time_ms in (("graph", 0.01), ("legacy", 0.08)):
        assert bench.measure(8, algorithm("SHORT", api), Effort()).complete
        gpu.launched.clear()
        found = bench.measure(2, algorithm("SHORT", api), Effort(repeats=1))
        assert (found.samples, found.time_ms) == (1, pytest.approx(time_ms))
        assert gpu.launched[0] == (2, "SHORT")


def test_one_launch_after_a_pause_does_not_count(opened):
    gpu, bench = opened({"FAST": 0.1, "SLOW": 10.0})
    assert not bench.measure(4, algorithm("SLOW"), Effort(), worth_ms=0.4).complete
    assert len(gpu.launched) > 2, "clocks may be low, and are waited for"
    bench.measure(4, algorithm("FAST"), Effort())
    gpu.now += 1000.0
    gpu.launched.clear()
    other = algorithm("FAST")
    bench.measure(2, other, Effort())
    assert gpu.launched.count((2, "FAST")) > 6


def test_building_the_next_plan_costs_a_measurement_no_time(opened):
    gpu, bench = opened({"FAST": 0.1, "OTHER": 0.1}, build_ms=200.0)
    effort = Effort(time_limit_ms=50.0)
    bench.measure(8, algorithm("FAST"), effort)
    bench.look_ahead(lambda: (2, algorithm("OTHER")))
    found = bench.measure(4, algorithm("FAST"), effort)
    assert found.samples >= effort.repeats
    assert gpu.built == [(8, "FAST"), (4, "FAST"), (2, "OTHER")]
    bench.measure(2, algorithm("OTHER"), effort)
    assert gpu.built[3:] == [], "it was built before"


def test_the_gpu_does_not_wait_for_plans_of_slow_algorithms(opened):
    rates = {"FAST": 0.1, **{f"SLOW{index}": 1.0 for index in range(20)}}
    gpu, bench = opened(rates, build_ms=3.0)
    bench.measure(4, algorithm("FAST"), Effort())
    begin, slow = gpu.now, [algorithm(name) for name in rates if name != "FAST"]
    for index, each in enumerate(slow):
        bench.look_ahead(lambda index=index: (4, slow[index + 1]) if index + 1 < len(slow) else None)
        assert not bench.measure(4, each, Effort(), worth_ms=0.4).complete
    assert gpu.now - begin < 20 * 4.0 + 3.0 + 1.0, "the GPU's time of 20 launches, and one plan"
    assert gpu.launched[-20:] == [(4, each.name) for each in slow]


def test_a_measurement_begun_ahead_has_the_same_time(opened):
    gpu, bench = opened({"FAST": 0.01, "OTHER": 0.03, "SLOW": 2.0})
    for name in gpu.rates:
        bench.measure(8, algorithm(name), Effort())
    for name, time_ms in (("FAST", 0.04), ("OTHER", 0.12), ("SLOW", 8.0)):
        bench.look_ahead(lambda name=name: (4, algorithm(name)))
        bench.measure(2, algorithm("FAST"), Effort())
        found = bench.measure(4, algorithm(name), Effort())
        assert found.complete
        assert (found.time_ms, found.spread_ms) == pytest.approx((time_ms, 0), abs=1e-9)


def test_a_measurement_begun_ahead_costs_the_current_one_no_time(opened):
    _, bench = opened({"FAST": 0.1, "OTHER": 0.1, "SLOW": 20.0}, known=["FAST"])
    for name in ("OTHER", "FAST"):  # for the first time, and known from another size
        bench.look_ahead(lambda: (4, algorithm("SLOW")))
        found = bench.measure(4, algorithm(name), Effort())
        assert found.samples == Effort().repeats
        assert (found.time_ms, found.spread_ms) == pytest.approx((0.4, 0), abs=1e-9)
        bench._give_up(bench._ahead)


def test_a_host_that_is_slow_once_spoils_no_sample(opened):
    gpu, bench = opened({"FAST": 0.1, "OTHER": 0.1}, known=["FAST"])
    bench.measure(8, algorithm("OTHER"), Effort())
    gpu.late_ms = chain([7.0], repeat(0.0))  # between what is timed and the second event
    found = bench.measure(4, algorithm("OTHER"), Effort())
    assert (found.time_ms, found.spread_ms) == pytest.approx((0.4, 0), abs=1e-9)


def worthless_with(bench, ahead):
    """Measure an algorithm that is too slow after one launch, so that nothing follows the calls begun ahead."""
    bench.look_ahead(lambda: ahead)
    found = bench.measure(4, algorithm("OTHER"), Effort(), worth_ms=0.01)
    assert not found.complete
    assert bench._ahead is not None


@pytest.mark.parametrize("end", ["measure", "close"])
def test_calls_begun_in_vain_are_waited_for(opened, end):
    gpu, bench = opened({"FAST": 0.1, "OTHER": 1.0, "SLOW": 50.0}, known=["FAST"])
    worthless_with(bench, (4, algorithm("SLOW")))
    assert gpu.launched[-1] == (4, "SLOW")
    assert gpu.now < gpu.done
    end_of_it = gpu.done
    if end == "close":
        bench.close()
    else:
        bench._begun(2, pieces_of(PROBLEM, 2, ()), algorithm("FAST"), Effort())
    assert bench._ahead is None
    assert gpu.now >= end_of_it, "what it uses must outlast it"


def test_a_larger_workspace_takes_the_place_of_the_smaller_one(opened):
    _, bench = opened({"FAST": 0.1, "OTHER": 0.1, "LARGER": 0.1})
    there = []

    class Memory:
        pass

    def allocate(size_bytes):
        memory = Memory()
        assert all(other() is None for other in there), "two of them are held at once"
        there.append(ref(memory))
        return DeviceBuffer(256, size_bytes, memory)

    bench._allocate = allocate
    bench.measure(8, replace(algorithm("FAST"), workspace_bytes=256), Effort())
    bench.look_ahead(lambda: (4, replace(algorithm("OTHER"), workspace_bytes=256)))
    bench.measure(8, replace(algorithm("FAST"), workspace_bytes=256), Effort())
    assert bench._ahead is not None
    assert bench.measure(8, replace(algorithm("LARGER"), workspace_bytes=512), Effort()).complete
    assert len(there) == 2


def test_an_announced_algorithm_is_built_at_its_size(opened):
    gpu, bench = opened({"FAST": 0.1})
    bench.announce(4, algorithm("FAST", compiles=True))
    assert gpu.announced == [(4, "FAST")]
    assert gpu.built == gpu.launched == []


def test_an_algorithm_that_needs_more_workspace_is_not_begun_ahead(opened):
    gpu, bench = opened({"FAST": 0.1, "OTHER": 0.1})
    larger = replace(algorithm("OTHER"), workspace_bytes=1024)
    bench.look_ahead(lambda: (4, larger))
    bench.measure(8, algorithm("FAST"), Effort())
    assert gpu.built == [(8, "FAST")], "the workspace there is in use"
    assert bench.measure(4, larger, Effort()).complete


def test_a_measurement_begun_ahead_is_used_for_no_other(opened):
    gpu, bench = opened({"FAST": 0.1, "OTHER": 0.1})
    for announced, measured in (((2, "FAST"), (4, "FAST")), ((2, "OTHER"), (2, "FAST"))):
        bench.look_ahead(lambda announced=announced: (announced[0], algorithm(announced[1])))
        bench.measure(8, algorithm("FAST"), Effort())
        gpu.launched.clear()
        bench.measure(measured[0], algorithm(measured[1]), Effort())
        assert set(gpu.launched) == {measured}


def test_an_algorithm_that_cannot_be_prepared_fails_at_its_own_measurement(opened):
    gpu, bench = opened({"FAST": 0.1})
    bench.look_ahead(lambda: (4, algorithm("BROKEN")))
    assert bench.measure(8, algorithm("FAST"), Effort()).status is MeasurementStatus.MEASURED
    assert bench.measure(4, algorithm("BROKEN"), Effort()).status is MeasurementStatus.FAILED
    bench.look_ahead(lambda: (9, algorithm("FAST")))
    assert bench.measure(8, algorithm("FAST"), Effort()).status is MeasurementStatus.MEASURED
    bench.look_ahead(lambda: (4, algorithm("OTHER", compiles=True)))
    gpu.built.clear()
    bench.measure(8, algorithm("FAST"), Effort())
    assert gpu.built == [(8, "FAST")], "a compiler is not waited for"


def test_a_closed_bench_keeps_no_memory(opened):
    _, bench = opened({"FAST": 0.1, "OTHER": 1.0}, known=["FAST"])
    worthless_with(bench, (4, algorithm("FAST")))
    bench.look_ahead(lambda: None)
    bench.close()
    assert bench._ahead is None
    assert bench._following is None


def test_an_error_of_the_gpu_may_come_from_the_measurement_begun_ahead(opened):
    gpu, bench = opened({"FAST": 0.1, "OTHER": 0.1})
    gpu.failures = (BackendError, ArithmeticError)
    bench.measure(8, algorithm("FAST"), Effort())

    def fail(*arguments, **options):
        raise ArithmeticError("a fault")

    for ahead, status in ((True, MeasurementStatus.HINDERED), (False, MeasurementStatus.FAILED)):
        bench.look_ahead(lambda ahead=ahead: (4, algorithm("OTHER")) if ahead else None)
        bench._check = fail
        assert bench.measure(8, algorithm("FAST"), Effort()).status is status
        bench._give_up(bench._ahead)
