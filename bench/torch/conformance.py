r"""PyTorch's own convolution tests, with ucudnn off and on; lists every difference and every configuration.

    python -m bench.torch.conformance test_convolution.py                 PyTorch's test/nn/test_convolution.py
    python -m bench.torch.conformance test_convolution.py --workers 8     with pytest-xdist
    python -m bench.torch.conformance test_convolution.py --workers 20 --gpus 2 -k "not 64bit_indexing and not broken"
    python -m bench.torch.conformance test_convolution.py --seconds 120   as many tests as there is time for
    python -m bench.torch.conformance test_convolution.py -k Conv2d --backend cpu
    python -m bench.torch.conformance test_convolution.py --limit 64MiB --limit 1MiB --limit 0 \
        --policy powerOfTwo --policy all --together 3 --workers 5         each limit with each policy

The file should be that of the installed release, whose wheel lacks it; files since release 2.6 work. The tests import
`expecttest` and do not use it; unittest stands in if it is not installed. Tests that need a network fail both ways.
ucudnn benchmarks only shortly, because the results count and not the speed. PyTorch alone and each limit with each
policy run in processes of their own. Each is one case of the results; cases that are there already are kept, unless
they were cut off or have other conditions. A test that takes more than --test-seconds of processor time one way is not
compared. Tests that need most of a GPU's memory (--alone) run after the others, with one process for each GPU and one
way after the other: beside others they would be skipped, or leave these no memory. A case is written when its way has
run the others, as one that was cut off, and again when all have run.
"""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.tools.results import ROOT, load, save_case
from bench.tools.script import add_backend, command_line, out_of, run_main
from bench.torch import conformance_plugin

_ENDS = 0, 1, 5  # of pytest: all tests passed, some failed, or none was chosen

Outcomes = dict[str, str]
"""The outcome of each test: 'passed', or 'failed', 'skipped' or 'out of time' with a reason."""


@dataclass(slots=True)
class Way:
    """One way of running the tests: a limit with a policy, or PyTorch alone if both are empty; and what came of it."""

    limit: str = ""
    policy: str = ""
    outcomes: Outcomes = field(default_factory=dict)
    whole: bool = True
    seconds: float = 0.0
    folder: Path = Path()

    def __str__(self) -> str:
        """Return the name of the way in results and lines."""
        return f"{self.limit} {self.policy}" if self.limit else "PyTorch alone"


def run_tests(arguments: Namespace, way: Way, *, alone: bool = False) -> None:
    """Run tests one way; add the outcome of each, and note whether there was time for all.

    Args:
        arguments: the command line.
        way: gets the outcomes. The time that it took before counts, and nothing runs if that was too much.
        alone: run the tests that run alone, which may be none; else the others, which may be none, too.
    """
    if not way.whole:
        return
    begin, folder = perf_counter(), way.folder / "alone" if alone else way.folder
    folder.mkdir()
    with (folder / "output.txt").open("w+", encoding="utf-8") as output:
        environment = environment_of(arguments, way, folder, alone=alone)
        process = subprocess.Popen(
            command_of(arguments, alone=alone), env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(None if arguments.seconds is None else max(0.0, arguments.seconds - way.seconds))
        except subprocess.TimeoutExpired:
            way.whole = False
            end(process)
        output.seek(0)
        text = output.read().strip()
    way.seconds = round(way.seconds + perf_counter() - begin, 1)
    print(f"{way}{', alone' if alone else ''}: {text.splitlines()[-1] if text else ''}", flush=True)
    outcomes = folder / "outcomes.jsonl"
    if process.returncode not in _ENDS if way.whole else not (alone or outcomes.exists()):
        raise SystemExit(f"error: pytest ended with {process.returncode}:\n{text[-4000:]}")
    if outcomes.exists():
        way.outcomes |= dict(json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines())


def as_they_end(arguments: Namespace, ways: Sequence[Way]) -> Iterator[Way]:
    """Run tests some ways at the same time, without those that run alone; yield each way when it has run."""
    with ThreadPoolExecutor(len(ways)) as pool:
        runs = {pool.submit(run_tests, arguments, way): way for way in ways}
        for run in as_completed(runs):
            run.result()
            yield runs[run]


def command_of(arguments: Namespace, *, alone: bool) -> list[str]:
    """Return the command that runs the tests that run alone, or the others."""
    tests = arguments.tests.resolve()
    command = [sys.executable, "-m", "pytest", "-p", conformance_plugin.__name__, "-q", "--no-header", "-c", os.devnull]
    command += ["--rootdir", str(tests.parent), str(tests)]
    workers = arguments.workers if not alone else arguments.gpus if arguments.workers and arguments.gpus > 1 else 0
    if workers:
        command += ["-n", str(workers)]
    chosen = [f"({arguments.keyword})"] if arguments.keyword else []
    if arguments.alone:
        chosen.append(f"({arguments.alone})" if alone else f"not ({arguments.alone})")
    return [*command, "-k", " and ".join(chosen)] if chosen else command


def end(process: subprocess.Popen[bytes]) -> None:
    """End pytest, which ends by itself in most cases."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment_of(arguments: Namespace, way: Way, folder: Path, *, alone: bool) -> dict[str, str]:
    """Return the environment of the tests, which tells the plugin what to do."""
    environment = {
        # as a test of this project the script may itself run in a worker of pytest-xdist, which these tests do not
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        conformance_plugin.OUTCOMES: str(folder / "outcomes.jsonl"),
        conformance_plugin.GPUS: str(arguments.gpus),
        conformance_plugin.TEST_SECONDS: str(arguments.test_seconds),
    }
    if arguments.workers and not alone:
        environment.setdefault("OMP_NUM_THREADS", "1")  # there are about as many workers as cores
    if way.limit:
        options = {"backend": arguments.backend, "workspace_limit": way.limit, "policy": way.policy}
        options["database"] = str(way.folder.parent / "measurements.db")  # of all ways, which measure the same
        environment[conformance_plugin.PLUGIN] = json.dumps({"options": options, "folder": str(folder)})
    return environment


def counts_of(folder: Path) -> dict[str, object]:
    """Return what all processes of one way sent through handles and left to PyTorch, and the configurations."""
    counts: Counter[str] = Counter()
    left: Counter[str] = Counter()
    kernels: dict[str, dict[str, bool]] = {}
    for path in folder.rglob("*.json"):
        each = load(path)
        counts.update({"calls": each["calls"], "planned": each["planned"], "divided calls": each["divided"]})
        counts["past the limit"] += each["past_limit"]
        left.update(each["left"])
        for problem, configuration, divided in each["kernels"]:
            kernels.setdefault(problem, {})[configuration] = divided
    counts["kernels"] = len(kernels)
    counts["divided kernels"] = sum(any(found.values()) for found in kernels.values())
    configurations = {problem: " or ".join(sorted(found)) for problem, found in sorted(kernels.items())}
    return {"through_ucudnn": dict(counts), "left": dict(left.most_common()), "configurations": configurations}


def differences_of(off: Outcomes, on: Outcomes, *, whole: bool) -> dict[str, dict[str, str]]:
    """Return the tests that end differently; if there was no time for all, only those that ran both ways."""
    late = {*out_of_time(off), *out_of_time(on)}
    return {
        test: {"off": off.get(test, "not run"), "on": on.get(test, "not run")}
        for test in sorted((off.keys() | on.keys() if whole else off.keys() & on.keys()) - late)
        if kind_of(off.get(test, "")) != kind_of(on.get(test, ""))
    }


def kind_of(outcome: str) -> str:
    """Return an outcome without its reason."""
    return outcome.partition(":")[0]


def out_of_time(outcomes: Outcomes) -> list[str]:
    """Return the tests that took too long."""
    return sorted(test for test, outcome in outcomes.items() if kind_of(outcome) == conformance_plugin.OUT_OF_TIME)


def answer_of(conditions: Mapping[str, str], off: Way, on: Way) -> dict[str, object]:
    """Return one case of the results."""
    whole = off.whole and on.whole
    late = {*out_of_time(off.outcomes), *out_of_time(on.outcomes)}
    return {
        "cut_off": not whole,
        "compared": len((off.outcomes.keys() & on.outcomes.keys()) - late),
        "conditions": conditions,
        "seconds": {"off": off.seconds, "on": on.seconds},
        "off": dict(Counter(map(kind_of, off.outcomes.values()))),
        "on": dict(Counter(map(kind_of, on.outcomes.values()))),
        "out_of_time": {"off": out_of_time(off.outcomes), "on": out_of_time(on.outcomes)},
        "differences": differences_of(off.outcomes, on.outcomes, whole=whole),
        **counts_of(on.folder),
    }


def show(answer: Mapping[str, Any]) -> None:
    """Print the results."""
    left, differences = answer["left"], answer["differences"]
    print(f"off: {answer['off']}\non:  {answer['on']}")
    print(f"through ucudnn: {answer['through_ucudnn']}, left to PyTorch: {sum(left.values())}")
    for reason, count in left.items():
        print(f"  {count} x {reason[:160]}")
    print(f"{len(differences)} differences, 0 required", flush=True)
    for test, each in differences.items():
        print(f"  {test}\n    off: {each['off']}\n    on:  {each['on']}")


def parsed() -> Namespace:
    """Return the command line."""
    parser = command_line(__doc__, __spec__.name, "torch/conformance.json")
    add_backend(parser)
    add = parser.add_argument
    add("tests", type=Path, help="PyTorch's test/nn/test_convolution.py")
    add("--case", default="release", help="name of the tests in the results (%(default)s)")
    add("-k", dest="keyword", help="only the tests whose names match, as pytest takes it")
    add("--seconds", type=float, help="end the run of each way after this time")
    add("--test-seconds", type=float, default=0.0, help="processor time of a test; 0 is no end (%(default)s)")
    add("--alone", default="large or 64bit_indexing", help="tests that run alone, as pytest takes it (%(default)s)")
    add("--workers", type=int, default=0, help="processes of each way, by pytest-xdist (%(default)s)")
    add("--together", type=int, default=2, help="number of ways that run at the same time (%(default)s)")
    add("--gpus", type=int, default=1, help="number of GPUs for the workers (%(default)s)")
    add("--limit", action="append", help="a limit for each convolution; may be given several times (64MiB)")
    add("--policy", action="append", help="a batch-size policy; may be given several times (powerOfTwo)")
    arguments = parser.parse_args()
    if not arguments.tests.exists():
        parser.error(f"{arguments.tests} is not there")
    arguments.limit, arguments.policy = arguments.limit or ["64MiB"], arguments.policy or ["powerOfTwo"]
    return arguments


def conditions_of(arguments: Namespace) -> dict[str, str]:
    """Return the device, all versions, and the file and choice of tests."""
    import torch

    from bench.torch.measuring import conditions

    device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
    file = sha256(arguments.tests.read_bytes()).hexdigest()[:16]
    return {**conditions(device), "tests": file, "chosen": arguments.keyword or "", "backend": arguments.backend}


def ways_to_run(path: Path | None, arguments: Namespace, conditions: Mapping[str, str]) -> list[Way]:
    """Return the ways whose case is not in the results yet."""
    cases = load(path)["cases"] if path is not None and path.exists() else {}
    ways = [Way(limit, policy) for limit in arguments.limit for policy in arguments.policy]
    known = {way: cases.get(name_of(arguments, way), {}) for way in map(str, ways)}
    return [
        way for way in ways if known[str(way)].get("conditions") != conditions or known[str(way)].get("cut_off", True)
    ]


def name_of(arguments: Namespace, way: object) -> str:
    """Return the name of a case in the results."""
    return f"{arguments.case} {way}"


def main() -> bool:
    """Run the tests each way, list the differences and write them; return whether there are none."""
    arguments = parsed()
    path, conditions = out_of(arguments), conditions_of(arguments)
    ways = ways_to_run(path, arguments, conditions)
    if not ways:
        print("every case is in the results")
        return True
    off, well = Way(), True
    with TemporaryDirectory() as name:
        every = [off, *ways]
        for number, way in enumerate(every):
            way.folder = Path(name) / str(number)
        for first in range(0, len(every), arguments.together):
            together = every[first : first + arguments.together]
            waiting = []
            for way in as_they_end(arguments, together):
                waiting += [way] if way is not off and way.outcomes else []
                while off.outcomes and waiting:  # whatever stops this run later, what has run is kept
                    done = waiting.pop()
                    save_case(path, name_of(arguments, done), answer_of(conditions, off, replace(done, whole=False)))
            for way in together:
                if arguments.alone:
                    run_tests(arguments, way, alone=True)
                if not way.outcomes:
                    raise SystemExit("error: no test is chosen")
                well = (way is off or keep(path, arguments, conditions, off, way)) and well
    return well


def keep(path: Path | None, arguments: Namespace, conditions: Mapping[str, str], off: Way, on: Way) -> bool:
    """Print and save the case of one way; return whether PyTorch alone does not differ from it."""
    answer = answer_of(conditions, off, on)
    print(f"\n{name_of(arguments, on)}")
    show(answer)
    save_case(path, name_of(arguments, on), answer)
    return not answer["differences"]


if __name__ == "__main__":
    run_main(main)
