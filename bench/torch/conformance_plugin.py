"""The plugin of pytest with which bench.torch.conformance turns ucudnn on and notes outcomes. Not a script."""

import json
import os
import signal
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

PLUGIN = "TEST_CONFORMANCE"
"""Variable with the options with which the plugin turns ucudnn on, and the folder for its counts, as JSON."""

OUTCOMES = "TEST_CONFORMANCE_OUTCOMES"
"""Variable with the file to which the plugin writes the outcome of each test."""

GPUS = "TEST_CONFORMANCE_GPUS"
"""Variable with the number of GPUs for the workers."""

TEST_SECONDS = "TEST_CONFORMANCE_TEST_SECONDS"
"""Variable with the seconds of processor time after which a test is given up; 0 is never."""

OUT_OF_TIME = "out of time"
"""The outcome of a test that was given up."""

_enabled: Any = None
_written = 0.0


def stand_in_for_expecttest() -> None:
    """Stand in for a package that PyTorch's test helpers import and that tests of convolutions do not use."""
    if find_spec("expecttest") is None:
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


def stand_in_for_removed_names() -> None:
    """Give PyTorch's test helpers the name that files of PyTorch 2.6 import and that newer releases lack."""
    import torch
    from torch.testing._internal import common_cuda

    if not hasattr(common_cuda, "tf32_is_not_fp32"):
        common_cuda.tf32_is_not_fp32 = torch.cuda.is_tf32_supported  # type: ignore[attr-defined]


def pytest_configure(config: Any) -> None:
    """Choose a GPU for this process of pytest, and turn ucudnn on if the environment says so."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get(GPUS, "1"))
    if worker and gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(worker.removeprefix("gw")) % min(gpus, len(visible))]
    stand_in_for_expecttest()
    stand_in_for_removed_names()
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
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Give a test up that takes too long: NumPy's convolutions need minutes for what a GPU does at once."""

    def give_up(*_: object) -> None:
        item.user_properties.append((OUT_OF_TIME, ""))  # the exception may become another on its way
        pytest.skip(OUT_OF_TIME)

    before = signal.signal(signal.SIGPROF, give_up)
    # again every second, because code that PyTorch calls without a way to raise loses the first one
    signal.setitimer(signal.ITIMER_PROF, float(os.environ.get(TEST_SECONDS, "0")), 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


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
        kernels = [(each.problem, each.configuration, each.divided) for each in summary.layers]
        counts: dict[str, object] = {"calls": summary.calls, "planned": len(kernels), "divided": summary.divided}
        counts |= {"left": summary.left, "kernels": kernels}
        counts["past_limit"] = sum(each.calls for each in summary.past_limits)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(counts))


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test at once, so that a run that is cut off keeps its outcomes."""
    path = os.environ.get(OUTCOMES)
    if not path or "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
    outcome = OUT_OF_TIME if (OUT_OF_TIME, "") in map(tuple, report.user_properties) else report.outcome
    text = outcome if outcome == "passed" else f"{outcome}: {str(reason)[:300]}"
    text += "".join(f"\n{what}" for name, what in report.user_properties if name == "computed")
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid.split("::", 1)[-1], text]) + "\n")
