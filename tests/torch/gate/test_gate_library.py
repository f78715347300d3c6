"""The library of the gate: built once, kept for later processes, and missed by nobody who has no compiler."""

import os
import shutil
import stat
import subprocess
from threading import Event

import pytest

from tests.support.other_user import OTHER, needs_root
from ucudnn.torch.gate.gate_library import GateLibrary


def built(folder, find):
    """Return what was built in a folder, given what finds programs."""
    found = GateLibrary(folder, find)
    assert found.gate is None
    found.begin()
    found.join(300)
    assert not found.is_pending
    return found


def copying(compiler, library):
    """Make a compiler that takes no time, because it copies a library; return what finds it."""
    compiler.write_text(f"""#!/bin/sh
while [ "$1" != -o ]; do shift; done
cp {library} "$2"
""")
    compiler.chmod(0o755)
    return lambda name: str(compiler) if name == "c++" else None


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "no C++ compiler was found"),
        ("ls", "non-zero exit status"),  # it has no such options, which it says
        ("/nowhere/c++", "No such file or directory: '/nowhere/c++'"),
    ],
)
def test_without_a_compiler_that_works_there_is_no_gate_and_no_error(tmp_path, compiler, reason, caplog, capfd):
    caplog.set_level("INFO", "ucudnn")
    assert built(tmp_path, lambda name: compiler if name == "c++" else None).gate is None
    assert "make a detour through Python" in caplog.text
    assert reason in caplog.text
    assert capfd.readouterr() == ("", ""), "what a compiler says is no output of the program"
    assert not list(tmp_path.glob("*.so"))


def test_a_library_that_takes_too_long_is_awaited_no_longer_but_still_built(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ucudnn.torch.gate.gate_library.perf_counter", lambda: now[0])
    ended = Event()
    found = GateLibrary(tmp_path, find=lambda name: ended.wait(300) and None)
    assert not found.is_awaited
    found.begin()
    assert found.is_awaited
    now[0] = 61.0
    assert found.is_pending
    assert not found.is_awaited
    ended.set()
    found.join(300)
    assert not found.is_pending


@pytest.fixture
def kept(gate_library, tmp_path):
    """Return the path of a library that is kept, and a compiler that takes no time: it copies the gate's library."""
    (library,) = gate_library._folder.glob("*.so")
    folder = tmp_path / "cache" / "ucudnn" / "gate"
    folder.mkdir(parents=True)
    return folder / library.name, copying(tmp_path / "compiler", library)


@pytest.fixture
def foreign(tmp_path):
    """Return a library that writes a file where it is loaded."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, loaded = tmp_path / "foreign.c", tmp_path / "loaded"
    source.write_text(f"""#include <stdio.h>
__attribute__((constructor)) static void begin(void) {{ fclose(fopen("{loaded}", "w")); }}
""")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", tmp_path / "foreign.so"], check=True)
    return tmp_path / "foreign.so", loaded


def load(library, find):
    return built(library.parent, find).gate


def test_what_is_built_is_for_its_user_alone_and_whole(kept):
    library, find = kept
    shutil.rmtree(library.parents[2])
    before = os.umask(0)
    try:
        assert load(library, find) is not None
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (library, *library.parents[:3])]
    assert modes == [0o700] * 4
    assert sorted(each.suffix for each in library.parent.iterdir()) == [".so", ".ucudnn-lock"]
    assert load(library, lambda name: None) is not None


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_library_of_another_user_is_not_loaded_but_built_again(kept, foreign, caplog, mode):
    library, find = kept
    shutil.copy(foreign[0], library)
    library.chmod(mode)
    if mode == 0o755:
        os.chown(library, OTHER, OTHER)
    assert load(library, find) is not None
    assert not foreign[1].exists()
    assert library.stat().st_uid == os.geteuid()
    assert caplog.text.count("the library of the gate is built again") == 1
    assert str(library) in caplog.text


@needs_root
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("has_other_owner", [True, False])
def test_nothing_is_loaded_from_or_built_in_a_folder_that_others_can_change(
    kept, foreign, caplog, level, has_other_owner
):
    library, find = kept
    shutil.copy(foreign[0], library)
    folder = library.parents[level - 1]
    if has_other_owner:
        os.chown(folder, OTHER, OTHER)
    else:
        folder.chmod(0o777)
    before = library.read_bytes()
    assert load(library, find) is None
    assert not foreign[1].exists()
    assert library.read_bytes() == before
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert f"no library is loaded from {library.parent}, because {folder} " in said.getMessage()
    library.unlink()
    assert load(library, find) is None
    assert not library.exists(), "nor is one built there"


@pytest.mark.parametrize("content", [None, b"", b"no library"])
def test_what_cannot_be_loaded_is_built_again(kept, gate_library, foreign, caplog, content):
    library, find = kept
    if content is None:
        shutil.copy(foreign[0], library)  # of this user, without the functions of the gate
    else:
        library.write_bytes(content)
    assert load(library, lambda name: None) is None
    assert load(library, find) is not None
    assert caplog.text.count("the library of the gate is built again") == 1
    assert library.read_bytes() == (gate_library._folder / library.name).read_bytes()


def test_a_compiler_that_writes_another_library_gives_no_gate(kept, foreign, caplog, tmp_path):
    library, _ = kept
    caplog.set_level("INFO", "ucudnn")
    assert load(library, copying(tmp_path / "other_compiler", foreign[0])) is None
    assert "is another library: it has no ucudnn_gate_use" in caplog.text
    assert [each.suffix for each in library.parent.iterdir()] == [".ucudnn-lock"]


def test_a_link_at_the_place_of_the_lock_is_not_followed(kept, tmp_path):
    library, find = kept
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for suffix in (".lock", ".ucudnn-lock"):
        library.with_name(library.name + suffix).symlink_to(precious)
    library.with_suffix(".unfinished").symlink_to(precious)
    load(library, find)
    assert precious.read_text() == "precious"
