"""Fronts for benchmarks of workspace division: synthetic ones of several kinds, and those recorded of ResNet-1001.

    python -m bench.paper.fronts        record ResNet-1001 on this machine's CPU: under a minute

The recording holds the desirable sets of ResNet-1001's 45 different kernels at mini-batches of 16. The NumPy backend
measured them at powers of two as micro-batch sizes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.tools.backends import measured
from bench.tools.results import ROOT, cpu_conditions, load, save
from bench.tools.script import command_line, note, run_main
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import MicroConfiguration
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.profiles.format import load_profile
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice

NETWORKS = ("alexnet", "resnet18", "resnet50")

Recorded = list[tuple[Kernel, list[MicroConfiguration]]]
"""The kernels of a network with their micro-configurations at powers of two."""


def recorded(source: str, network: str) -> Recorded:
    """Return the recording of a network in a profile."""
    benchmark = Benchmark(ReplayBackend(load_profile(source), candidates=Candidates.GRAPH, network=network))
    return [(kernel, measured(benchmark, kernel.problem)) for kernel in load_network(network).kernels()]


def choices_of(kernels: Recorded) -> list[Choice[Any]]:
    """Return the desirable sets of kernels with their counts."""
    return [
        Choice(desirable=desirable_set(found, kernel.problem.batch), count=kernel.count) for kernel, found in kernels
    ]


KINDS = ("smooth", "random", "few points")
RECORDING = ROOT / "bench" / "data" / "resnet1001_cpu.json"
BATCH = 16


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a front.

    Attributes:
        workspace_bytes: bytes.
        time_ms: milliseconds, in whole picoseconds.
    """

    workspace_bytes: int
    time_ms: float


def synthetic(kind: str, shapes: int, copies: int, seed: int) -> list[Choice[Point]]:
    """Return so many different fronts, each of so many kernels; the fronts do not depend on the number of kernels.

    Args:
        kind: 'smooth': 8 to 16 points whose times fall along a curve, as if larger workspaces paid off less and less.
            'random': 8 to 16 points whose times have nothing to do with their bytes, except that they fall.
            'few points': 1 to 3 points.
        shapes: how many fronts.
        copies: kernels of each front.
        seed: of the random numbers.
    """
    drawn = random.Random(f"{kind} {shapes} {seed}")
    return [Choice(desirable=_front(kind, drawn), count=copies) for _ in range(shapes)]


def _front(kind: str, drawn: random.Random) -> tuple[Point, ...]:
    """Return a front: times between 0.01 and 13 ms, and workspaces of any number of bytes up to 1 to 316 MB."""
    number = drawn.randint(1, 3) if kind == "few points" else drawn.randint(8, 16)
    scale_ms, largest = 10 ** drawn.uniform(-1.5, 1), 10 ** drawn.uniform(6, 8.5)
    sizes = sorted({0, *(round(largest * drawn.random() ** 2) for _ in range(number - 1))})
    if kind == "smooth":
        half = largest * 10 ** drawn.uniform(-2, -0.5)
        times = [scale_ms * (0.3 + 1 / (1 + size / half)) for size in sizes]
    else:
        times = sorted((scale_ms * (0.3 + drawn.random()) for _ in sizes), reverse=True)
    return tuple(Point(size, round(time, 9)) for size, time in zip(sizes, times, strict=True))


def recorded_resnet1001() -> list[Choice[Point]]:
    """Return the recorded fronts of ResNet-1001's kernels."""
    return [
        Choice(desirable=tuple(Point(size, time) for size, time in kernel["front"]), count=kernel["count"])
        for kernel in load(RECORDING)["kernels"]
    ]


def recording(names: Sequence[str], choices: Sequence[Choice[Point]]) -> list[dict[str, object]]:
    """Return what a file holds of kernels: bytes and milliseconds of their fronts."""
    return [
        {
            "kernel": name,
            "count": choice.count,
            "front": [[point.workspace_bytes, round(point.time_ms, 6)] for point in choice.desirable],
        }
        for name, choice in zip(names, choices, strict=True)
    ]


def main() -> None:
    """Measure the fronts of ResNet-1001 on the CPU, and write them."""
    command_line(__doc__, __spec__.name).parse_args()
    benchmark = Benchmark(CpuBackend())
    kernels = []
    for kernel in load_network("resnet1001", batch=BATCH).kernels():
        kernels.append((kernel, measured(benchmark, kernel.problem)))
        note(f"{kernel}: {len(kernels[-1][1])} micro-configurations")
    names = [str(kernel) for kernel, _ in kernels]
    answer = {"conditions": cpu_conditions("ucudnn"), "network": "resnet1001", "batch": BATCH}
    save(RECORDING, {**answer, "kernels": recording(names, choices_of(kernels))})


if __name__ == "__main__":
    run_main(main)
