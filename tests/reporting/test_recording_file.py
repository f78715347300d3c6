"""Recordings that are added to one file at the same time are all in it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import ucudnn.cli.network
from tests.support.databases import MACHINE, PROBLEM, measurement
from ucudnn.benchmarking.storage.file_lock import LOCK, beside, exclusive
from ucudnn.errors import OutputError, ProfileError
from ucudnn.networks.tables import CSV_HEADER
from ucudnn.profiles.format import Profile, load_profile
from ucudnn.reporting.output_file import add_recording


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
