"""The summary of what went through handles, and the report of it at exit."""

import csv
import io

import torch

from tests.support.decisions import slower
from tests.support.reported import run
from tests.support.torch_cases import enable_on_cpu
from ucudnn.reporting.report import EXPLANATIONS
from ucudnn.torch.summary import Summary


def convolve():
    return torch.nn.functional.conv2d(torch.ones(4, 3, 9, 9), torch.ones(4, 3, 3, 3))


def test_a_report_with_measured_times():
    with enable_on_cpu() as on:
        convolve()
        plain, measured = on.report(), on.report(repeats=2)
    (layer,) = measured.layers
    assert plain.layers[0].measured_ms is None
    assert layer.measured_ms > 0
    assert layer.pytorch_ms is None  # nothing is said of the CPU's memory
    assert "measured" in str(measured)
    assert "measured" not in str(plain)
    assert measured.to_dict()["layers"][0]["measured_ms"] == layer.measured_ms
    assert measured.to_csv().count("\n") == 2


def test_a_kernel_far_from_its_prediction_is_measured_again_and_named():
    with enable_on_cpu() as on:
        expected = convolve()
        (handle,) = on._interceptor.handles().values()
        (entry,) = handle._entries.values()
        entry.decide(slower(entry.decision, 1e6))
        stale = entry.decision.configuration.time_ms
        summary = on.report(repeats=1)
        torch.testing.assert_close(convolve(), expected)
    assert summary.layers[0].planned_ms < stale / 100
    assert "measured again, because predictions were far from executed times" in str(summary)
    assert summary.reports["cpu"].kernels[0].first_predicted_ms == stale


def test_a_summary_in_a_notebook_explains_each_of_its_columns():
    with enable_on_cpu() as on:
        convolve()
        summary = on.report(repeats=1)
    assert set(summary.columns()) <= {*EXPLANATIONS}
    page = summary._repr_html_()
    assert all(f">{cell}</td>" in page for cell in summary.layers[0].row())
    assert "convolutions through ucudnn: 1, left to PyTorch: 0" in page
    (record,) = summary.records()
    assert record["divided"] is summary.layers[0].divided
    assert all(value is None or isinstance(value, str | int | float) for value in record.values())


def test_reasons_that_differ_in_their_problem_have_one_line():
    left = {f"UnsupportedProblemError: Forward {size}x3x9x9: no algorithm": size for size in (2, 4, 8)}
    lines = str(Summary(reports={}, layers=(), left={**left, "under a transform": 5})).splitlines()
    assert lines[0].endswith("left to PyTorch: 19")
    assert lines[1] == ("  14 x UnsupportedProblemError: Forward 2x3x9x9: no algorithm, and alike for 2 other problems")
    assert lines[2] == "  5 x under a transform"


PROGRAM = """
import torch, ucudnn.torch
ucudnn.torch.enable(backend="cpu", workspace_limit="100KiB", database="off")
torch.nn.Conv2d(3, 2, 3)(torch.ones(4, 3, 9, 9))
"""


def test_pytorch_reports_its_layers(tmp_path):
    run(PROGRAM, tmp_path / "report.csv")
    (row,) = csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text()))
    assert (row["operation"], row["calls"]) == ("Forward", "1")
