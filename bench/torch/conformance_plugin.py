"""The plugin of pytest with which bench.torch.conformance turns ucudnn on and notes outcomes. Not a script."""

import json
import os
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import pytest

PLUGIN = "UCUDNN_CONFORMANCE"
"""Variable with the options with which the plugin turns ucudnn on, and the folder for its counts, as JSON."""

OUTCOMES = "UCUDNN_CONFORMANCE_OUTCOMES"
"""Variable with the file to which the plugin writes the outcome of each test."""

GPUS = "UCUDNN_CONFORMANCE_GPUS"
"""Variable with the number of GPUs for the workers."""

_enabled: Any = None
_written = 0.0


def stand_in_for_expecttest() -> None:
    """Stand in for a package that PyTorch's test helpers import and that tests of convolutions do not use."""
    if find_spec("expecttest") is None:
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


def pytest_configure(config: Any) -> None:
    """Choose a GPU for this process of pytest, and turn ucudnn on if the environment says so."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get(GPUS, "1"))
    if worker and gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(worker.removeprefix("gw")) % min(gpus, len(visible))]
    stand_in_for_expecttest()
    wanted = json.loads(os.environ.get(PLUGIN, "{}"))
    if wanted:
        global _enabled
        import ucudnn.torch
        from ucudnn import Effort

        _enabled = ucudnn.torch.enable(effort=Effort(warmup=0, repeats=1, time_limit_ms=2), **wanted["options"])


def pytest_unconfigure(config: Any) -> None:
    """Write the counts of this process."""
    write_counts()


_COMPUTED = pytest.StashKey[Counter[tuple[str, str]]]()


def pytest_runtest_setup(item: Any) -> None:
    """Note how convolutions were computed until now."""
    item.stash[_COMPUTED] = computed()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Add to the report of a failed test how its convolutions were computed."""
    report: Any = yield
    if report.failed:
        before = item.stash.get(_COMPUTED, Counter())
        report.user_properties += [("computed", f"{problem} by {by}") for problem, by in computed() - before]
    return report


def computed() -> Counter[tuple[str, str]]:
    """Return how often this process computed each convolution by each configuration."""
    layers = _enabled.report().layers if _enabled is not None else ()
    return Counter({(each.problem, each.configuration): each.calls for each in layers})


def pytest_runtest_teardown(item: Any) -> None:
    """Write the counts every 5 seconds, because workers end without notice when time is up."""
    global _written
    if perf_counter() > _written + 5:
        write_counts()
        _written = perf_counter()


def write_counts() -> None:
    """Write how many convolutions this process sent through handles, and how many it left to PyTorch."""
    if _enabled is not None:
        summary = _enabled.report()
        folder = Path(json.loads(os.environ[PLUGIN])["folder"])
        counts = {"calls": summary.calls, "planned": len(summary.layers), "left": summary.left}
        (folder / f"{os.getpid()}.json").write_text(json.dumps(counts))


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test at once, so that a run that is cut off keeps its outcomes."""
    path = os.environ.get(OUTCOMES)
    if not path or "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
    text = report.outcome if report.passed else f"{report.outcome}: {str(reason)[:300]}"
    text += "".join(f"\n{what}" for name, what in report.user_properties if name == "computed")
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid.split("::", 1)[-1], text]) + "\n")
