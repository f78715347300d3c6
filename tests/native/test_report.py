"""The report of a C++ program: what its handles computed, and what was left to plain cuDNN."""

import csv
import json

import pytest


@pytest.fixture
def reported(run, tmp_path):
    """Return a function that runs the driver, and returns the run and its reports as JSON."""

    def go(*, env=None, **arguments):
        path = tmp_path / "report.json"
        done = run(env={"UCUDNN_REPORT": str(path), **(env or {})}, **arguments)
        return done, json.loads(path.read_text())

    return go


def test_a_name_that_ends_in_csv_gets_a_row_for_each_kernel(run, tmp_path):
    run(limit=3000, repeats=4, env={"UCUDNN_REPORT": str(tmp_path / "report.csv")}).check(iterations=4)
    rows = [*csv.DictReader((tmp_path / "report.csv").read_text().splitlines())]
    assert [(row["operation"], row["calls"]) for row in rows] == [
        (operation, "4") for operation in ("Forward", "BackwardFilter", "BackwardData")
    ]


def test_it_has_each_kernel_with_its_configuration_and_calls(reported):
    done, found = reported(limit=3000, repeats=4)
    done.check(iterations=4)
    ((device, (report,)),) = found["reports"].items()
    assert device == "cuda:0"
    assert found["left"] == {}
    assert report["limits"] == {"workspace_bytes": 3000, "total_workspace_bytes": None}
    assert [each["operation"] for each in report["kernels"]] == ["Forward", "BackwardFilter", "BackwardData"]
    for kernel in report["kernels"]:
        assert kernel["calls"] == 4
        assert kernel["configuration"] == "2x4 eng1"
        assert 4 * 672 <= kernel["workspace_bytes"] <= 3000
        assert kernel["micro_batched_ms"] > 0


def test_limits_have_reports_of_their_own(reported):
    _, found = reported(limit=3000, limit_then=1600, repeats=3)
    limits = {each["limits"]["workspace_bytes"]: each["kernels"] for each in found["reports"]["cuda:0"]}
    assert list(limits) == [1600, 3000]
    assert [[each["calls"] for each in kernels] for kernels in limits.values()] == [[2] * 3, [1] * 3]


def test_a_division_has_its_total_and_its_proof(reported):
    _, found = reported(groups=2, repeats=3, env={"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"})
    (report,) = found["reports"]["cuda:0"]
    assert report["limits"] == {"workspace_bytes": None, "total_workspace_bytes": 12 * 1024}
    assert sum(each["calls"] for each in report["kernels"]) == 3 * 2 * 3
    assert 0 < report["division"]["arena_bytes"] <= 12 * 1024
    assert report["changed"] == 0


def test_destroyed_handles_stay_in_it_without_growing_it(reported):
    _, found = reported(again=2, env={"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"})
    (report,) = found["reports"]["cuda:0"]
    assert [each["calls"] for each in report["kernels"]] == [3] * 3
    assert report["changed"] == 0


@pytest.mark.parametrize("env", [{}, {"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"}], ids=["WR", "WD"])
def test_a_replaced_configuration_shows(reported, env):
    _, found = reported(repeats=2, fail_at=1, fail=1, env=env)
    (report,) = found["reports"]["cuda:0"]
    told = [each["replaced"] for each in report["kernels"] if each["operation"] == "Forward"]
    ((text,),) = told
    assert "was replaced by" in text
    assert text.endswith("because cuDNN failed to run eng1")
    assert report["changed"] >= 1


def test_a_lack_of_room_shows(reported):
    _, found = reported(limit=6000, room=1600)
    (report,) = found["reports"]["cuda:0"]
    assert all("there was no room for a workspace of" in each["replaced"][-1] for each in report["kernels"])


def test_what_is_left_to_cudnn_is_counted_by_reason(reported):
    _, found = reported(flip=1, repeats=2)
    assert found["reports"] == {"cuda:0": []}
    assert len(found["left"]) == 3
    assert all("a convolution that flips its filters" in reason for reason in found["left"])


def test_text_goes_to_a_file_of_the_process_or_to_stderr(run, tmp_path):
    done = run(limit=3000, env={"UCUDNN_REPORT": "-"})
    assert done.errors.startswith("cuda:0: ")
    assert "WR, 2.93 KiB for each kernel, policy powerOfTwo" in done.errors
    assert done.errors.rstrip().endswith("calls: 3")
    run(limit=3000, env={"UCUDNN_REPORT": str(tmp_path / "of-%p.txt")})
    (path,) = tmp_path.glob("of-*.txt")
    assert path.stem.removeprefix("of-").isdigit()
    assert path.read_text().startswith("cuda:0: ")
    assert run(limit=3000).errors == ""


def test_a_path_that_cannot_be_written_is_told_before_anything_is_measured(run, tmp_path):
    done = run(limit=3000, env={"UCUDNN_REPORT": str(tmp_path / "missing" / "report.txt")})
    done.check()
    assert "OutputError" in done.errors
    assert "there is no folder" in done.errors


def test_a_full_disk_is_told_and_changes_nothing(run):
    done = run(limit=3000, env={"UCUDNN_REPORT": "/dev/full"})
    done.check()
    assert done.errors == "ucudnn: the report was not written: /dev/full cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", [("destroy",), ()], ids=["destroys", "leaves it to the end"])
def test_a_python_process_plans_by_itself_and_writes_it_too(computes_in_python, tmp_path, words):
    path = tmp_path / "report.json"
    computes_in_python("in_python", *words, UCUDNN_REPORT=str(path))
    ((report,),) = json.loads(path.read_text())["reports"].values()
    assert [each["calls"] for each in report["kernels"]] == [1]


def test_it_is_written_on_demand_and_not_by_a_forked_child(computes, tmp_path):
    now, later = tmp_path / "now.json", tmp_path / "later.json"
    assert computes("reports", str(now), UCUDNN_REPORT=str(later)) == ""
    first, last = (json.loads(path.read_text())["reports"]["cuda:0"][0]["kernels"][0] for path in (now, later))
    assert (first["calls"], last["calls"]) == (1, 3)
