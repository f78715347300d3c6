"""UCUDNN_REPORT has the layers of a PyTorch program, as `ucudnn.torch.report` does."""

import csv
import io

import pytest

from tests.support.reported import run

pytest.importorskip("torch")

PROGRAM = """
import torch, ucudnn.torch
ucudnn.torch.enable(backend="cpu", workspace_limit="100KiB", database="off")
torch.nn.Conv2d(3, 2, 3)(torch.ones(4, 3, 9, 9))
"""


def test_pytorch_reports_its_layers(tmp_path):
    run(PROGRAM, tmp_path / "report.csv")
    (row,) = csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text()))
    assert (row["operation"], row["calls"]) == ("Forward", "1")
