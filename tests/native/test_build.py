"""The folder of the library: what others put there is neither taken nor destroyed."""

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.other_user import OTHER, needs_root
from ucudnn.errors import BackendUnavailableError
from ucudnn.native import build
from ucudnn.native.__main__ import main


@pytest.fixture
def compiler(libraries, tmp_path):
    """Return a compiler that takes no time: it copies the library that was compiled for all tests."""
    path = tmp_path / "compiler"
    path.write_text(f"""#!/bin/sh
echo >> {tmp_path / "compilations"}
while [ "$1" != -o ]; do shift; done
cp {libraries / build.LIBRARY} "$2"
chmod 777 "$2"
""")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def folder(libraries, tmp_path):
    """Return a folder with the library, as it was compiled."""
    path = tmp_path / "folder"
    path.mkdir(mode=0o755)
    shutil.copy(libraries / build.LIBRARY, path)
    (path / build.LIBRARY).chmod(0o755)
    return path


def compilations(tmp_path):
    path = tmp_path / "compilations"
    return len(path.read_text()) if path.exists() else 0


def test_a_library_that_nobody_else_can_change_is_taken_unless_headers_differ(folder, toolchain, compiler, tmp_path):
    for headers, compiled in ((toolchain.headers, 0), ([*toolchain.headers, tmp_path], 1)):
        assert build.build(folder, headers, compiler) == folder / build.LIBRARY
        assert compilations(tmp_path) == compiled


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o757])
def test_a_library_that_another_user_can_change_is_compiled_again(folder, toolchain, compiler, tmp_path, mode):
    library = folder / build.LIBRARY
    library.chmod(mode)
    if mode == 0o755:
        os.chown(library, OTHER, OTHER)
    for _ in range(2):
        assert build.build(folder, toolchain.headers, compiler) == library
        assert compilations(tmp_path) == 1
    found = library.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o755)
    assert [*folder.iterdir()] == [library]


@needs_root
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: os.chown(folder, OTHER, OTHER), "belongs to another user"),
        (lambda folder: folder.chmod(0o777), "can be changed by other users: `chmod go-w "),
    ],
)
def test_a_folder_that_another_user_can_change_is_refused(folder, toolchain, compiler, change, reason, capsys):
    change(folder)
    given = [f"--include={each}" for each in toolchain.headers]
    assert main(["--libs", "--folder", str(folder), "--compiler", compiler, *given]) == 2
    said = capsys.readouterr().err
    assert f"ucudnn: {folder} {reason}" in said
    assert "--folder" in said


def test_another_library_of_this_name_stays(folder, toolchain, compiler):
    library = folder / build.LIBRARY
    library.write_bytes(b"\x7fELF of the papers' own")
    with pytest.raises(BackendUnavailableError, match="is another library, and stays: give --folder"):
        build.build(folder, toolchain.headers, compiler)
    assert library.read_bytes() == b"\x7fELF of the papers' own"
    library.unlink()
    library.mkdir()
    with pytest.raises(BackendUnavailableError, match=r"Is a directory.*--folder"):
        build.build(folder, toolchain.headers, compiler)


def test_a_file_that_links_of_others_name_stays(tmp_path, toolchain, compiler):
    folder, precious = tmp_path / "folder", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    for name in (f"{build.LIBRARY}.stamp", f"{build.LIBRARY}.00000000"):
        (folder / name).symlink_to(precious)
    build.build(folder, toolchain.headers, compiler)
    assert precious.read_text() == "precious"


def test_processes_that_compile_at_once_all_get_a_whole_library(tmp_path, libraries, toolchain, compiler):
    folder = tmp_path / "new" / "folder"
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda _: build.build(folder, toolchain.headers, compiler), range(16))]
    assert found == [folder / build.LIBRARY] * 16
    assert found[0].read_bytes() == (libraries / build.LIBRARY).read_bytes()
    assert [*folder.iterdir()] == found[:1]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Return the folder of cuDNN's library in a wheel."""
    path = tmp_path / "nvidia" / "cudnn" / "lib"
    path.mkdir(parents=True)
    (path / "libcudnn.so.9").write_text("")
    monkeypatch.setattr(build, "wheel_folders", lambda package, kind: [path] if kind == "lib" else [])
    return path


@pytest.mark.parametrize("is_link", [True, False])
def test_the_users_own_libcudnn_stays(folder, wheel, tmp_path, is_link):
    own, link = tmp_path / "libcudnn.so.8", folder / "libcudnn.so"
    own.write_text("own")
    if is_link:
        link.symlink_to(own)
    else:
        link.write_text("own")
    build.link_flags(folder)
    assert link.is_symlink() is is_link
    assert link.read_text() == "own"


def test_the_link_to_the_library_of_a_wheel_follows_the_wheel(folder, wheel, tmp_path):
    link = folder / "libcudnn.so"
    link.symlink_to(tmp_path / "earlier" / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9")
    with ThreadPoolExecutor(8) as threads:
        assert len([*threads.map(lambda _: build.link_flags(folder), range(32))]) == 32
    assert link.readlink() == wheel / "libcudnn.so.9"
    assert {each.name for each in folder.iterdir()} == {build.LIBRARY, "libcudnn.so"}
