"""Files that commands write: refused before work is done for them, and whole or as they were."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.other_user import needs_root, run_as_other
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
