"""Swap-out and swap-in (Meng et al.) on the paper's Tesla M40 of 12 GB, simulated, beside its table 1 and section 4.4.

    python -m bench.memory.swap            # about a minute

Steps are those of PyTorch, and layers of cuDNN that free outputs behind their last reader, with momentum, as TensorFlow
frees by reference counts. The largest mini-batch is that of the best threshold. As published, triggers may bring
storages back so early that the peak is above stock's; with a cap they may not. `bench.memory.translation` has NMT.
"""

from bisect import bisect_right
from functools import cache

from bench.memory.layer_networks import NETWORKS
from bench.memory.layer_step import LayerRules
from bench.memory.paper_rows import GIB, MIB, PYTORCH, PaperRow, print_and_save, simulated, table_parser
from bench.tools.script import note, run_main
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.policies.swaps.swap import SwapPolicy
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.shipped import open_step, shipped_steps

M40 = load_device("m40")
MEMORY = 12 * GIB
COUNTED = "as layers of cuDNN with momentum"
BATCHES = range(1, 4096)
MOST_PERCENT = 10
"""The paper says that swapping costs less than this."""

SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Thresholds that are tried, in shares of the bytes that forward saves."""


@cache
def steps_of(name: str) -> dict[str, StepGraph]:
    """Return a network's step by reading."""
    found = {PYTORCH: open_step(name)} if name in shipped_steps() else {}
    if name in NETWORKS:
        found[COUNTED] = NETWORKS[name](LayerRules(outputs_held=False, momentum=True))
    return found


def saved_bytes(graph: StepGraph) -> int:
    """Return the bytes that forward saves for backward."""
    return sum(graph.sizes[storage] for storage in graph.saved)


def swapped(graph: StepGraph, share: float, *, capped: bool) -> Simulation | None:
    """Return what swapping takes within the memory; with a cap the policy chooses its own threshold."""
    if capped:
        return simulated(graph, M40, SwapPolicy(capped=True), MEMORY)
    return simulated(graph, M40, SwapPolicy(threshold_bytes=int(share * saved_bytes(graph))), MEMORY)


def best(graph: StepGraph, *, capped: bool) -> Simulation | None:
    """Return the fastest way to swap within the memory."""
    tried = [swapped(graph, share, capped=capped) for share in ((0.0,) if capped else SHARES)]
    return min((each for each in tried if each), key=lambda each: each.time_ms, default=None)


@cache
def largest(name: str, reading: str, policy: str) -> tuple[int, float]:
    """Return the largest mini-batch within the memory, and the time of a step over stock's with unlimited memory."""
    graph = steps_of(name)[reading]

    def run(batch: int) -> Simulation | None:
        sized = graph.with_batch(batch)
        return simulated(sized, M40, "stock", MEMORY) if policy == "stock" else best(sized, capped=policy == "capped")

    batch = bisect_right(BATCHES, 0, key=lambda batch: run(batch) is None)
    found, free = run(batch) if batch else None, simulated(graph.with_batch(max(1, batch)), M40, "stock")
    note(f"{name} {reading} {policy}: {batch}")
    assert free is not None
    return (batch, found.time_ms / free.time_ms) if found else (batch, 0.0)


def cheap_batch(name: str, reading: str) -> int:
    """Return the largest mini-batch that swaps with a cap at 10 % more time."""
    graph = steps_of(name)[reading]

    def slow(batch: int) -> bool:
        sized = graph.with_batch(batch)
        found, free = best(sized, capped=True), simulated(sized, M40, "stock")
        return found is None or free is None or found.time_ms > (1 + MOST_PERCENT / 100) * free.time_ms

    return bisect_right(BATCHES, 0, key=slow)


def batch_rows() -> list[PaperRow]:
    """Return table 1(a)."""
    rows = []
    whys = {
        "resnet50": "Stock agrees. As published, swapping trains fewer, and with a cap more, than the paper says.",
        "inception_v3": "Ours has the auxiliary classifier and its maps, which the paper may leave out.",
        "dcgan": "The paper names neither the network's size nor its images; DCGAN of 512 and of 1024 a side.",
    }
    papers = {"resnet50": ("ResNet-50", 144, 664), "inception_v3": ("Inception-v3", 208, 548), "dcgan": ("GAN", 24, 48)}
    for network, (title, base, swapping) in papers.items():
        names = ("dcgan512", "dcgan1024") if network == "dcgan" else (network,)
        cases = {f"{name} {reading}": (name, reading) for name in names for reading in steps_of(name)}
        for policy, text, paper in (("stock", "without swapping", base), ("published", "as published", swapping),
                                    ("capped", "with a cap", swapping)):  # fmt: skip
            found = {case: largest(*key, policy) for case, key in cases.items()}
            what = f"{title}, largest mini-batch {text}"
            rows.append(PaperRow(what, str(paper), {case: float(each[0]) for case, each in found.items()},
                                 whys[network], "{:.0f}"))  # fmt: skip
            if policy != "stock":
                times = {case: max(0.0, 100 * (each[1] - 1)) for case, each in found.items()}
                why = "The link cannot take what leaves: forward saves more bytes than it moves in the step's time."
                why = (
                    f"**Reversed.** {why}"
                    if min(times.values()) > MOST_PERCENT
                    else "Transposed convolutions take long."
                )
                rows.append(PaperRow(f"{title}, cost of time {text}", "below 10 %", times, why, "{:.0f} %"))
    cheap = {f"resnet50 {reading}": float(cheap_batch("resnet50", reading)) for reading in steps_of("resnet50")}
    why = "What the link hides on an M40; the paper claims both at once."
    return [*rows, PaperRow("ResNet-50, largest mini-batch that costs 10 %", "664", cheap, why, "{:.0f}")]


def depth_rows() -> list[PaperRow]:
    """Return table 1(b): peaks at a mini-batch of 32."""
    rows = []
    papers = {"resnet101": ("5815 MB", "2660 MB"), "resnet200": ("10662 MB", "3052 MB")}
    papers |= {"resnet1001": ("out of memory", "5979 MB"), "resnet2000": ("out of memory", "10650 MB")}
    for name, (base, optimized) in papers.items():
        graph = steps_of(name)[COUNTED].with_batch(32)
        stock = simulated(graph, M40, "stock")
        ways = {"as published": SwapPolicy(threshold_bytes=0), "with a cap": SwapPolicy(capped=True, threshold_bytes=0)}
        found = {way: simulated(graph, M40, policy) for way, policy in ways.items()}
        assert stock is not None
        title = name.replace("resnet", "ResNet-")
        why = "Ours overwrites the inputs of ReLU and of additions, which TensorFlow may keep."
        rows.append(PaperRow(f"{title} 32, base", base, {COUNTED: stock.peak_bytes / MIB}, why, "{:.0f} MiB"))
        peaks = {way: each.peak_bytes / MIB for way, each in found.items() if each}
        why = "The paper's threshold is not named; it lies between the most and the least that swapping takes."
        if peaks["as published"] > MEMORY / MIB:
            why += " **As published, with threshold 0, early triggers exceed 12 GB.**"
        rows.append(PaperRow(f"{title} 32, swapping", optimized, peaks, why, "{:.0f} MiB"))
        costs = {way: 100 * (each.time_ms / stock.time_ms - 1) for way, each in found.items() if each}
        why = "**Reversed.** All saved storages leave (threshold 0), which is more than the link moves meanwhile."
        rows.append(PaperRow(f"{title} 32, cost of time", "below 10 %", costs, why, "{:.0f} %"))
    return rows


def main() -> None:
    """Simulate everything, print a table and write it."""
    arguments = table_parser(__doc__, "swap").parse_args()
    print_and_save(arguments, [*batch_rows(), *depth_rows()], memory_bytes=MEMORY)


if __name__ == "__main__":
    run_main(main)
