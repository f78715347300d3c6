"""Caffe's own convolution tests in micro-batches: counts which kernels of each test each policy divides.

    python -m bench.caffe.conformance --caffe CHECKOUT [--folder build/caffe]
    python -m bench.caffe.conformance --program TESTS [--out bench/results/caffe/conformance_gpu.json]

The first form builds Caffe's convolution layer and its tests from a Git repository of Caffe, and runs them on this
host, on the stand-in for cuDNN and CUDA that the tests of this project use. There, an algorithm without workspace is
slow, and a fast one needs workspace in proportion to the mini-batch. So a small limit leads to micro-batches, as with
AlexNet on a GPU. Each mode and policy runs with several limits, because the tests have inputs of different sizes. What
counts is a kernel whose micro-batches use workspace.

The second form runs a program of the tests on the GPU (`python -m bench.caffe.build_tests` builds it). There,
algorithms without workspace are the fastest for such small inputs, so no limit leads to micro-batches. Therefore the
measured times of whole mini-batches are made worse in the database: the plans are forced, and all else is as it is.

Exit status: 0 if all tests pass in each run, and each mode and policy divides a kernel of each test that convolves
(one of the six only sets the layer up).
"""

import json
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.caffe.build_tests import COMMIT, build_tests
from bench.caffe.compare import Runner, micro_batched, plans
from bench.tools.results import RESULTS, ROOT, save
from bench.tools.script import command_line, run_main
from ucudnn.backends import open_backend
from ucudnn.native.build import build
from ucudnn.units import bytes_down

POLICIES = ("powerOfTwo", "all", "adaptive")
MODES = {"WR": "UCUDNN_DEFAULT_WORKSPACE_LIMIT", "WD": "UCUDNN_TOTAL_WORKSPACE_SIZE"}
KIB = 1024
LIMITS = {"WR": (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB), "WD": (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)}
"""Limits in bytes. Each test has a kernel of which one sample fits into one of them, and two samples do not."""

SCALE = 64
"""How many times the bytes of x the stand-in's fast algorithm needs as workspace; limits count in 256 bytes."""

WORSE_MS = 1e6
"""What a whole mini-batch takes longer in a database that forces micro-batches."""

COUNTS = ("planned", "divided", "divided with workspace")
"""What is counted in each test."""

WITHOUT_CONVOLUTION = "TestSetupCuDNN"
"""The test that only sets the layer up."""


def counted(text: str) -> dict[str, dict[str, int]]:
    """Return for each test how many kernels it planned, how many in micro-batches, and how many with workspace.

    Args:
        text: output of the tests, with the lines of UCUDNN_VERBOSE.
    """
    found = {}
    for part in re.split(r"^\[ RUN      \] ", text, flags=re.MULTILINE)[1:]:
        said = [line for line in plans(part) if not line.startswith("plain")]
        name = re.sub(r"^\w+/(\d)\.", r"\1.", part.split()[0])
        with_workspace = [line for line in said if not line.endswith("workspace 0 bytes")]
        found[name] = {
            "planned": len(said),
            "divided": micro_batched(said),
            "divided with workspace": micro_batched(with_workspace),
        }
    return found


def force(database: Path) -> None:
    """Make the times of whole mini-batches, which have two samples in each test, worse than all others."""
    with closing(sqlite3.connect(database)) as connection, connection:
        whole = [
            (key,)
            for key, problem in connection.execute("SELECT key, problem FROM problems")
            if json.loads(problem)["batch"] == 2
        ]
        command = f"UPDATE measurements SET time_ms = time_ms + {WORSE_MS} WHERE problem = ? AND time_ms < {WORSE_MS}"
        connection.executemany(command, whole)


class Conformance:
    """Runs the tests under each mode and policy.

    Args:
        runner: runs programs.
        program: the program of the tests.
    """

    def __init__(self, runner: Runner, program: Path) -> None:
        self._runner = runner
        self._program = program

    def within_limits(self) -> Iterator[dict[str, Any]]:
        """Yield the results of plain cuDNN and of each mode, policy and limit."""
        yield self.run("plain", {"UCUDNN_PLAIN": "1"})
        for mode, variable in MODES.items():
            for policy in POLICIES:
                for limit in LIMITS[mode]:
                    variables = {"UCUDNN_BATCH_SIZE_POLICY": policy, variable: str(limit)}
                    yield self.run(f"{mode} {policy}, {bytes_down(limit)}", variables, mode=mode, policy=policy)

    def forced(self, database: Path) -> Iterator[dict[str, Any]]:
        """Yield the results of plain cuDNN and of each mode and policy, with a database that forces micro-batches."""
        yield self.run("plain", {"UCUDNN_PLAIN": "1"})
        for mode, variable in MODES.items():
            for policy in POLICIES:
                variables = {"UCUDNN_BATCH_SIZE_POLICY": policy, variable: "64MiB"}
                for _ in range(2):  # the first run measures, and after it what was not measured before
                    self.run(f"measure for {mode} {policy}", variables)
                    force(database)
                yield self.run(f"{mode} {policy}, forced", variables, mode=mode, policy=policy)

    def run(self, name: str, variables: Mapping[str, str], **labels: str) -> dict[str, Any]:
        """Run the tests once."""
        command = [str(self._program), "--gtest_filter=CuDNNConvolutionLayerTest*", "0"]
        text, status, _ = self._runner.run(name, dict(variables), command, 300)
        passed = re.search(r"\[  PASSED  \] (\d+) test", text)
        tests = counted(text)
        answer: dict[str, Any] = {
            "name": name,
            **labels,
            "status": status,
            "passed": int(passed[1]) if passed else 0,
            "failed": sorted(set(re.findall(r"\[  FAILED  \] (\w+/\d\.\w+)", text))),
            "plain": [line for line in plans(text) if line.startswith("plain")][:3],
            **{kind: {test: each[kind] for test, each in tests.items()} for kind in COUNTS},
        }
        print(f"{name}: {answer['passed']} passed, divided {sum(answer['divided'].values())}", flush=True)
        return answer


def most_divided(runs: Sequence[Mapping[str, Any]], kind: str) -> dict[str, dict[str, int]]:
    """Return for each mode and policy the most kernels that a run divides, for each test that convolves.

    Args:
        runs: results of `Conformance.run`.
        kind: one of COUNTS.
    """
    found: dict[str, dict[str, int]] = {}
    for run in runs:
        if "mode" in run:
            tests = found.setdefault(f"{run['mode']} {run['policy']}", {})
            for test, count in run[kind].items():
                if not test.endswith(WITHOUT_CONVOLUTION):
                    tests[test] = max(count, tests.get(test, 0))
    return found


def is_met(runs: Sequence[Mapping[str, Any]], kind: str) -> bool:
    """Tell whether all tests pass in each run, on no plain cuDNN, and each mode and policy divides each test."""
    well = all(run["passed"] and not (run["status"] or run["failed"] or run["plain"]) for run in runs)
    found = most_divided(runs, kind)
    return (
        well
        and len(found) == len(MODES) * len(POLICIES)
        and all(tests and min(tests.values()) > 0 for tests in found.values())
    )


def on_host(libraries: Path) -> dict[str, str]:
    """Return variables with which a program finds the stand-ins for cuDNN, CUDA and CuPy."""
    return {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'native' / 'stand_in'}",
        "LD_LIBRARY_PATH": str(libraries),
        "STUB_WORKSPACE_SCALE": str(SCALE),
        "UCUDNN_DATABASE": "off",
    }


def run_on_host(checkout: Path, folder: Path) -> dict[str, Any]:
    """Build the tests and run them on the stand-in."""
    tests = build_tests(checkout, folder)
    runner = Runner(sys.executable, on_host(tests.libraries), folder / "conformance.txt", folder / "unused.db")
    conditions = {"device": "stand-in for cuDNN and CUDA, on host memory", "caffe": COMMIT}
    return answer_of(conditions, Conformance(runner, tests.program).within_limits(), "divided with workspace")


def run_on_gpu(program: Path, folder: Path) -> dict[str, Any]:
    """Run a program of the tests on the GPU, with a library that is built for this Python."""
    library = build(folder / "lib")
    with TemporaryDirectory() as name:
        database = Path(name) / "measurements.db"
        runner = Runner(sys.executable, {}, folder / "conformance_gpu.txt", database)
        runner.environment["LD_LIBRARY_PATH"] = f"{library.parent}:{runner.environment['LD_LIBRARY_PATH']}"
        conditions = {**open_backend("cudnn").conditions(), "plans": "forced by worse times of whole mini-batches"}
        return answer_of(conditions, Conformance(runner, program).forced(database), "divided")


def answer_of(conditions: Mapping[str, str], runs: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return what is stored."""
    found = list(runs)
    return {
        "conditions": conditions,
        "met": is_met(found, kind),
        f"most {kind}": most_divided(found, kind),
        "runs": found,
    }


def main() -> bool:
    """Build or take the tests, run them, and store what is counted."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument(
        "--caffe", type=Path, help="a Git repository of Caffe, whose tests are built and run on this host"
    )
    parser.add_argument("--program", type=Path, help="a program of Caffe's convolution tests, which is run on the GPU")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "caffe", help="folder for what is built")
    parser.add_argument("--out", type=Path, help="file of the results (bench/results/caffe/conformance[_gpu].json)")
    options = parser.parse_args()
    if (options.caffe is None) == (options.program is None):
        parser.error("give --caffe or --program")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.caffe is not None:
        answer = run_on_host(options.caffe, folder)
        name = "conformance.json"
    else:
        answer = run_on_gpu(options.program.resolve(), folder)
        name = "conformance_gpu.json"
    save(options.out or RESULTS / "caffe" / name, answer)
    print("met" if answer["met"] else "MISSED", flush=True)
    return bool(answer["met"])


if __name__ == "__main__":
    run_main(main)
