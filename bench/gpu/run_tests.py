"""All tests that need a GPU, each file in a process of its own, so that none sees what another has left on the GPU.

    python -m bench.gpu.run_tests --out bench/results/gpu/tests.json [FILE ...] [--seconds 580] [--jobs 4]

The results have the GPU, the versions of all libraries, and for each file of tests what passed, failed and was skipped,
the names of what failed with the end of their reports, and seconds. Files that the time did not reach are named.
"""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from bench.tools.results import ROOT, cpu_conditions, save
from bench.tools.script import add_commit, command_line, commit_of, run_main

_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error|errors|deselected)")


def main() -> None:
    """Run the files, and write the results after each of them."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("files", nargs="*", help="files of tests; all of tests/gpu if none is named")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to end")
    parser.add_argument("--jobs", type=int, default=1, help="files at once, whose tests take turns")
    add_commit(parser)
    arguments = parser.parse_args()
    files = arguments.files or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/gpu/**/test_*.py"))
    began, results, one_at_a_time = time.monotonic(), dict[str, Any](), Lock()
    conditions = {**gpu_conditions(), "commit": commit_of(arguments)}

    def run(file: str) -> None:
        left = arguments.seconds - (time.monotonic() - began)
        if left <= 0:
            return
        found = results[file] = tested(file, left)
        missing = [each for each in files if each not in results]
        with one_at_a_time:
            save(arguments.out, {"conditions": conditions, "files": dict(results), "not_reached": missing})
        print(file, {key: value for key, value in found.items() if key != "reports"}, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for _ in pool.map(run, files):
            pass


def gpu_conditions() -> dict[str, str]:
    """Return the GPU, its driver and the versions of all libraries."""
    import torch

    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    packages = cpu_conditions("torch", "cupy-cuda13x", "pytest", "hypothesis", "highspy", "pulp")
    libraries = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return {**packages, **libraries, "gpus": "; ".join(gpus)}


def tested(file: str, seconds: float) -> dict[str, Any]:
    """Return what the tests of a file did in a process of their own, which ends when the time is over."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", "--tb=short", file]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
    last = text.strip().splitlines()[-1] if text.strip() else ""
    found: dict[str, Any] = {kind.rstrip("s"): int(number) for number, kind in _COUNT.findall(last)}
    found |= {"seconds": round(time.monotonic() - began, 1), "status": process.returncode}
    if process.returncode:
        found["names"] = re.findall(r"^FAILED (\S+)", text, re.M)
        found["reports"] = text[-6000:]
    return found


if __name__ == "__main__":
    run_main(main)
