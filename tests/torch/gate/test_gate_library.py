"""The library of the gate: built once, kept for later processes, and missed by nobody who has no compiler."""

import shutil
from threading import Event

import pytest

pytest.importorskip("torch")

from ucudnn.torch.gate.gate_library import GateLibrary


def test_the_library_is_kept_for_later_processes(gate_library, tmp_path):
    folder = tmp_path / "gate"
    shutil.copytree(gate_library._folder, folder)
    (before,) = folder.glob("*.so")
    written = before.stat().st_mtime_ns
    found = GateLibrary(folder, find=lambda name: None)
    assert found.gate is None
    found.begin()
    found.join(300)
    assert found.gate is not None
    assert [each.stat().st_mtime_ns for each in folder.glob("*.so")] == [written]


@pytest.mark.parametrize("compiler", [None, "false", "/nowhere/c++"])
def test_without_a_compiler_that_works_there_is_no_gate_and_no_error(tmp_path, compiler, caplog):
    caplog.set_level("INFO", "ucudnn")
    found = GateLibrary(tmp_path, find=lambda name: compiler if name == "c++" else None)
    found.begin()
    found.join(300)
    assert not found.is_pending
    assert found.gate is None
    assert "make a detour through Python" in caplog.text
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
