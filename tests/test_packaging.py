"""What is published says the same everywhere: version, Pythons, and the files that an sdist needs for its tests."""

import re
import tomllib
from importlib.metadata import version

from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_stands_in_one_place_and_the_citation_repeats_it():
    stated = PROJECT["project"]["version"]
    assert version("ucudnn") == stated
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == stated
    assert f"## {stated} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_oldest_python_of_the_classifiers_is_the_required_one():
    named = [
        re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", each) for each in PROJECT["project"]["classifiers"]
    ]
    oldest = min(int(match[1]) for match in named if match)
    assert PROJECT["project"]["requires-python"] == f">=3.{oldest}"


def test_an_sdist_holds_every_tracked_file_of_the_project():
    held = {*PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"], "pyproject.toml", ".gitignore"}
    there = {each.name for each in ROOT.iterdir() if not each.name.startswith((".git", ".venv", "."))}
    built = {"build", "dist", "site", "PKG-INFO"}  # what a build leaves, and what an sdist adds
    assert there - built - {each for each in there if each.startswith("__")} <= held


def test_the_handbook_explains_every_extra():
    page = (ROOT / "docs" / "install.md").read_text()
    extras = set(re.findall(r"`([a-z0-9]+)`", "".join(re.findall(r"^\|([^|]*)\|.*\|.*\|$", page, re.M))))
    assert extras == set(PROJECT["project"]["optional-dependencies"])


def test_every_version_has_notes_for_who_upgrades():
    changes, notes = ((ROOT / path).read_text() for path in ("CHANGELOG.md", "docs/upgrading.md"))
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", changes, re.M)
    assert versions
    assert re.findall(r"^## (\d+\.\d+\.\d+)", notes, re.M) == versions
