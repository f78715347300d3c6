"""The paper's figures on NumPy: their CSV files need no matplotlib, can be drawn again, and lack what failed only."""

import csv
import sys
from dataclasses import replace

import pytest

from bench.paper import figures
from bench.tools.results import RESULTS
from ucudnn.errors import MeasurementError
from ucudnn.networks.tables import load_network
from ucudnn.reporting import plan_timing

LAYERS = """\
source,W,H,C_in,N,C_out,kernel_w,kernel_h,pad_w,pad_h,stride_w,stride_h
conv1,5,4,3,4,2,3,3,1,1,1,1
conv2,6,5,2,4,3,3,3,1,1,1,1
"""


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Return a function that runs a figure on a tiny network and returns its files by suffix, output and progress."""
    (tmp_path / "tiny.csv").write_text(LAYERS)

    def tiny(name):
        network = load_network(str(tmp_path / "tiny.csv"))
        layers = tuple(replace(layer, name=layer.name.partition(":")[0]) for layer in network.layers)
        return replace(network, name=name, layers=layers)

    def run(name, *options):
        given = ("--backend", "cpu", "--repeats", "1", "--database", "off", "--out", str(tmp_path), *options)
        monkeypatch.setattr(sys, "argv", ["figures", name, *given])
        figures.main()
        files = {suffix: sorted(tmp_path.glob(f"*_executed.{suffix}")) for suffix in ("csv", "png", "unfinished")}
        return files, *capsys.readouterr()

    monkeypatch.setattr(figures, "load_network", tiny)
    return run


def rows_of(path):
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("# ")))


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_picture_can_be_drawn_later_without_matplotlib_now(call, monkeypatch, name):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        files, said, _ = call(name)
    assert not files["png"]
    assert not files["unfinished"]
    assert f"then give --from {files['csv'][0]}" in said
    for path in files["csv"]:
        assert all(float(row["executed_ms"]) > 0 for row in rows_of(path))
    files, again, _ = call(name, "--from", *map(str, files["csv"]))
    assert {path.name for path in files["png"]} >= {path.with_suffix(".png").name for path in files["csv"]}
    numbers = [line for line in said.splitlines() if "  paper " in line]
    assert numbers
    assert numbers == [line for line in again.splitlines() if "  paper " in line]


@pytest.mark.skipif(not (RESULTS / "paper").exists(), reason="a source distribution leaves the results out")
@pytest.mark.parametrize("name", figures.FIGURES)
def test_stored_results_are_drawn(name, tmp_path, monkeypatch, capsys):
    first, *others = (RESULTS / "paper" / f"{each}_{kind}.csv" for each in figures.FIGURES[name].networks
                      for kind in ("executed", "planned"))  # fmt: skip
    copy = tmp_path / first.name
    copy.write_text(first.read_text())
    monkeypatch.setattr(figures, "Bench", None)
    monkeypatch.setattr(sys, "argv", ["figures", name, "--from", str(copy)])
    figures.main()
    assert copy.with_suffix(".png").exists()
    assert "  paper " in capsys.readouterr().out
    for path in others:  # whose pictures would take seconds each
        figures.FIGURES[name].tell(figures.read(path))
        assert "  paper " in capsys.readouterr().out


def test_a_failure_spares_the_other_rows(call, monkeypatch):
    decide, make_plan = figures.decide, plan_timing.make_plan

    def refuse(kernels, benchmark, settings):
        if settings.workspace_limit_bytes == 8 * 2**20 and any(each.layer == "conv1" for each in kernels):
            raise MeasurementError("too little")
        return decide(kernels, benchmark, settings)

    def fail(problem, configuration, backend):
        if problem.operation.value == "Forward":
            raise MemoryError("full")
        return make_plan(problem, configuration, backend)

    monkeypatch.setattr(figures, "POLICIES", ("undivided",))
    monkeypatch.setattr(figures, "decide", refuse)
    monkeypatch.setattr(plan_timing, "make_plan", fail)
    files, _, progress = call("figure10")
    rows = rows_of(files["csv"][0])
    assert {(row["plan"], row["layer"]) for row in rows} == {
        ("8 MiB undivided", "conv2"),
        *((f"{limit} MiB undivided", layer) for limit in (64, 512) for layer in ("conv1", "conv2")),
    }
    assert not any(row["operation"] == "Forward" for row in rows)
    assert "too little" in progress
    assert "full" in progress
