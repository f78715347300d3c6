"""The tables of README.md and docs/ hold the figures of bench/results, and nothing else."""

import re
import sys

import pytest

from bench.peers.compare import NETWORKS, VARIANTS
from bench.peers.ways import GRAPH, HEURISTICS, POWER_OF_TWO, PYTORCH, UNDIVIDED
from bench.tools import documents
from bench.tools.results import RESULTS, ROOT

pytestmark = pytest.mark.skipif(not (RESULTS / "gpu").exists(), reason="a source distribution leaves the results out")

NAMES = [f"{each.document}: {each.head[0]}" for each in documents.TABLES]


@pytest.mark.parametrize("table", documents.TABLES, ids=NAMES)
def test_a_table_equals_its_results(table):
    text = (ROOT / table.document).read_text().splitlines()
    assert text[table.place(text)] == table.lines(), "run `python -m bench.tools.documents --write`"


def measured_tables(path):
    """Return the first cells of all tables of a document that hold milliseconds or speedups."""
    tables = re.findall(r"^((?:\|.*\n)+)", path.read_text() + "\n", re.MULTILINE)
    return {each.split("|")[1].strip() for each in tables if re.search(r"\| [^|]*\d(?:\.\d+)? (?:ms|%)", each)}


def test_no_table_of_measured_times_is_written_by_hand():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        name = str(path.relative_to(ROOT))
        known = {each.head[0] for each in documents.TABLES if each.document == name}
        assert measured_tables(path) <= known, name
    assert measured_tables(ROOT / "README.md")
    assert measured_tables(ROOT / "docs" / "memory-papers.md")


BASELINES = {  # the first cell of a table: what a user has without ucudnn, and the same candidates undivided
    "measured on an H200, float32, NCHW": ("without ucudnn", "undivided"),
    "network, mini-batch": ("PyTorch", "undivided"),
    "convolutions within 64 MiB": ("choice", "micro-batches"),
    "Caffe's AlexNet 256, 64 MiB": ("cuDNN's heuristics, as Caffe is", "measured choice, graph API"),
    "whole training step": ("PyTorch", "undivided"),
    "limit for each kernel": ("Caffe with plain cuDNN", "undivided, same candidates"),
    "policy": ("PyTorch with `cudnn.benchmark`, no limit", "undivided, the same candidates"),
    "training step": ("PyTorch", "undivided"),
    "a program that is tuned while it runs, `cudnn.benchmark`": ("PyTorch", "on"),  # it bounds no workspace
    "a program within 64 MiB": ("PyTorch, no limit", "within the limit"),  # its heuristic plans are no baseline
    "3-D U-Net, 4 x 1 x 128³, under a cap on memory": ("PyTorch", "undivided, within 1 GiB"),
    "one sample": ("its workspace", "within 256 MiB"),  # the fastest algorithm is 100 %, undivided is in brackets
    "convolutions": ("PyTorch", "undivided"),
    "step within a budget": ("PyTorch", "90 %"),  # nothing is divided
    "step by each way, H200": ("eager", "70 %"),
    "tensors of an H200 within": ("eager", "70 %"),
    "step of two H200s": ("FSDP2", "with `checkpoint`"),
    "step without a plan, H200": ("eager PyTorch", "within 80 % of that"),
    "plan of nnU-Net, peak on an H200": ("predicted", "measured"),
    "plan of nnU-Net, mini-batch, 24 GiB on an H200": ("largest plain patch", "voxels"),
    "kernels": ("ucudnn", "HiGHS"),  # solvers
    "time steps": ("time: plain", "peak of the layer"),  # plain is PyTorch's; nothing is divided
    "models of a library": (),  # counts of models, each compared with the plain loop
}


MEASURED = [each for each in documents.TABLES if each.document != documents.PAPERS_PAGE]  # those are simulated


@pytest.mark.parametrize("table", MEASURED, ids=lambda table: table.head[0])
def test_a_table_names_both_baselines(table):
    text = "\n".join(table.lines())
    assert [each for each in BASELINES[table.head[0]] if each not in text] == []


def test_programs_that_take_longer_than_pytorch_stand_above_the_mean_of_all(monkeypatch):
    case = {"step_ms": 10.0, "first_step_s": 1.0, "peaks": {"allocated": 0, "reserved": 0}}
    tuned = [{"seen": 9, "kernels": [{"parts": 1}, {"parts": 4}]}]
    gpu = {"conditions": {"device": "NVIDIA H100 80GB HBM3"}}
    turns = {"step": 1.04, "step_quartiles": [1.03, 1.05]}
    cases = {
        "vgg16 nchw stock 0": case | gpu,
        "vgg16 nchw stock 1": {**case, **gpu, "step_ms": 12.0},
        "vgg16 nchw auto 0": {**case, **gpu, "tuned": tuned, "settled": False, "step_ms": 12.2, "by_turns": turns},
        "small bf16 stock-off 0": case,
        "small bf16 auto-off 0": {**case, "step_ms": 11.0},
        "small last stock-off 0": case,
        "small last auto-off 0": {**case, "step_ms": 9.0},  # no loser
        "small bf16 auto 0": case,  # nothing to compare with
        "vgg16 nchw 64MiB 0": {**case, **gpu, "step_ms": 22.0, "peaks": {"allocated": -(2**21)}},
        "vgg16 nchw 64MiB-off 0": {**case, "step_ms": 99.0},  # PyTorch alone was not measured so
        "small bf16 stock 0": {"error": "out of memory"},
    }
    monkeypatch.setattr(documents, "results", lambda name: {"cases": cases})
    assert ["|".join(row) for row in documents.tuned_programs()] == [
        "VGG-16 64, NCHW, on|11.0 ms|12.2 ms|1.109, not settled|1.040|2 of 9, 1 divided",
        "small, NHWC bfloat16, off|10.0 ms|11.0 ms|1.100||0 of 0",
        "geometric mean of all 1, on (1 above 1.02)|||1.109||",
        "geometric mean of all 2, off (1 above 1.02)|||0.995||",
    ]
    assert ["|".join(row) for row in documents.limited_programs()] == [
        "VGG-16 64, NCHW|11.0 ms|22.0 ms|2.000||0 of 0|-2 MiB",
        "geometric mean of all 1 (1 above 1.05)|||2.000|||",
    ]
    monkeypatch.setattr(documents, "results", lambda name: {})
    assert {row[0] for row in (*documents.tuned_programs(), *documents.limited_programs())} == {documents.UNKNOWN}


def test_models_are_counted_by_library_failures_first(monkeypatch):
    found = [("a", "to the bit", 70), ("a", "to the bit", 85), ("b", "raised", 0), ("b", "by hooks", 100)]
    found += [("b", "plain fails", 0), ("a", "refused", 0)]
    cases = [dict(zip(("family", "outcome", "share"), each, strict=True)) for each in found]
    monkeypatch.setattr(documents, "results", lambda name: {"cases": dict(enumerate(cases))})
    rows = [*documents.coverage()]
    assert rows[:2] == [
        ["b", "2", "0", "1 (0 / 0 / 1)", "0", "0", "1"],
        ["a", "3", "2 (1 / 1 / 0 / 0)", "0", "1", "0", "0"],
    ]
    assert rows[2] == ["all", "5", "2 (1 / 1 / 0 / 0)", "1 (0 / 0 / 1)", "1", "0", "1"]


@pytest.fixture
def peers(monkeypatch):
    """Replace the results of peers by rows of AlexNet and ResNet-18, and return a function that changes a way's row."""
    rows = {}

    def make(case, way, **row):
        known = {"limit_bytes": 64 * 2**20, "variant": documents.NCHW, "way": way, "workspace_bytes": 2**20, **row}
        rows[case, way] = {"network": case[0], "batch": case[1], **known}
        documents._peers.cache_clear()

    monkeypatch.setattr(documents, "results", lambda name: {"rows": list(rows.values())})
    documents._peers.cache_clear()
    yield make
    documents._peers.cache_clear()


def test_what_is_not_measured_is_empty_and_what_cannot_differ_is_taken_over(peers):
    for case in (("alexnet", 256), ("resnet18", 128)):
        peers(case, GRAPH, executed_ms=30.0)
        peers(case, POWER_OF_TWO, executed_ms=10.0)
    alexnet, _, resnet = list(documents.ideas())[:3]
    assert alexnet == ["AlexNet 256", "", "1.00", "3.00", "", "3.00", "1.00"]
    assert resnet == ["ResNet-18 128", documents.UNKNOWN, "", "", "", "", ""]  # its strides may be copied
    peers(("resnet18", 128), UNDIVIDED, executed_ms=20.0)
    peers(("resnet18", 128), HEURISTICS, executed_ms=45.0)
    assert list(documents.ideas())[2][:5] == ["ResNet-18 128", "1.50", "1.50", "2.00", "4.50"]


def test_spreads_and_workspaces_stand_beside_medians(peers):
    case = ("alexnet", 256)
    peers(case, PYTORCH, executed_ms=9.187, range_ms=[9.1, 9.31], workspace_bytes=588 * 2**20)
    peers(case, GRAPH)
    row = next(iter(documents.networks()))
    assert row[1] == "9.19 (588 MiB)"
    assert row[-1] == "2.3 %"
    assert row[2] == ""  # heuristics were not measured
    assert row[4] == "–"  # nothing fits


def test_the_spread_of_a_readme_row_is_that_of_its_widest_time(peers):
    case = ("alexnet", 256)
    peers(case, PYTORCH, executed_ms=9.2, range_ms=[9.1, 9.31], workspace_bytes=588 * 2**20)
    peers(case, UNDIVIDED, executed_ms=37.1, range_ms=[37.0, 37.74])
    peers(case, POWER_OF_TWO, executed_ms=11.1, range_ms=[11.1, 11.1])
    row = documents._readme_row("AlexNet", case, documents.NCHW, documents.USUAL)
    assert row == ["AlexNet", "9.20 ms (588 MiB)", "37.1 ms", "11.1 ms", "3.34 times faster", "2.3 %"]
    peers(case, POWER_OF_TWO, executed_ms=11.1)
    assert documents._readme_row("AlexNet", case, documents.NCHW, documents.USUAL)[-1] == ""


def test_a_changed_table_is_found_and_written_again(monkeypatch, tmp_path, capsys):
    table = next(each for each in documents.TABLES if each.document == "docs/cpp-caffe.md")
    text = (ROOT / table.document).read_text()
    path = tmp_path / table.document
    path.parent.mkdir()
    path.write_text(text.replace("| 64 MiB | ", "| 64 MiB | 1"))
    assert path.read_text() != text
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(documents, "TABLES", (table,))
    monkeypatch.setattr(sys, "argv", ["documents"])
    assert not documents.main()
    assert "docs/cpp-caffe.md: the table 'limit for each kernel' is not that of the results" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["documents", "--write"])
    assert documents.main()
    assert path.read_text() == text
    path.write_text(text + "\n| limit for each kernel |\n| --- |\n")
    with pytest.raises(ValueError, match="2 tables begin with 'limit for each kernel'"):
        documents.main()


def test_the_networks_are_those_that_are_compared():
    assert {name for name, _ in documents.NETWORKS} == {each.partition(":")[0] for each in NETWORKS}
    assert set(documents.VARIANTS) <= set(VARIANTS)
    for name, variant in documents.VARIANTS.items():
        assert VARIANTS[name] == variant
