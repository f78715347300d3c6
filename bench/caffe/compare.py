"""Caffe with UcudnnHandle_t on the GPU: its own convolution tests, `caffe time` on AlexNet 256, `caffe train`.

    python -m bench.caffe.compare --caffe build/tools/caffe --tests build/test/test_convolution_layer.testbin
                          [--out bench/results/caffe] [--only tests,time,train] [--python PYTHON] [--iterations 20]

One binary runs with plain cuDNN (UCUDNN_PLAIN=1) and with the handle under each policy, WR and WD, in turn. Its output
goes to OUT/time.txt and so on, the results to OUT/time.json and so on. `caffe_patches/check.sh` builds Caffe and runs
this script.
"""

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from math import fsum, inf, isnan, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.caffe.net import alexnet, small, solver, write_patterns
from bench.tools.results import RESULTS, ROOT, save
from bench.tools.script import command_line, run_main
from ucudnn.backends import open_backend

TESTS = {
    "plain": {"UCUDNN_PLAIN": "1"},
    "WR undivided": {"UCUDNN_BATCH_SIZE_POLICY": "undivided"},
    "WR powerOfTwo": {"UCUDNN_BATCH_SIZE_POLICY": "powerOfTwo"},
    "WR all": {"UCUDNN_BATCH_SIZE_POLICY": "all"},
    "WR all, 4 KiB": {"UCUDNN_BATCH_SIZE_POLICY": "all", "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "4KiB"},
    "WD undivided": {"UCUDNN_BATCH_SIZE_POLICY": "undivided", "UCUDNN_TOTAL_WORKSPACE_SIZE": "64MiB"},
    "WD powerOfTwo": {"UCUDNN_BATCH_SIZE_POLICY": "powerOfTwo", "UCUDNN_TOTAL_WORKSPACE_SIZE": "64MiB"},
    "WD all": {"UCUDNN_BATCH_SIZE_POLICY": "all", "UCUDNN_TOTAL_WORKSPACE_SIZE": "64MiB"},
}
LEGACY = {"UCUDNN_BACKEND": "cudnn:legacy"}
TIMES = {
    "plain, 8 MiB": {"UCUDNN_PLAIN": "1"},
    "undivided, 8 MiB": {"UCUDNN_BATCH_SIZE_POLICY": "undivided"},
    "powerOfTwo, 8 MiB": {},
    "plain, 64 MiB": {"UCUDNN_PLAIN": "1", "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "64MiB"},
    "undivided, 64 MiB": {"UCUDNN_BATCH_SIZE_POLICY": "undivided", "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "64MiB"},
    "powerOfTwo, 64 MiB": {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": "64MiB"},
    "legacy undivided, 64 MiB": {
        **LEGACY,
        "UCUDNN_BATCH_SIZE_POLICY": "undivided",
        "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "64MiB",
    },
    "legacy powerOfTwo, 64 MiB": {**LEGACY, "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "64MiB"},
    "WD, 480 MiB": {"UCUDNN_TOTAL_WORKSPACE_SIZE": "480MiB"},
}
TRAININGS = {
    "plain": {"UCUDNN_PLAIN": "1"},
    "plain again": {"UCUDNN_PLAIN": "1"},
    "plain, no workspace": {"UCUDNN_PLAIN": "1", "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "0"},
    "powerOfTwo": {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": "8MiB"},
    "WD": {"UCUDNN_TOTAL_WORKSPACE_SIZE": "24MiB"},
}


class Runner:
    """Runs programs and keeps their output.

    Args:
        python: the Python that plans, or its libpython.
        variables: additional environment variables.
        raw: file for the output.
        database: file of measurements.
    """

    def __init__(self, python: str, variables: dict[str, str], raw: Path, database: Path) -> None:
        folders = [str(folder) for folder in nvidia_libraries()]
        inherited = os.environ.get("LD_LIBRARY_PATH")
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("UCUDNN_")},
            "LD_LIBRARY_PATH": ":".join([*folders, *([inherited] if inherited else [])]),
            "PYTHONPATH": ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "UCUDNN_PYTHON": python,
            "UCUDNN_DATABASE": str(database),
            "UCUDNN_VERBOSE": "1",
            "GLOG_logtostderr": "1",
            **variables,
        }
        self._raw = raw.open("w")

    def run(self, name: str, variables: dict[str, str], command: list[str], limit_s: float) -> tuple[str, int, float]:
        """Run a program; return its output, its exit status (124 after `limit_s` seconds) and the seconds."""
        begin = perf_counter()
        try:
            done = subprocess.run(
                command,
                env=self.environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
            text, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            text = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
            status = 124
        took = perf_counter() - begin
        words = " ".join(f"{key}={value}" for key, value in variables.items())
        self._raw.write(f"### {name}: {words} {' '.join(command)} -> {status} in {took:.1f} s\n{text}\n")
        self._raw.flush()
        return text, status, took


def nvidia_libraries() -> list[Path]:
    """Return the folders of libraries in NVIDIA's wheels."""
    spec = find_spec("nvidia")
    roots = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return [folder for root in roots for folder in sorted(root.glob("*/lib"))]


def plans(text: str) -> list[str]:
    """Return the lines of the handle, which name its plans."""
    return [line.removeprefix("ucudnn: ") for line in text.splitlines() if line.startswith("ucudnn: ")]


def micro_batched(said: list[str]) -> int:
    """Return the number of plans with more than one micro-batch."""
    return sum(bool(re.search(r": (?:[2-9]|\d\d+)x| \+ ", line)) for line in said)


def run_tests(runner: Runner, program: str, folder: Path) -> Iterator[dict[str, object]]:
    """Run Caffe's convolution tests under each policy, and again without TF32 if tests fail.

    TF32 rounds more than the tests allow. A kernel that is chosen for its speed may multiply as TF32 although the
    kernel of cuDNN's heuristics does not. Yields the results so far, after each run.
    """
    found: dict[str, object] = {}
    for name, variables in TESTS.items():
        answer = one_test(runner, f"tests, {name}", program, variables)
        if answer["failed"] or answer["status"]:
            answer["without TF32"] = one_test(
                runner, f"tests, {name}, without TF32", program, variables | without_tf32(folder)
            )
        found[name] = answer
        print(name, answer, flush=True)
        yield {"tests": found}


def without_tf32(folder: Path) -> dict[str, str]:
    """Return variables that turn TF32 off, with another database, because times without TF32 differ."""
    return {"NVIDIA_TF32_OVERRIDE": "0", "UCUDNN_DATABASE": str(folder / "without_tf32.db")}


def one_test(runner: Runner, name: str, program: str, variables: dict[str, str]) -> dict[str, Any]:
    """Run Caffe's convolution tests once."""
    text, status, took = runner.run(name, variables, [program, "--gtest_filter=CuDNNConvolutionLayerTest*", "0"], 240)
    passed = re.search(r"\[  PASSED  \] (\d+) test", text)
    said = plans(text)
    return {
        "passed": int(passed[1]) if passed else 0,
        "failed": sorted(set(re.findall(r"\[  FAILED  \] (\w+/\d\.\w+)", text))),
        "status": status,
        "seconds": round(took, 1),
        "plans": len(said),
        "in micro-batches": micro_batched(said),
        "plain": [line for line in said if line.startswith("plain")][:3],
    }


def layer_times(text: str) -> dict[str, float]:
    """Return the milliseconds in the lines of `caffe time`."""
    found = {
        f"{layer} {direction}": float(value)
        for layer, direction, value in re.findall(r"\s(\S+)\s+(forward|backward): ([\d.e+-]+) ms", text)
    }
    for name in ("Average Forward pass", "Average Backward pass", "Average Forward-Backward"):
        value = re.search(rf"{name}: ([\d.e+-]+) ms", text)
        if value:
            found[name] = float(value[1])
    return found


def run_times(runner: Runner, caffe: str, folder: Path, iterations: int, rounds: int) -> Iterator[dict[str, object]]:
    """Time AlexNet 256, all ways in turn; yield the medians so far, after each run."""
    net = folder / "alexnet.prototxt"
    net.write_text(alexnet(256))
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in TIMES}
    said: dict[str, list[str]] = {}
    for _ in range(rounds):
        for name, variables in TIMES.items():
            command = [caffe, "time", f"-model={net}", "-gpu=0", f"-iterations={iterations}"]
            text, status, took = runner.run(f"time, {name}", variables, command, 300)
            times = layer_times(text)
            said.setdefault(name, plans(text))
            if "Average Forward-Backward" in times:
                samples[name].append(times)
            print(name, status, f"{took:.0f} s", times.get("Average Forward-Backward"), flush=True)
            yield {"times": median_times(samples, said)}


def median_times(samples: dict[str, list[dict[str, float]]], said: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return the median of each layer's times, their sum over the convolutions, and the plans of the first run."""
    found: dict[str, dict[str, Any]] = {}
    for name, each in samples.items():
        if each:
            layers = {key: statistics.median(times[key] for times in each) for key in each[0]}
            convolutions = sum(value for key, value in layers.items() if key.startswith("conv"))
            found[name] = {
                "convolutions ms": round(convolutions, 3),
                "iteration ms": layers["Average Forward-Backward"],
                "iterations of each run ms": [times["Average Forward-Backward"] for times in each],
                "runs": len(each),
                "layers ms": layers,
                "plans": said[name],
            }
    return found


def run_trainings(runner: Runner, caffe: str, folder: Path, iterations: int) -> Iterator[dict[str, object]]:
    """Train the small CNN in all ways, and measure the distance of the losses from those of the first run.

    The distance of other plain runs shows how far two runs are apart anyway. Yields the results so far, after each run.
    """
    write_patterns(folder)
    (folder / "small.prototxt").write_text(small(folder, 128))
    (folder / "solver.prototxt").write_text(solver(folder / "small.prototxt", iterations, folder / "out"))
    found: dict[str, object] = {}
    # Within the limit, plain cuDNN may have no algorithm with TF32, and then its losses differ more.
    second = {f"{name}, without TF32": variables | without_tf32(folder) for name, variables in TRAININGS.items()}
    for runs in (TRAININGS, second):
        yield from train_in_turn(runner, caffe, folder, iterations, runs, found)


def train_in_turn(
    runner: Runner,
    caffe: str,
    folder: Path,
    iterations: int,
    runs: Mapping[str, dict[str, str]],
    found: dict[str, Any],
) -> Iterator[dict[str, object]]:
    """Train once with each handle, and compare with the first."""
    first: list[float] = []
    for name, variables in runs.items():
        text, status, took = runner.run(
            f"train, {name}", variables, [caffe, "train", f"-solver={folder / 'solver.prototxt'}", "-gpu=0"], 240
        )
        losses = [float(value) for value in re.findall(r"Iteration \d+ \(.*?, loss = (\S+)", text)]
        first = first or losses
        whole = len(losses) == len(first) == iterations
        apart = [inf if isnan(one) or isnan(other) else abs(one - other) for one, other in zip(first, losses)]  # noqa: B905
        found[name] = {
            "status": status,
            "greatest difference from plain": max(apart) if whole else None,
            "root mean square difference": sqrt(fsum(each**2 for each in apart) / len(apart)) if whole else None,
            "in micro-batches": micro_batched(plans(text)),
            "losses": losses,
        }
        known = {key: value for key, value in found[name].items() if key != "losses"}
        print(name, f"{took:.0f} s", len(losses), losses[:1], losses[-1:], known, flush=True)
        yield {"train": found}


def main() -> None:
    """Run all parts, or those of --only."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("--caffe", required=True, help="the program caffe")
    parser.add_argument("--tests", help="the program of Caffe's convolution tests")
    parser.add_argument("--out", type=Path, default=RESULTS / "caffe", help="folder (bench/results/caffe)")
    parser.add_argument("--only", default="time,tests,train", help="parts to run (%(default)s)")
    parser.add_argument("--python", default=sys.executable, help="the Python that plans: an executable or a libpython")
    parser.add_argument("--variable", action="append", default=[], metavar="NAME=VALUE", help="for the programs")
    parser.add_argument("--iterations", type=int, default=20, help="iterations of `caffe time` (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way of `caffe time` (%(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    variables = dict(each.split("=", 1) for each in options.variable)
    conditions = dict(open_backend("cudnn").conditions())
    with TemporaryDirectory() as name:
        folder = Path(name)
        for what in options.only.split(","):
            raw = options.out / f"{what}.txt"
            runner = Runner(options.python, variables, raw, folder / "measurements.db")
            if what == "tests":
                answers = run_tests(runner, options.tests, folder)
            elif what == "time":
                answers = run_times(runner, options.caffe, folder, options.iterations, options.rounds)
            else:
                answers = run_trainings(runner, options.caffe, folder, 200)
            for found in answers:
                save(options.out / f"{what}.json", {"conditions": conditions, **found})


if __name__ == "__main__":
    run_main(main)
