"""CONTRIBUTING.md is short and names what exists, and the scripts that it names do what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SCRIPTS = ("scripts/check", "scripts/test")


def test_it_is_short():
    assert len(TEXT.split()) <= 600


def test_what_it_names_exists():
    named = re.findall(r"`((?:ucudnn|tests|bench|docs|scripts|\.ci)/[^` ]*)", TEXT)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert (ROOT / target).is_file(), target


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_typed(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert f"`{script}" in TEXT


def test_ci_checks_what_a_developer_checks():
    assert "scripts/check" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not (Path(sys.prefix) / "bin" / "python").exists(), reason="this Python is in no environment")
def test_the_script_for_tests_gives_its_arguments_to_pytest(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "test_two.py").write_text(
        "def test_one():\n    pass\n\n\ndef test_other():\n    raise AssertionError\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    for chosen, status in (("test_one", 0), ("test_other", 1)):
        command = [tmp_path / "scripts" / "test", "test_two.py", "-k", chosen, "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
