"""PyTorch's own convolution tests, with ucudnn off and on; lists every difference.

    python -m bench.torch.conformance test_convolution.py                 PyTorch's test/nn/test_convolution.py
    python -m bench.torch.conformance test_convolution.py --workers 8     with pytest-xdist
    python -m bench.torch.conformance test_convolution.py --workers 20 --gpus 2 -k "not 64bit_indexing and not broken"
    python -m bench.torch.conformance test_convolution.py --seconds 120   as many tests as there is time for
    python -m bench.torch.conformance test_convolution.py -k Conv2d --backend cpu

The file must be that of the installed release, whose wheel lacks it. The tests import `expecttest` and do not use it;
unittest stands in if it is not installed. Tests that need a network fail both ways. ucudnn benchmarks only shortly,
because the results count and not the speed. Both ways run at the same time, each in its own processes. With
`--policy all`, many small convolutions are divided. Each --case is one case of the results.
"""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.tools.results import ROOT, load, save_case
from bench.tools.script import add_backend, command_line, out_of, run_main
from bench.torch import conformance_plugin

Outcomes = dict[str, str]
"""The outcome of each test: 'passed', or 'failed' or 'skipped' with a reason."""


def run_tests(arguments: Namespace, folder: Path, *, on: bool) -> tuple[dict[str, str], bool]:
    """Run the tests one way; return the outcome of each, and whether there was time for all."""
    outcomes = folder / ("on.jsonl" if on else "off.jsonl")
    tests = arguments.tests.resolve()
    command = [sys.executable, "-m", "pytest", "-p", conformance_plugin.__name__, "-q", "--no-header", "-c", os.devnull]
    command += ["--rootdir", str(tests.parent), str(tests)]
    if arguments.workers:
        command += ["-n", str(arguments.workers)]
    if arguments.keyword:
        command += ["-k", arguments.keyword]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        conformance_plugin.OUTCOMES: str(outcomes),
        conformance_plugin.GPUS: str(arguments.gpus),
    }
    if arguments.workers:
        environment.setdefault("OMP_NUM_THREADS", "1")  # there are about as many workers as cores
    if on:
        options = {"backend": arguments.backend, "workspace_limit": arguments.limit, "policy": arguments.policy}
        environment[conformance_plugin.PLUGIN] = json.dumps({"options": options, "folder": str(folder)})
    with (folder / f"{outcomes.stem}.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        whole = True
        try:
            process.wait(arguments.seconds)
        except subprocess.TimeoutExpired:
            whole = False
            process.send_signal(signal.SIGINT)  # pytest then ends by itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read().strip()
    print(f"ucudnn {'on' if on else 'off'}: {text.splitlines()[-1] if text else ''}", flush=True)
    if not outcomes.exists() or (whole and process.returncode not in (0, 1)):  # 1 means that some tests failed
        raise SystemExit(f"error: pytest ended with {process.returncode}:\n{text[-4000:]}")
    return dict(json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()), whole


def counts_of(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the calls through handles and the plans of all processes, and the reasons of calls left to PyTorch."""
    counts: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for path in folder.glob("*.json"):
        each = load(path)
        counts.update({"calls": each["calls"], "planned": each["planned"]})
        left.update(each["left"])
    return counts, left


def differences_of(off: Outcomes, on: Outcomes, *, whole: bool) -> dict[str, dict[str, str]]:
    """Return the tests that end differently; if there was no time for all, only those that ran both ways."""
    return {
        test: {"off": off.get(test, "not run"), "on": on.get(test, "not run")}
        for test in sorted(off.keys() | on.keys() if whole else off.keys() & on.keys())
        if kind_of(off.get(test, "")) != kind_of(on.get(test, ""))
    }


def kind_of(outcome: str) -> str:
    """Return an outcome without its reason."""
    return outcome.partition(":")[0]


def show(answer: dict[str, object]) -> None:
    """Print the results."""
    left, differences = answer["left"], answer["differences"]
    assert isinstance(left, dict)
    assert isinstance(differences, dict)
    print(f"off: {answer['off']}\non:  {answer['on']}")
    print(f"through ucudnn: {answer['through_ucudnn']}, left to PyTorch: {sum(left.values())}")
    for reason, count in Counter(left).most_common():
        print(f"  {count} x {reason[:160]}")
    print(f"{len(differences)} differences, 0 required")
    for test, each in differences.items():
        print(f"  {test}\n    off: {each['off']}\n    on:  {each['on']}")


def parsed() -> Namespace:
    """Return the command line."""
    parser = command_line(__doc__, __spec__.name, "torch/conformance.json")
    add_backend(parser)
    parser.add_argument("tests", type=Path, help="PyTorch's test/nn/test_convolution.py")
    parser.add_argument("--case", default="release", help="name of the tests in the results (%(default)s)")
    parser.add_argument("-k", dest="keyword", help="only the tests whose names match, as pytest takes it")
    parser.add_argument("--seconds", type=float, help="end both runs after this time")
    parser.add_argument("--workers", type=int, default=0, help="processes of each way, by pytest-xdist (%(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs for the workers (%(default)s)")
    parser.add_argument("--limit", default="64MiB", help="ucudnn's limit for each convolution (%(default)s)")
    parser.add_argument("--policy", default="powerOfTwo", help="ucudnn's batch-size policy (%(default)s)")
    arguments = parser.parse_args()
    if not arguments.tests.exists():
        parser.error(f"{arguments.tests} is not there")
    return arguments


def main() -> None:
    """Run the tests both ways, list the differences and write them."""
    arguments = parsed()
    with TemporaryDirectory() as name:
        folder = Path(name)
        with ThreadPoolExecutor() as pool:
            ways = [pool.submit(run_tests, arguments, folder, on=each) for each in (False, True)]
        (off, off_whole), (on, on_whole) = (way.result() for way in ways)
        counts, left = counts_of(folder)
    import torch

    from bench.torch.measuring import conditions

    answer = {
        "cut_off": not (off_whole and on_whole),
        "compared": len(off.keys() & on.keys()),
        "conditions": conditions(torch.device("cpu" if arguments.backend == "cpu" else "cuda")),
        "off": dict(Counter(map(kind_of, off.values()))),
        "on": dict(Counter(map(kind_of, on.values()))),
        "through_ucudnn": dict(counts),
        "left": dict(left),
        "differences": differences_of(off, on, whole=off_whole and on_whole),
    }
    show(answer)
    save_case(out_of(arguments), arguments.case, answer)


if __name__ == "__main__":
    run_main(main)
