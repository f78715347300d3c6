"""What is published says the same everywhere: version, Pythons, and the files that an sdist needs for its tests."""

import re
import runpy
import sys
import tomllib
from importlib.metadata import version
from types import SimpleNamespace

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


def test_the_author_is_who_holds_the_licence_and_is_cited():
    (author,) = PROJECT["project"]["authors"]
    assert f"Copyright (c) 2026, {author['name']}\n" in (ROOT / "LICENSE").read_text()
    assert f"authors:\n  - name: {author['name']}\n" in (ROOT / "CITATION.cff").read_text()


def built_readme(monkeypatch, source):
    """Return README.md as the metadata of a build has it."""
    plugin = "hatchling.metadata.plugin.interface"  # which only builds need
    monkeypatch.setitem(sys.modules, plugin, SimpleNamespace(MetadataHookInterface=SimpleNamespace))
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["CustomMetadataHook"](root=str(ROOT))
    metadata = {"urls": {"Source": source} if source else {}}
    hook.update(metadata)
    return metadata["readme"]["text"]


def test_on_a_package_index_readme_has_no_link_that_leads_nowhere(monkeypatch):
    assert "readme" in PROJECT["project"]["dynamic"]
    for source in (None, "https://example.org/ucudnn/"):
        text = built_readme(monkeypatch, source)
        targets = re.findall(r"\]\((.*?)\)", text)
        assert all(re.match(r"[a-z]+://", each) for each in targets)
        assert ("[install](https://example.org/ucudnn/blob/HEAD/docs/install.md)" in text) == (source is not None)
        assert ("](https://example.org/ucudnn/raw/HEAD/docs/layers.png)" in text) == (source is not None)
        assert "AlexNet takes 37.1 ms" in text
        assert len(text.splitlines()) == len((ROOT / "README.md").read_text().splitlines())


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
