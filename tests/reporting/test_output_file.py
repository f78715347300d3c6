"""Files that commands write: refused before work is done for them, and whole or as they were."""

import csv
import io
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import ucudnn.cli.network
from tests.support.databases import MACHINE, PROBLEM, measurement
from tests.support.other_user import needs_root, run_as_other
from tests.support.reported import run
from ucudnn.benchmarking.storage.file_lock import LOCK, beside, exclusive
from ucudnn.errors import OutputError, ProfileError
from ucudnn.networks.tables import CSV_HEADER
from ucudnn.profiles.format import Profile, load_profile
from ucudnn.reporting.output_file import add_recording, check_output, write_whole


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/picture.png", "there is no folder"),
        (".", "it is a folder"),
        ("n" * 300, "File name too long"),
        ("a\0b", "null"),
        ("file/x", "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_refused_first(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for call in (check_output, lambda path: write_whole(path, b"new")):
        with pytest.raises(OutputError, match=f"cannot be written: .*{reason}") as refused:
            call(Path(name))
        assert len(str(refused.value)) < 500
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("before", [None, b"a longer content than the new one"])
def test_a_file_is_replaced_whole(tmp_path, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    write_whole(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"new"


def test_a_file_stays_as_it_is_where_no_more_can_be_written(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OutputError, match="file cannot be written: File too large"):
            write_whole(path, b"new" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old"}


def test_what_others_put_beside_a_file_stays(tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "file"
    precious.write_bytes(b"precious")
    (tmp_path / f"file.{os.getpid()}.part").symlink_to(precious)
    path.symlink_to(precious)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert precious.read_bytes() == b"precious"
    assert {each.name for each in tmp_path.iterdir()} == {"precious", "file", f"file.{os.getpid()}.part"}


def test_a_file_that_is_written_at_once_has_one_of_the_contents(tmp_path):
    path, contents = tmp_path / "file", [bytes([each]) * 100_000 for each in range(32)]
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(lambda each: write_whole(path, each), contents)] == [None] * 32
    assert path.read_bytes() in contents
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_who_may_read_and_write_a_file_may_do_so_afterwards(tmp_path, mode):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_whole(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_name_of_any_letters_is_as_long_as_the_system_allows(tmp_path):
    path = tmp_path / ("ü" * 127)
    write_whole(path, b"new")
    assert [*tmp_path.iterdir()] == [path]


@needs_root
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_must_not_be_written_is_refused_first(tmp_path, monkeypatch, exists):
    path = tmp_path / "file"
    if exists:
        path.write_bytes(b"old")
        path.chmod(0o666)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # others may not come through the folders above
    for call in (check_output, lambda each: write_whole(each, b"new")):
        refused = run_as_other(lambda call=call: call(Path("file")))
        assert type(refused) is OutputError
        assert str(refused) == "file cannot be written: permission denied"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_is_written_and_not_replaced():
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space left on device"):
        write_whole(Path("/dev/full"), b"new")
    assert not Path("/dev/full").is_file()
    write_whole(Path(os.devnull), b"new")
    assert not Path(os.devnull).is_file()


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


def recording(name, conditions=MACHINE):
    return Profile(name=name, conditions=conditions, recordings={name: {PROBLEM: (measurement(),)}})


@pytest.mark.parametrize("name", ["file.json", "file.json.gz", "f" * 250, "ü" * 125])
def test_recordings_that_are_added_at_once_are_all_in_the_file(tmp_path, name):
    names = [f"network{index}" for index in range(16)]
    with ThreadPoolExecutor(8) as threads:  # the system locks files of one process against each other, too
        found = [*threads.map(lambda each: add_recording(recording(each), tmp_path / name), names)]
    assert sorted(len(each.recordings) for each in found) == [*range(1, 17)]
    assert {*load_profile(str(tmp_path / name)).recordings} == {*names}
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_recording_that_was_added_while_another_one_was_measured_stays(call, monkeypatch, tmp_path):
    out, layers = tmp_path / "file.json", tmp_path / "layers.csv"
    layers.write_text(f"{CSV_HEADER}\nonly,6,6,2,4,3,3,3,1,1,1,1\n")
    record = ucudnn.cli.network.record

    def record_beside_another(name, requests, benchmark, **options):
        add_recording(recording("another", benchmark.backend.machine()), out)
        return record(name, requests, benchmark, **options)

    monkeypatch.setattr(ucudnn.cli.network, "record", record_beside_another)
    options = ["--backend", "cpu", "--policy", "undivided", "--batch", "2", "--database", "off"]
    status, _, error = call("profile", str(layers), "--out", str(out), *options)
    assert status == 0, error
    assert {*load_profile(str(out)).recordings} == {"another", "layers"}


def test_a_lock_is_not_taken_for_held_once_its_file_is_gone(tmp_path, monkeypatch):
    tries = []

    @contextmanager
    def deleted_once(path):
        tries.append(path)
        with exclusive(path) as file:
            if len(tries) == 1:  # the command before deletes it when it ends
                beside(path, LOCK).unlink()
            yield file

    monkeypatch.setattr("ucudnn.reporting.output_file.exclusive", deleted_once)
    add_recording(recording("network"), tmp_path / "file.json")
    assert len(tries) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("suffix", [".recording.lock", ".recording.ucudnn-lock"])
def test_a_file_of_others_beside_it_stays(tmp_path, suffix):
    path, other = tmp_path / "file.json", tmp_path / f"file.json{suffix}"
    other.write_text("precious")
    if suffix == ".recording.lock":
        add_recording(recording("network"), path)
    else:
        with pytest.raises(OutputError, match=r"file\.json cannot be written: .*ucudnn-lock has other content"):
            add_recording(recording("network"), path)
    assert other.read_text() == "precious"


def test_what_cannot_be_added_leaves_the_file_and_no_lock(tmp_path):
    path = tmp_path / "file.json"
    add_recording(recording("network"), path)
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="record to another file"):
        add_recording(recording("network", {"device": "another GPU"}), path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(OutputError, match="there is no folder"):
        add_recording(recording("network"), tmp_path / "none" / "file.json")
