r"""PyTorch's own convolution tests, with ucudnn off and on; lists every difference and every configuration.

    python -m bench.torch.conformance test_convolution.py                 PyTorch's test/nn/test_convolution.py
    python -m bench.torch.conformance test_convolution.py --workers 20 --gpus 2 -k "not 64bit_indexing and not broken"
    python -m bench.torch.conformance test_convolution.py -k Conv2d --backend cpu
    python -m bench.torch.conformance test_convolution.py --limit 64MiB --limit 1MiB --limit 0 \
        --policy powerOfTwo --policy all                                  each limit with each policy

The file should be that of the installed release, whose wheel lacks it; files since release 2.6 work. The tests import
`expecttest` and do not use it; unittest stands in if it is not installed. Tests that need a network fail both ways.
Those that need most of a GPU's memory (`large`, `64bit_indexing`) are skipped beside others: run them without
--workers. ucudnn benchmarks only shortly, because the results count and not the speed. PyTorch alone, and each limit
with each policy, run one after the other. Each is one case of the results; cases that are there already are kept,
unless they have other conditions. A test that takes more than --test-seconds of processor time one way is not compared.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
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

    folder: Path
    limit: str = ""
    policy: str = ""
    outcomes: Outcomes = field(default_factory=dict)
    seconds: float = 0.0


def run_tests(arguments: Namespace, way: Way) -> None:
    """Run the tests one way, and add the outcome of each."""
    way.folder.mkdir()
    tests = arguments.tests.resolve()
    command = [sys.executable, "-m", "pytest", "-p", conformance_plugin.__name__, "-q", "--no-header", "-c", os.devnull]
    command += ["--rootdir", str(tests.parent), str(tests)]
    command += ["-n", str(arguments.workers)] if arguments.workers else []
    command += ["-k", arguments.keyword] if arguments.keyword else []
    begin, environment = perf_counter(), environment_of(arguments, way)
    done = subprocess.run(command, env=environment, cwd=way.folder, capture_output=True, text=True, check=False)
    way.seconds = round(perf_counter() - begin, 1)
    text = done.stdout.strip()
    print(f"{way.limit} {way.policy}".strip() or "PyTorch alone", text.splitlines()[-1] if text else "", flush=True)
    outcomes = way.folder / "outcomes.jsonl"
    if done.returncode not in _ENDS or not outcomes.exists():
        raise SystemExit(f"error: pytest ended with {done.returncode}:\n{text[-4000:]}\n{done.stderr[-2000:]}")
    way.outcomes |= dict(json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines())


def environment_of(arguments: Namespace, way: Way) -> dict[str, str]:
    """Return the environment of the tests, which tells the plugin what to do."""
    environment = {
        # as a test of this project the script may itself run in a worker of pytest-xdist, which these tests do not
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        conformance_plugin.OUTCOMES: str(way.folder / "outcomes.jsonl"),
        conformance_plugin.GPUS: str(arguments.gpus),
        conformance_plugin.TEST_SECONDS: str(arguments.test_seconds),
    }
    if arguments.workers:
        environment.setdefault("OMP_NUM_THREADS", "1")  # there are about as many workers as cores
    if way.limit:
        options = {"backend": arguments.backend, "workspace_limit": way.limit, "policy": way.policy}
        options["database"] = str(way.folder.parent / "measurements.db")  # of all ways, which measure the same
        environment[conformance_plugin.PLUGIN] = json.dumps({"options": options, "folder": str(way.folder)})
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


def differences_of(off: Outcomes, on: Outcomes) -> dict[str, dict[str, str]]:
    """Return the tests that end differently; what took too long is not compared."""
    late = {*out_of_time(off), *out_of_time(on)}
    return {
        test: {"off": off.get(test, "not run"), "on": on.get(test, "not run")}
        for test in sorted((off.keys() | on.keys()) - late)
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
    late = {*out_of_time(off.outcomes), *out_of_time(on.outcomes)}
    return {
        "cut_off": False,
        "compared": len((off.outcomes.keys() & on.outcomes.keys()) - late),
        "conditions": conditions,
        "seconds": {"off": off.seconds, "on": on.seconds},
        "off": dict(Counter(map(kind_of, off.outcomes.values()))),
        "on": dict(Counter(map(kind_of, on.outcomes.values()))),
        "out_of_time": {"off": out_of_time(off.outcomes), "on": out_of_time(on.outcomes)},
        "differences": differences_of(off.outcomes, on.outcomes),
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
    add("--test-seconds", type=float, default=0.0, help="processor time of a test; 0 is no end (%(default)s)")
    add("--workers", type=int, default=0, help="processes, by pytest-xdist (%(default)s)")
    add("--gpus", type=int, default=1, help="number of GPUs for the workers (%(default)s)")
    add("--limit", action="append", help="a limit for each convolution; may be given several times (64MiB)")
    add("--policy", action="append", help="a batch-size policy; may be given several times (powerOfTwo)")
    arguments = parser.parse_args()
    if not arguments.tests.exists():
        parser.error(f"{arguments.tests} is not there")
    return arguments


def conditions_of(arguments: Namespace) -> dict[str, str]:
    """Return the device, all versions, and the file and choice of tests."""
    import torch

    from bench.torch.measuring import conditions

    device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
    file = sha256(arguments.tests.read_bytes()).hexdigest()[:16]
    return {**conditions(device), "tests": file, "chosen": arguments.keyword or "", "backend": arguments.backend}


def main() -> bool:
    """Run the tests each way, list the differences and write them; return whether there are none."""
    arguments = parsed()
    path, conditions = out_of(arguments), conditions_of(arguments)
    cases = load(path)["cases"] if path is not None and path.exists() else {}
    off, well = None, True
    with TemporaryDirectory() as name:
        for limit in arguments.limit or ["64MiB"]:
            for policy in arguments.policy or ["powerOfTwo"]:
                case = f"{arguments.case} {limit} {policy}"
                known = cases.get(case, {})
                if known.get("conditions") == conditions and not known.get("cut_off", True):
                    print(f"{case} is in the results")
                    continue
                if off is None:
                    off = Way(Path(name) / "off")
                    run_tests(arguments, off)
                on = Way(Path(name) / f"{limit} {policy}", limit, policy)
                run_tests(arguments, on)
                answer = answer_of(conditions, off, on)
                show(answer)
                save_case(path, case, answer)
                well &= not answer["differences"]
    return well


if __name__ == "__main__":
    run_main(main)
