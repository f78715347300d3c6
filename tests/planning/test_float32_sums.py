"""When parts of a filter gradient of 16 bits are added in float32: where time and workspace allow."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.operands import QUICK, operands, relative
from tests.support.problems import make_problem
from tests.support.reference import reference_convolution
from ucudnn.backends import open_backend
from ucudnn.backends.cpu.bench import CpuBench
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import record, record_requests
from ucudnn.benchmarking.request import MOST_ROUNDINGS
from ucudnn.benchmarking.storage.rows import decode_problem_text, problem_text
from ucudnn.configuration import Configuration, Float32Sum, MicroConfiguration
from ucudnn.errors import InfeasibleError, PlanFileError
from ucudnn.handle import Handle
from ucudnn.kernel import Kernel
from ucudnn.networks.variants import Variant
from ucudnn.planning.decision import decide
from ucudnn.planning.float32_sums import WORTH_ROUNDING, preferred, rounds_often, summed
from ucudnn.planning.replanning import Replanner
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType, Layout, Operation
from ucudnn.settings import Settings
from ucudnn.slabs import row_count, slabs_by_problem

BATCH = 256
CALL_MS = 0.02
SUM = Float32Sum(size_bytes=1000, time_ms=1.0)


def gradient(**fields):
    return make_problem(operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, **{"batch": BATCH} | fields)


class Known(CountingBackend):
    """LARGE needs 100 bytes for each sample; SMALL needs none. Their milliseconds are known."""

    def __init__(self, large_ms, small_ms, slower=1.0, total=SUM):
        given = {"LARGE": (100, large_ms), "SMALL": (0, small_ms)}
        rates = {name: each for name, each in given.items() if each[1]}
        super().__init__({name: size for name, (size, _) in rates.items()})
        self._ms = {name: (CALL_MS, ms) for name, (_, ms) in rates.items()}
        self._slower = slower  # how many times as long the parts of a sum take
        self._total = total

    def float32_sum(self, problem):
        return self._total if problem.is_rounded_gradient else None

    def measure(self, size, algorithm, *rest, **options):
        factor = self._slower if self.problem.float32_sum else 1.0
        self.times = {name: (call * factor, each * factor) for name, (call, each) in self._ms.items()}
        return super().measure(size, algorithm, *rest, **options)


def decided(backend, *, problem=None, **limits):
    problem = problem or gradient()
    settings = Settings(policy=BatchSizePolicy.POWER_OF_TWO, **limits)
    (one,) = decide([Kernel(layer="conv", problem=problem)], Benchmark(backend), settings).kernels
    return one.configuration


def test_a_divided_filter_gradient_is_summed_in_float32_where_that_fits():
    found = decided(Known(0.1, 10), workspace_limit_bytes=1000 + 100 * 4)
    assert str(found) == "64x4 LARGE, summed in float32"
    assert found.workspace_bytes == 1400
    assert found.time_ms == pytest.approx(0.1 * BATCH + 64 * CALL_MS + 1.0)


def test_a_sum_may_have_more_parts_than_may_round():
    found = decided(Known(0.5, 10), workspace_limit_bytes=1000 + 100)
    assert str(found) == "256x1 LARGE, summed in float32"
    assert BATCH > MOST_ROUNDINGS
    many = Known(0.5, None, total=Float32Sum(size_bytes=100, time_ms=1.0))
    assert str(decided(many, workspace_limit_bytes=200)) == "256x1 LARGE, summed in float32"
    with pytest.raises(InfeasibleError, match="at least 200 bytes are needed"):
        decided(many, workspace_limit_bytes=199)
    with pytest.raises(InfeasibleError, match="at least 800 bytes are needed"):
        decided(Known(0.5, None, total=None), workspace_limit_bytes=799)


@pytest.mark.parametrize("limit", [800, 999])
def test_a_sum_that_does_not_fit_leaves_parts_that_round_a_limited_number_of_times(limit):
    found = decided(Known(0.1, 10), workspace_limit_bytes=limit)
    assert str(found) == "32x8 LARGE"
    assert found.workspace_bytes <= limit
    assert found.calls <= MOST_ROUNDINGS


@pytest.mark.parametrize(
    ("slower", "text"),
    [(1.0, "64x4 LARGE, summed in float32"), (1.03, "64x4 LARGE, summed in float32"), (1.2, "32x8 LARGE")],
)
def test_repeated_rounding_must_buy_a_tenth_of_the_time(slower, text):
    assert str(decided(Known(0.1, 10, slower), workspace_limit_bytes=1400)) == text


def test_an_undivided_kernel_that_is_about_as_fast_rounds_once_too():
    assert str(decided(Known(0.1, 0.105), workspace_limit_bytes=1200)) == "1x256 SMALL"
    assert str(decided(Known(0.1, 0.105, total=None), workspace_limit_bytes=1200)) == "32x8 LARGE"


def test_nothing_more_is_measured_if_the_undivided_kernel_is_the_fastest():
    backend = Known(0.1, 0.2)
    assert str(decided(backend, workspace_limit_bytes=1 << 20)) == "1x256 LARGE"
    assert not any(problem.float32_sum for problem, _ in backend.measured)


@pytest.mark.parametrize("other", [{"operation": Operation.FORWARD}, {"dtype": DataType.FLOAT32}])
def test_other_problems_have_no_sum(other):
    found = decided(Known(0.1, 10), problem=make_problem(batch=BATCH, **other), workspace_limit_bytes=1400)
    assert found.float32_sum is None
    assert found.calls > 1


@pytest.mark.parametrize(("total", "sums"), [(1_000, 0), (5_000, 4), (20_000, 4)])
def test_a_division_counts_the_sums_of_its_kernels(total, sums):
    kernels = [Kernel(layer=f"conv{index}", problem=gradient(channels=2 * index + 2)) for index in range(4)]
    settings = Settings(policy=BatchSizePolicy.POWER_OF_TWO, total_workspace_bytes=total)
    found = decide(kernels, Benchmark(Known(0.1, 0.2)), settings)
    assert sum(each.workspace_bytes for each in found.kernels) <= total
    for each in found.kernels:
        assert each.segment.size_bytes >= each.configuration.workspace_bytes
        assert each.configuration.float32_sum is not None or each.configuration.calls <= MOST_ROUNDINGS
    assert sum(each.configuration.float32_sum is not None for each in found.kernels) == sums


def test_a_division_rounds_often_if_that_buys_a_tenth_of_the_time():
    kernels = [Kernel(layer=f"conv{index}", problem=gradient(channels=2 * index + 2)) for index in range(4)]
    settings = Settings(policy=BatchSizePolicy.POWER_OF_TWO, total_workspace_bytes=5_000)
    found = decide(kernels, Benchmark(Known(0.1, 10, 1.2)), settings)
    assert all(rounds_often(each.configuration) for each in found.kernels)
    assert all(each.configuration.calls <= MOST_ROUNDINGS for each in found.kernels)


def test_a_kernel_that_is_decided_again_has_a_sum_unless_ranks_would_wait_for_its_measurement(monkeypatch):
    settings = Settings(policy=BatchSizePolicy.POWER_OF_TWO, workspace_limit_bytes=1400)
    replanner = Replanner(Benchmark(Known(0.1, 10)), settings)
    kernel = Kernel(layer="conv", problem=gradient())
    assert str(replanner.decide(kernel, 1400).configuration) == "64x4 LARGE, summed in float32"
    monkeypatch.setattr(Benchmark, "collective", True)
    assert str(replanner.decide(kernel, 1400).configuration) == "32x8 LARGE"


@pytest.mark.parametrize("limit", [1400, 1700])
def test_heuristic_mode_sums_in_float32_too(limit):
    found = decided(Known(0.1, None), problem=gradient(deterministic=True), workspace_limit_bytes=limit)
    assert found.float32_sum == SUM
    assert found.workspace_bytes <= limit
    assert (
        decided(Known(0.1, None), problem=gradient(deterministic=True), workspace_limit_bytes=999).float32_sum is None
    )


def configurations(rounding):
    """Draw configurations: whole ones, and divided ones with or without a sum."""
    made = st.builds(
        lambda time, size, parts: Configuration(
            parts=(MicroConfiguration(size=8 // parts, algorithm="a", time_ms=time / parts, workspace_bytes=size),)
            * parts,
            float32_sum=None if rounding else Float32Sum(size_bytes=5, time_ms=0.25),
        ),
        st.integers(1, 40),
        st.integers(0, 30),
        st.sampled_from([2, 4, 8] if not rounding else [1, 2, 4]),
    )
    return st.lists(made, max_size=6)


@given(configurations(True), configurations(False), st.none() | st.integers(0, 40))
def test_what_rounds_often_is_much_faster_than_all_that_round_once(known, sums, limit):
    if limit is not None:
        known, sums = ([each for each in given if each.workspace_bytes <= limit] for given in (known, sums))
    front = preferred(known, sums, limit)
    assert bool(front) == bool([*known, *sums])
    assert all(one.workspace_bytes < other.workspace_bytes for one, other in pairwise(front))
    assert all(one.time_ms > other.time_ms for one, other in pairwise(front))
    once = [each for each in [*known, *sums] if not rounds_often(each)]
    for each in front:
        room = each.workspace_bytes if limit is None else limit
        rivals = [other.time_ms for other in once if other.workspace_bytes <= room]
        assert not rounds_often(each) or all(each.time_ms < WORTH_ROUNDING * other for other in rivals)
    for other in once:  # what rounds once is left out only for what is as good in all
        assert any(each.workspace_bytes <= other.workspace_bytes and each.time_ms <= other.time_ms for each in front)


def limit_for_sums(problem):
    """Return a workspace in which only a sum fits, of more parts than may round; so no time decides."""
    cpu = open_backend("cpu")
    rounding = min(each.workspace_bytes for each in cpu.algorithms(problem.part(BATCH // MOST_ROUNDINGS)))
    least = min(each.workspace_bytes for each in cpu.algorithms(summed(problem).part(1)))
    assert cpu.float32_sum(problem).size_bytes + least < rounding
    return rounding - 1


def convolved_in_parts(problem, pattern, **limits):
    """Check that a sum of more parts than may round has the error of the undivided kernel; return what repeats it."""
    x, w, y = operands(problem)
    last = problem.layout is Layout.NHWC
    exact = reference_convolution(
        replace(problem, layout=Layout.NCHW, x_batch_stride=0, y_batch_stride=0),
        *(np.moveaxis(each, -1, 1) if last else each for each in map(np.float64, (x, w * 0, y))),
    )
    exact = np.moveaxis(exact, 1, -1) if last else exact
    whole, found = np.full_like(w, np.nan), np.full_like(w, np.nan)
    Handle(backend="cpu", workspace_limit="1GiB", policy="undivided", effort=QUICK).convolve(problem, x, whole, y)
    handle = Handle(backend="cpu", effort=QUICK, policy="all", **limits)
    handle.convolve(problem, x, found, y)
    (kernel,) = handle.report().kernels
    assert kernel.configuration.endswith(", summed in float32")
    assert sum(map(int, re.findall(pattern, kernel.configuration))) > MOST_ROUNDINGS
    assert handle.workspace_bytes <= max(limits.values())
    assert relative(found, exact) <= 1.1 * relative(whole, exact)
    return handle, (x, found, y)


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("limited", ["workspace_limit", "total_workspace"])
def test_a_handle_keeps_the_error_of_the_undivided_kernel_in_many_parts(layout, limited):
    problem = gradient(channels=8, groups=1, layout=layout)
    handle, (x, found, y) = convolved_in_parts(problem, r"(\d+)x\d+ ", **{limited: limit_for_sums(problem)})
    assert "summed in float32" in str(handle.report())
    before = found.astype(np.float64)
    handle.convolve(problem, x, found, y, alpha=-1.0, beta=1.0)  # what the user accumulates
    assert np.abs(found).max() <= 2.0**-10 * np.abs(before).max()


def test_one_sample_is_summed_in_more_slabs_than_may_round():
    problem = gradient(batch=1, channels=8, groups=1, spatial=(150, 6))
    cpu, count = open_backend("cpu"), row_count(problem)

    def least(asked, slabs):
        pieces = [piece for piece, _ in slabs_by_problem(asked, -(-count // slabs))]
        return max(min(each.workspace_bytes for each in cpu.algorithms(piece)) for piece in pieces)

    limit = least(problem, MOST_ROUNDINGS) - 1  # so that no time decides
    assert cpu.float32_sum(problem).size_bytes + least(summed(problem), count) <= limit
    convolved_in_parts(problem, r"(\d+)x\d+ rows", workspace_limit=limit)


def test_a_database_has_rows_of_both_ways(tmp_path, monkeypatch):
    problem = gradient(channels=8, groups=1)
    given_limits = {"workspace_limit": limit_for_sums(problem), "database": str(tmp_path / "times.db")}
    x, w, y = operands(problem)
    first = Handle(backend="cpu", effort=QUICK, **given_limits)
    first.convolve(problem, x, w, y)
    monkeypatch.setattr(CpuBench, "measure", lambda *arguments, **options: pytest.fail("it is measured again"))
    again = Handle(backend="cpu", effort=QUICK, **given_limits)
    again.convolve(problem, x, w, y)
    (before,), (after,) = first.report().kernels, again.report().kernels
    assert after.configuration == before.configuration
    assert after.configuration.endswith("summed in float32")
    assert decode_problem_text(problem_text(summed(problem))) == summed(problem) != problem
    assert decode_problem_text(problem_text(problem)) == problem


@pytest.fixture
def saved(tmp_path):
    """Return a file with the plan of a problem that is summed in float32, what it computed, and how it was made."""
    problem = gradient(channels=8, groups=1)
    tensors = operands(problem)
    options = {"backend": "cpu", "workspace_limit": limit_for_sums(problem), "effort": QUICK}
    made = Handle(**options)
    made.convolve(problem, *tensors)
    made.save_plans(tmp_path / "plans.json")
    return tmp_path / "plans.json", problem, tensors, options, made.report().kernels[0].configuration


def test_saved_plans_keep_their_sums(saved):
    path, problem, (x, w, y), options, configuration = saved
    first = w.copy()
    loaded = Handle(**options)
    loaded.load_plans(path)
    w.fill(np.nan)
    loaded.convolve(problem, x, w, y)
    assert (w == first).all()
    (report,) = loaded.report().kernels
    assert (report.origin, report.configuration) == ("file", configuration)
    assert report.configuration.endswith("summed in float32")


@pytest.mark.parametrize(
    ("text", "to", "message"),
    [
        ('"float32_sum":[', '"float32_sum":[64,', "is damaged"),
        ('"float32_sum":[', '"float32_sum":[0', "damaged|is no whole number|has a float32 sum of"),
        ('"dtype":"float16"', '"dtype":"float32"', "has no float32 sum"),
    ],
)
def test_a_damaged_sum_is_refused(saved, text, to, message):
    path, *_ = saved
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, to))
    with pytest.raises(PlanFileError, match=message):
        Handle(backend="cpu", effort=QUICK).load_plans(path)


def test_a_recorded_profile_has_the_parts_of_sums():
    backend = open_backend("cpu")
    kernels = [Kernel(layer="conv", problem=gradient(batch=8))]

    class One:
        def kernels(self):
            return kernels

    requests = record_requests(One(), [Variant(dtype=DataType.FLOAT16)], BatchSizePolicy.POWER_OF_TWO, backend=backend)
    profile = record("one", requests, Benchmark(backend, effort=QUICK))
    recorded = {problem for problem in profile.recordings["one"] if problem.float32_sum}
    assert {problem.batch for problem in recorded} >= {1, 2, 4}
    timed = {  # measured times would decide
        part: tuple(replace(each, time_ms=float(part.batch)) for each in found)
        for part, found in profile.recordings["one"].items()
    }
    replay = ReplayBackend(replace(profile, recordings={"one": timed}))
    total = replay.float32_sum(gradient(batch=8))
    assert total.size_bytes % 256 == 0
    assert replay.float32_sum(make_problem(batch=8)) is None
    need = total.size_bytes + min(each.workspace_bytes for each in replay.algorithms(summed(gradient(batch=8)).part(2)))
    (one,) = decide(kernels, Benchmark(replay), Settings(workspace_limit_bytes=need)).kernels
    assert one.configuration.float32_sum == total
    assert one.configuration.calls > 1
    assert one.configuration.workspace_bytes <= need
