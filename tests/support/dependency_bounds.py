"""The lowest allowed version of each dependency, as constraints for pip, from the ranges in pyproject.toml.

    python -m tests.support.dependency_bounds lowest     print a line such as numpy==2.0 for each dependency
    python -m tests.support.dependency_bounds newest     print nothing: pip takes the newest by itself

`.ci/dependency_bounds` installs an end of the ranges in a fresh environment and runs tests there.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("plot", "solvers", "test")
"""The extras that an environment for tests has, besides the dependencies themselves."""


def requirements(project: Mapping[str, Any], extras: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the range of each dependency and of those of some extras, without the package itself."""
    extra = project["optional-dependencies"]
    for text in [*project["dependencies"], *(each for name in extras for each in extra[name])]:
        match = re.fullmatch(r"(\w[\w.-]*)(?:\[[\w,-]+\])?\s*(.*)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a requirement that is understood here")
        if match[1] != project["name"] and match[2]:
            yield match[1], match[2]


def constraints(project: Mapping[str, Any], end: str, extras: Sequence[str] = EXTRAS) -> list[str]:
    """Return constraints for pip that choose an end of all ranges.

    Args:
        project: the table `project` of pyproject.toml.
        end: 'lowest' or 'newest'.
        extras: the extras whose requirements count too.

    Raises:
        ValueError: if a range has no lower end.
    """
    if end == "newest":
        return []
    found = []
    for name, text in requirements(project, extras):
        lowest = re.search(r">=\s*([\w.]+)", text)
        if lowest is None:
            raise ValueError(f"{name}{text} has no lowest version")
        found.append(f"{name}=={lowest[1]}")
    return found


def main() -> None:
    """Print the constraints of an end."""
    if sys.argv[1:] not in (["lowest"], ["newest"]):
        sys.exit("give lowest or newest")
    with PYPROJECT.open("rb") as file:
        project = tomllib.load(file)["project"]
    sys.stdout.write("".join(f"{line}\n" for line in constraints(project, sys.argv[1])))


if __name__ == "__main__":
    main()
