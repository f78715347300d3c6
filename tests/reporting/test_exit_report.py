"""UCUDNN_REPORT: each face writes what a process computed, when it exits, in the form that the file's ending names."""

import csv
import io
import json

from tests.support.reported import run

HANDLE = """
import numpy, ucudnn
x, w, y = (numpy.ones(each, "f") for each in ((4, 3, 9, 9), (2, 3, 3, 3), (4, 2, 7, 7)))
def run():
    ucudnn.Handle(backend="cpu", workspace_limit="100KiB", database="off").forward(x, w, y)
run()
"""


def test_a_handles_report_has_the_form_of_its_file(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("report.json", "report.csv", "text/report"):
        run(HANDLE, tmp_path / name)
    (report,) = json.loads((tmp_path / "report.json").read_text())["reports"]
    assert [(each["operation"], each["calls"]) for each in report["kernels"]] == [("Forward", 1)]
    (row,) = csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text()))
    assert {row["configuration"][:2], report["kernels"][0]["configuration"][:2]} <= {"1x", "2x", "4x"}
    assert "WR, 100 KiB for each kernel" in (tmp_path / "text" / "report").read_text()


def test_a_report_goes_to_stderr_and_says_when_nothing_was_planned():
    assert run("import ucudnn; ucudnn.Handle(backend='cpu', database='off')", "-") == "no convolution was planned\n"


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_computed(tmp_path):
    assert "there is no folder" in run(HANDLE, tmp_path / "no" / "report", status=1)


def test_a_forked_child_leaves_the_report_to_its_parent(tmp_path):
    run(f"{HANDLE}import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)", tmp_path / "of-%p.txt")
    assert len([*tmp_path.iterdir()]) == 1
