"""Files that commands write: refused before work is done for them, and whole or as they were."""

import os
from pathlib import Path

import pytest

from ucudnn.errors import OutputError
from ucudnn.reporting.output_file import check_output, write_whole


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


def test_a_file_stays_as_it_is_where_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(self, content):
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="file cannot be written: No space left on device"):
        write_whole(path, b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_is_written_and_not_replaced():
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space left on device"):
        write_whole(Path("/dev/full"), b"new")
    assert not Path("/dev/full").is_file()
    write_whole(Path(os.devnull), b"new")
    assert not Path(os.devnull).is_file()
