"""The ranges of dependencies: the lowest versions are read from pyproject.toml, and known bad versions are excluded."""

import tomllib
from importlib.metadata import version

import pytest

from tests.support.dependency_bounds import PYPROJECT, constraints, requirements

PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]


def test_every_dependency_has_its_lowest_version():
    found = dict(line.split("==") for line in constraints(PROJECT, "lowest"))
    assert found["numpy"] == "2.0"
    assert found["typer"] == "0.26"
    assert {"pytest", "pytest-xdist", "hypothesis", "matplotlib", "highspy"} <= set(found)
    assert {"pulp", "rich", "platformdirs"} <= set(found)
    assert "ucudnn" not in found
    assert constraints(PROJECT, "newest") == []


def test_a_range_without_a_lower_end_is_refused():
    project = {"name": "own", "dependencies": ["numpy<3"], "optional-dependencies": {}}
    with pytest.raises(ValueError, match=r"numpy<3 has no lowest version"):
        constraints(project, "lowest", ())
    project["dependencies"] = ["numpy @ file:///x"]
    with pytest.raises(ValueError, match="no lowest version"):
        constraints(project, "lowest", ())
    project["dependencies"] = ["-e numpy"]
    with pytest.raises(ValueError, match="is not a requirement"):
        constraints(project, "lowest", ())


def test_versions_of_typer_that_lose_options_are_excluded():
    text = dict(requirements(PROJECT, ()))["typer"]
    bad = {f"0.27.{number}" for number in range(4)}
    assert {f"!={each}" for each in bad} <= set(text.split(","))
    assert version("typer") not in bad
