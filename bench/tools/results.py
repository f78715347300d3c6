"""The folder of results, and the one way in which scripts write JSON files into it."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ucudnn.backends.cpu.backend import CpuBackend

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def load(path: Path) -> Any:
    """Return what a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def save(path: Path | None, answer: object) -> None:
    """Write a JSON file, which other processes see whole or not at all; write nothing where there is no path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json_text(answer) + "\n", encoding="utf-8")
    unfinished.replace(path)


def save_case(path: Path | None, name: str, case: Mapping[str, object]) -> None:
    """Write one case into a file of several: the case replaces its predecessor of that name, the others stay."""
    if path is not None:
        with _locked(path):
            known = load(path)["cases"] if path.exists() else {}
            save(path, {"cases": {**known, name: case}})


def save_run(path: Path | None, run: Mapping[str, object]) -> None:
    """Add a run to a file of several; those under other conditions go, because a range over them would say nothing."""
    if path is not None:
        with _locked(path):
            runs = load(path)["runs"] if path.exists() else []
            save(path, {"runs": [*(each for each in runs if each["conditions"] == run["conditions"]), run]})


def json_text(value: object, depth: int = 0) -> str:
    """Return JSON in which a list or object without others inside takes one line, so that changes are readable."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    if isinstance(value, str) or not any(_is_container(each) for each in inside):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        lines = [
            f"{json.dumps(str(key), ensure_ascii=False)}: {json_text(each, depth + 1)}" for key, each in value.items()
        ]
    else:
        lines = [json_text(each, depth + 1) for each in inside]
    first, last = "{}" if isinstance(value, Mapping) else "[]"
    indent = " " * (depth + 1)
    return f"{first}\n{indent}" + f",\n{indent}".join(lines) + f"\n{' ' * depth}{last}"


def _is_container(value: object) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing files of the same folder inside the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def package_version(package: str) -> str:
    """Return the version of a package; 'source tree' if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "source tree"


def cpu_conditions(*packages: str) -> dict[str, str]:
    """Return this machine's processor, its number of CPUs, and the versions of Python, NumPy and some packages."""
    return {**CpuBackend().conditions(), **{package: package_version(package) for package in packages}}
