"""bench.peers.compare on NumPy: several calls complete a file; a way that is absent or fails spares the others."""

import json
import sys

import pytest

from bench.peers import compare, pytorch, table, ways
from bench.peers import run as peers_run
from tests.support.problems import make_problem
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cpu import backend
from ucudnn.backends.cpu.backend import CPU_ALGORITHMS, CpuBackend
from ucudnn.errors import BackendError, InfeasibleError
from ucudnn.execution.plan import make_plan
from ucudnn.kernel import Kernel
from ucudnn.problem import MathMode

LAYER = """\
source,W,H,C_in,N,C_out,kernel_w,kernel_h,pad_w,pad_h,stride_w,stride_h
conv,9,7,3,4,5,3,5,1,2,2,1
"""
OPERATIONS = 3
WITH_WORKSPACE = {name: each for name, each in CPU_ALGORITHMS.items() if name != "IMPLICIT_GEMM"}


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Return a function that runs the script: it returns success, rows by way and limit, output and progress."""
    network = tmp_path / "tiny.csv"
    network.write_text(LAYER)
    out = tmp_path / "peers.json"

    def run(*options):
        files = ["--database", str(tmp_path / "times.db"), "--out", str(out)]
        monkeypatch.setattr(
            sys, "argv", ["compare", str(network), "--backend", "cpu", "--repeats", "1", *files, *options]
        )
        well = compare.main()
        rows = json.loads(out.read_text())["rows"]
        return well, {(row["way"], row["limit_bytes"]): row for row in rows}, *capsys.readouterr()

    return run


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("no_torch")
def test_several_calls_complete_the_file(call):
    well, rows, printed, _ = call("--limit", "0", "--limit", "none", "--check")
    assert well
    assert set(rows) == {(way, limit) for way in compare.WAYS for limit in (0, None)}
    for (way, limit), row in rows.items():
        if way == "PyTorch":
            assert "PyTorch cannot be used" in row["absent"]
            continue
        assert row["executed_ms"] > 0
        assert row["predicted_ms"] is None if way == "cuDNN heuristics" else row["predicted_ms"] > 0
        least, most = row["range_ms"]
        assert 0 < least <= row["executed_ms"] <= most  # one round: the median is the only sample
        unlimited = limit is None and way != "cuDNN heuristics"  # on NumPy, those begin with IMPLICIT_GEMM
        assert row["workspace_bytes"] > 0 if unlimited else row["workspace_bytes"] == 0
        assert row["over_graph"] == pytest.approx(rows["cuDNN graph", limit]["executed_ms"] / row["executed_ms"])
        assert row["distance"] < 1e-5
    assert f"tiny 4 float32-tf32-first None cuDNN graph {rows['cuDNN graph', None]['executed_ms']}" in printed
    before = rows
    _, rows, again, progress = call("--limit", "none")
    assert (rows, again) == (before, "")
    assert "done before" in progress
    _, rows, _, progress = call("--limit", "none", "--limit", "8KiB", "--seconds", "0", "--variant", "float32-fma-last")
    assert rows == before
    assert "time is up" in progress
    _, rows, _, _ = call("--limit", "8KiB", "--way", "original u-cudnn", "--way", "cuDNN graph")
    assert set(rows) == {*before, ("cuDNN graph", 8192), ("original μ-cuDNN", 8192)}
    _, rows, _, progress = call("--limit", "1KiB", "--limit", "16KiB", "--seconds", "0.0001", "--way", "cuDNN graph")
    assert set(rows) >= {("cuDNN graph", 8192)}
    assert "time is up" in progress


@pytest.mark.usefixtures("no_torch")
def test_a_way_that_nothing_computes_within_a_limit_is_absent(call, monkeypatch):
    monkeypatch.setattr(backend, "CPU_ALGORITHMS", WITH_WORKSPACE)
    well, rows, _, _ = call("--limit", "0", "--limit", "none")
    assert well
    assert all("executed_ms" in row for (way, limit), row in rows.items() if limit is None and way != "PyTorch")
    for way, limit in rows:
        if limit == 0 and way != "PyTorch":
            reason = "no algorithm fits a workspace limit of 0 bytes"
            if way == "cuDNN heuristics":
                reason = "heuristics offer nothing within 0"
            assert f"conv:1 (Forward): {reason}" in rows[way, limit]["absent"]


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("error", [MemoryError("full"), RuntimeError("broken")])
def test_a_failure_spares_the_others_and_is_tried_again(call, monkeypatch, error):
    make_plan = peers_run.make_plan

    def fail(problem, configuration, backend):
        if len(configuration.parts) > 1:
            raise error
        return make_plan(problem, configuration, backend)

    limit = "8KiB"  # GEMM of a few samples fits, of all does not
    # Without a limit, powerOfTwo divides where it measures that to be faster, and undivided never does.
    options = ("--limit", "none", "--limit", limit, "--way", "ucudnn powerOfTwo", "--way", "ucudnn undivided")
    with monkeypatch.context() as patch:
        patch.setattr(peers_run, "make_plan", fail)
        patch.setattr(backend, "CPU_ALGORITHMS", WITH_WORKSPACE)
        well, rows, _, progress = call(*options)
        assert not well
        assert str(error) in rows["ucudnn powerOfTwo", 8192]["failed"]
        assert "conv:1" in rows["ucudnn powerOfTwo", 8192]["failed"]
        assert rows["ucudnn undivided", None]["executed_ms"] > 0
        assert "ucudnn powerOfTwo failed" in progress
    well, rows, _, progress = call(*options[:-2])
    assert well
    assert "done before" not in progress
    assert rows["ucudnn powerOfTwo", None]["executed_ms"] > 0
    assert rows["ucudnn powerOfTwo", 8192]["executed_ms"] > 0
    measured = rows["ucudnn undivided", None]
    monkeypatch.setattr(peers_run, "make_plan", lambda *_: (_ for _ in ()).throw(error))
    well, rows, _, _ = call(*options, "--again")
    assert not well
    assert rows["ucudnn undivided", None] == measured


def test_rows_of_another_machine_are_kept_apart():
    answer = {"conditions": [], "rows": []}
    row = {"network": "a", "batch": 1, "variant": "v", "limit_bytes": None, "executed_ms": 2.0}
    here, there = {"device": "here", "driver": "1"}, {"device": "there", "driver": "1"}
    table.merge(answer, [{**row, "way": "cuDNN graph"}], here)
    table.merge(answer, [{**row, "way": "PyTorch", "executed_ms": 1.0}], there)
    assert [each["over_graph"] for each in answer["rows"]] == [1.0, None]
    table.merge(answer, [{**row, "way": "PyTorch", "executed_ms": 1.0}], {**here, "driver": "2"})
    assert [each["over_graph"] for each in answer["rows"]] == [1.0, 2.0]
    key = table.key_of(answer["rows"][1])
    assert table.is_done(answer, key, here, check=False)
    assert not table.is_done(answer, key, here, check=True)
    assert not table.is_done(answer, key, there, check=False)


def test_heuristics_give_the_first_algorithm_that_fits_and_can_be_prepared(monkeypatch):
    backend = CpuBackend()
    kernel = Kernel(layer="conv", problem=make_problem())
    offered = backend.algorithms(kernel.problem)
    assert len({each.workspace_bytes for each in offered}) > 2
    least, most = (pick(each.workspace_bytes for each in offered) for pick in (min, max))

    def first(limit):
        ((same, configuration),) = ways.offered_first([kernel], backend, limit)
        assert same is kernel
        assert [part.size for part in configuration.parts] == [kernel.problem.batch]
        return configuration.parts[0].algorithm

    assert first(most) == offered[0].name
    for limit in {each.workspace_bytes for each in offered}:
        assert first(limit) == next(each.name for each in offered if each.workspace_bytes <= limit)

    def broken(problem, configuration, backend):
        if configuration.parts[0].algorithm == offered[0].name:
            raise BackendError("no plan")
        return make_plan(problem, configuration, backend)

    monkeypatch.setattr(ways, "make_plan", broken)
    assert first(most) == offered[1].name
    with pytest.raises(InfeasibleError, match=r"conv \(Forward\): heuristics offer nothing within") as caught:
        first(least - 1)
    assert caught.value.required_bytes == least


def test_the_range_is_that_of_whole_rounds():
    kernels = [Kernel(layer="a", problem=make_problem(), count=2), Kernel(layer="b", problem=make_problem())]
    samples = ([1.0, 2.0, 3.0], [30.0, 20.0])
    found = [(kernel, peers_run.Outcome(samples_ms=each)) for kernel, each in zip(kernels, samples, strict=True)]
    assert compare.range_ms(found) == [24.0, 32.0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("variant", ["float32-tf32-first", "float32-fma-last"])
def test_pytorch_computes_the_same_and_a_wrong_layout_is_found(call, monkeypatch, variant):
    pytest.importorskip("torch")
    options = ("--variant", variant, "--way", "PyTorch", "--way", "cuDNN graph", "--check")
    well, rows, _, _ = call(*options)
    assert well
    row = rows["PyTorch", 64 * 2**20]
    assert row["predicted_ms"] is None
    assert 0 < row["distance"] < 1e-5
    monkeypatch.setattr(pytorch.TorchPeer, "arranged", lambda self, output, _: output.mT.contiguous())
    well, rows, _, progress = call(*options, "--again")
    assert not well
    assert rows["PyTorch", 64 * 2**20]["distance"] > 0.5
    assert "PyTorch: outputs are" in progress


@pytest.mark.parametrize("math", MathMode)
@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_rivals_have_no_copies_whichever_layer_could(place, math):
    rig = peers_run.Rig.__new__(peers_run.Rig)
    rig._benchmarks = {each: each.value for each in (Candidates.BEST, *peers_run.PLAIN, Candidates.LEGACY)}
    layers = [make_problem(math=math)] * 3
    if place is not None:
        skipping = {"kernel": (1, 1), "stride": (2, 2), "x_batch_stride": 0, "y_batch_stride": 0}
        layers[place] = make_problem(math=math, **skipping)
    asked = Candidates.GRAPH_PLAIN
    same = place is None and math is MathMode.TF32  # as what is measured for ucudnn anyway
    assert rig.benchmark(asked, layers) == (Candidates.BEST if same else asked).value
    without_copies = Candidates.BEST if place is None else asked if math is MathMode.TF32 else Candidates.BEST_PLAIN
    assert rig.benchmark(Candidates.BEST_PLAIN, layers) == without_copies.value
    for other in (Candidates.BEST, Candidates.LEGACY):
        assert rig.benchmark(other, layers) == other.value
