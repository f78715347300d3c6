"""PyTorch's own convolution tests, with ucudnn off and on: every difference is listed.

    python -m bench.torch.conformance test_convolution.py                 # PyTorch's test/nn/test_convolution.py
    python -m bench.torch.conformance test_convolution.py --workers 8     # with pytest-xdist
    python -m bench.torch.conformance test_convolution.py --workers 20 --gpus 2 -k "not 64bit_indexing and not broken"
    python -m bench.torch.conformance test_convolution.py --seconds 120   # what there is time for
    python -m bench.torch.conformance test_convolution.py -k Conv2d --backend cpu

The file must be that of the installed release; it is not part of its wheel. `expecttest`, which it imports and does not
use, is stood in for by unittest where it is not installed. Tests that need a network fail either way. Benchmarks are
short: what counts is what is computed, not how fast. Both ways run at the same time, in processes of their own; with
`--policy all`, many small convolutions are divided.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import ModuleType
from typing import Any

import pytest

from bench.tools.results import RESULTS, ROOT, save_case

PLUGIN = "UCUDNN_CONFORMANCE"
"""Says what the plugin, this file in pytest's process, turns on, and where it writes what went through handles."""

OUTCOMES = "UCUDNN_CONFORMANCE_OUTCOMES"
"""Names the file to which the plugin writes the outcome of each test."""

GPUS = "UCUDNN_CONFORMANCE_GPUS"
"""Says over how many GPUs workers are spread."""

_enabled: Any = None
_written = 0.0


def stand_in_for_expecttest() -> None:
    """Let PyTorch's helpers for tests be imported without a package that convolutions' tests do not use."""
    if find_spec("expecttest") is None:
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


def pytest_configure(config: Any) -> None:
    """Turn ucudnn on in a process of pytest, if that is wanted, on a GPU of its own among several."""
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
    """Write what went through handles."""
    write_counts()


_COMPUTED = pytest.StashKey[Counter[tuple[str, str]]]()


def pytest_runtest_setup(item: Any) -> None:
    """Note what computed convolutions until now."""
    item.stash[_COMPUTED] = computed()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Note what computed the convolutions of a test that fails."""
    report: Any = yield
    if report.failed:
        before = item.stash.get(_COMPUTED, Counter())
        report.user_properties += [("computed", f"{problem} by {by}") for problem, by in computed() - before]
    return report


def computed() -> Counter[tuple[str, str]]:
    """Return how often which convolution was computed by what, by this process so far."""
    layers = _enabled.report().layers if _enabled is not None else ()
    return Counter({(each.problem, each.configuration): each.calls for each in layers})


def pytest_runtest_teardown(item: Any) -> None:
    """Write it now and then, too: where time is up, workers end without notice."""
    global _written
    if perf_counter() > _written + 5:
        write_counts()
        _written = perf_counter()


def write_counts() -> None:
    """Write what this process sent through handles."""
    if _enabled is not None:
        summary = _enabled.report()
        folder = Path(json.loads(os.environ[PLUGIN])["folder"])
        counts = {"calls": summary.calls, "planned": len(summary.layers), "left": summary.left}
        (folder / f"{os.getpid()}.json").write_text(json.dumps(counts))


def pytest_runtest_logreport(report: Any) -> None:
    """Write what came of a test at once, so that a run that is cut off keeps what it has."""
    path = os.environ.get(OUTCOMES)
    if not path or "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
    text = report.outcome if report.passed else f"{report.outcome}: {str(reason)[:300]}"
    text += "".join(f"\n{what}" for name, what in report.user_properties if name == "computed")
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid.split("::", 1)[-1], text]) + "\n")


def run(arguments: argparse.Namespace, folder: Path, *, on: bool) -> tuple[dict[str, str], bool]:
    """Run the tests one way; return the outcome of each, and whether there was time for all of them."""
    outcomes = folder / ("on.jsonl" if on else "off.jsonl")
    tests = arguments.tests.resolve()
    command = [sys.executable, "-m", "pytest", "-p", "bench.torch.conformance", "-q", "--no-header", "-c", os.devnull]
    command += ["--rootdir", str(tests.parent), str(tests)]
    if arguments.workers:
        command += ["-n", str(arguments.workers)]
    if arguments.keyword:
        command += ["-k", arguments.keyword]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        OUTCOMES: str(outcomes),
        GPUS: str(arguments.gpus),
    }
    if arguments.workers:
        environment.setdefault("OMP_NUM_THREADS", "1")  # of each: there are as many workers as cores, about
    if on:
        options = {"backend": arguments.backend, "workspace_limit": arguments.limit, "policy": arguments.policy}
        environment[PLUGIN] = json.dumps({"options": options, "folder": str(folder)})
    with (folder / f"{outcomes.stem}.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        whole = True
        try:
            process.wait(arguments.seconds)
        except subprocess.TimeoutExpired:
            whole = False
            process.send_signal(signal.SIGINT)  # upon which pytest ends by itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read().strip()
    print(f"ucudnn {'on' if on else 'off'}: {text.splitlines()[-1] if text else ''}", flush=True)
    if not outcomes.exists() or (whole and process.returncode not in (0, 1)):  # 1: some tests failed
        raise SystemExit(f"error: pytest ended with {process.returncode}:\n{text[-4000:]}")
    return dict(json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()), whole


def main() -> None:
    """Run the tests twice, list the differences and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="PyTorch's test/nn/test_convolution.py")
    parser.add_argument("--case", default="release", help="name of what the tests are of, in the results (%(default)s)")
    parser.add_argument("-k", dest="keyword", help="only tests whose names fit, as pytest takes it")
    parser.add_argument("--seconds", type=float, help="end both runs after so long, and tell what there is")
    parser.add_argument("--workers", type=int, default=0, help="processes each way, by pytest-xdist")
    parser.add_argument("--gpus", type=int, default=1, help="spread the workers over so many")
    parser.add_argument("--limit", default="64MiB")
    parser.add_argument("--policy", default="powerOfTwo")
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out")
    parser.add_argument("--out", type=Path, help="default: bench/results/torch/conformance.json; nothing for cpu")
    arguments = parser.parse_args()
    if not arguments.tests.exists():
        parser.error(f"{arguments.tests} is not there")
    with TemporaryDirectory() as name:
        folder = Path(name)
        with ThreadPoolExecutor() as pool:
            ways = [pool.submit(run, arguments, folder, on=each) for each in (False, True)]
        (off, off_whole), (on, on_whole) = (way.result() for way in ways)
        counts: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for path in folder.glob("*.json"):
            each = json.loads(path.read_text())
            counts.update({"calls": each["calls"], "planned": each["planned"]})
            left.update(each["left"])
    kinds = [dict(Counter(text.split(":")[0] for text in outcomes.values())) for outcomes in (off, on)]
    differences = {
        test: {"off": off.get(test, "not run"), "on": on.get(test, "not run")}
        for test in sorted(off.keys() | on.keys() if off_whole and on_whole else off.keys() & on.keys())
        if off.get(test, "").split(":")[0] != on.get(test, "").split(":")[0]
    }
    print(f"off: {kinds[0]}\non:  {kinds[1]}\nthrough ucudnn: {dict(counts)}, left to PyTorch: {sum(left.values())}")
    for reason, count in left.most_common():
        print(f"  {count} x {reason[:160]}")
    print(f"{len(differences)} differences, 0 required")
    for test, each in differences.items():
        print(f"  {test}\n    off: {each['off']}\n    on:  {each['on']}")
    from bench.torch.models import conditions

    out = arguments.out or (None if arguments.backend == "cpu" else RESULTS / "torch/conformance.json")
    if out is not None:
        import torch

        answer = {
            "cut_off": not (off_whole and on_whole),
            "compared": len(off.keys() & on.keys()),
            "conditions": conditions(torch.device("cpu" if arguments.backend == "cpu" else "cuda")),
            "off": kinds[0],
            "on": kinds[1],
            "through_ucudnn": dict(counts),
            "left": dict(left),
            "differences": differences,
        }
        save_case(out, arguments.case, answer)


if __name__ == "__main__":
    main()
