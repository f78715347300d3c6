"""`ucudnn doctor` names the parts that work, the broken ones, and the missing ones with the line that installs each."""

import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.other_user import needs_root, run_as_other
from ucudnn.benchmarking.storage.store import open_database
from ucudnn.cli import doctor
from ucudnn.cli.doctor import PartState, as_text, examine
from ucudnn.settings import Settings


def found(settings=None, **named):
    settings = settings or Settings.load({}, backend="cpu", database="off", **named)
    return {each.part: each for each in examine(lambda: settings)}


OFF = ("--backend", "cpu", "--database", "off")


def test_it_names_every_part_and_the_backend_that_commands_take(call):
    status, out, error = call("doctor", *OFF, "--json")
    assert status == 0, error
    parts = json.loads(out)
    assert {*["Python", "ucudnn", "cuDNN", "CuPy", "PyTorch", "backend", "HiGHS", "matplotlib", "C++", "database"]} <= {
        *parts
    }
    assert parts["backend"]["text"].startswith("cpu (device ")
    assert f"python {sys.version_info.major}.{sys.version_info.minor}." in parts["backend"]["text"]
    assert all(each["text"] for each in parts.values())


def test_what_is_missing_has_the_line_that_installs_it(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(doctor.importlib, "import_module", absent)
    parts = found()
    assert {part for part in parts if parts[part].state is PartState.MISSING} >= {"CuPy", "PyTorch", "matplotlib"}
    assert parts["CuPy"].remedy == "pip install 'ucudnn[cuda13]'"
    text = as_text([*parts.values()])
    assert re.search(r"^missing  PyTorch +not installed; .*\n +to do: pip install 'ucudnn\[torch\]'$", text, re.M)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("import nothing_of_that_name", "No module named 'nothing_of_that_name'"), ("raise OSError('half')", "half")],
)
def test_what_is_there_and_cannot_be_imported_is_broken(call, monkeypatch, tmp_path, content, reason):
    (tmp_path / "matplotlib.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    status, out, error = call("doctor", *OFF)
    assert (status, error) == (1, "")
    assert re.search(rf"^broken +matplotlib .*{reason}$", out, re.M), out


def test_settings_that_cannot_be_read_are_a_finding(call, monkeypatch):
    for name, value in (("BACKEND", "cpu"), ("DATABASE", "off"), ("BATCH_SIZE_POLICY", "halves")):
        monkeypatch.setenv(f"UCUDNN_{name}", value)
    status, out, _ = call("doctor")
    assert status == 1
    assert "UCUDNN_BATCH_SIZE_POLICY='halves'" in out
    monkeypatch.setenv("UCUDNN_BATCH_SIZE_POLICY", "all")
    assert re.search(r"^ok +settings .*UCUDNN_BATCH_SIZE_POLICY=all", call("doctor")[1], re.M)


def test_a_backend_that_cannot_be_opened_is_broken():
    parts = found(Settings.load({}, backend="replay:nothing-of-that-name", database="off"))
    assert parts["backend"].state is PartState.BROKEN
    assert "nothing-of-that-name" in parts["backend"].text


def test_a_libcudnn_that_was_named_and_is_none_is_broken(tmp_path):
    file = tmp_path / "libcudnn.so.9"
    file.write_text("no library")
    parts = found(cudnn_library=str(file))
    assert parts["cuDNN"].state is PartState.BROKEN
    assert str(file) in parts["cuDNN"].text


@pytest.mark.parametrize(("path", "reason"), [("n" * 400, "File name too long"), ("a\0b", "null")])
def test_a_database_that_can_have_no_such_name_is_broken(path, reason):
    settings = Settings.load({}, backend="cpu", database="off")
    finding = found(replace(settings, database=path))["database"]
    assert finding.state is PartState.BROKEN
    assert reason in finding.text
    assert len(finding.text) < 200


_NOBODY = 65534


@pytest.fixture
def sealed_folder():
    """Return a folder into which nothing can be written, also by a superuser, who is none meanwhile."""
    folder = Path(tempfile.mkdtemp())
    file = folder / "measurements.db"
    open_database(str(file)).close()
    file.chmod(0o444)
    folder.chmod(0o555)
    user = os.geteuid()
    found()  # a superuser's modules may not be there for others
    if not user:
        os.seteuid(_NOBODY)
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)


@pytest.mark.parametrize("is_there", [True, False])
def test_programs_go_on_without_a_place_for_the_database(sealed_folder, is_there):
    path = sealed_folder / "measurements.db" if is_there else sealed_folder / "new" / "measurements.db"
    settings = Settings.load({}, backend="cpu", database=str(path))
    finding = found(settings)["database"]
    assert finding.state is PartState.SEALED
    assert ("cannot be changed" if is_there else "nothing can be written into") in finding.text
    assert "programs go on" in finding.text
    assert "UCUDNN_DATABASE" in finding.remedy


def test_the_database_is_looked_at_and_not_made(tmp_path):
    path = tmp_path / "measurements.db"
    settings = Settings.load({}, backend="cpu", database=str(path))
    assert "is not there yet" in found(settings)["database"].text
    assert not path.exists()
    path.write_text("no database")
    assert found(settings)["database"].state is PartState.BROKEN
    assert path.read_text() == "no database"


@needs_root
def test_a_user_without_a_home_has_no_place_for_the_database(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    settings = replace(Settings.load({}, backend="cpu", database="off"), database=None)
    found(settings)  # a superuser's modules may not be there for others
    finding = run_as_other(lambda: found(settings)["database"])
    assert finding.state is PartState.BROKEN
    assert "there is no cache folder for the database" in finding.text
    assert "set UCUDNN_DATABASE" in finding.text
