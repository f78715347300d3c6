"""Translation (NMT) on the Tesla M40 of Meng et al., simulated, beside tables 1(a) and 2(b) of their paper.

    python -m bench.memory.translation                    # about five minutes
    python -m bench.memory.translation --steps 10 20      # other numbers of time steps: tries the script out

Steps are those of `bench.memory.translation_step`, whose LSTM layers run cell by cell, as TensorFlow 1.2 ran them.

Table 1(a), swapping: the paper names neither layers nor time steps. Readings: the tutorial's 3 + 3 layers, and 4 + 4,
because the paper speaks of a model of 8 layers; 40 and 50 time steps, which the tutorial's largest bucket has.

Table 2(b), attention that computes its score again: the paper names the time steps only, so layers are as above.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bench.memory.paper_rows import MIB, PaperRow, print_and_save, simulated, table_parser
from bench.memory.swap import M40, MEMORY, MOST_PERCENT, saved_bytes
from bench.memory.translation_step import TranslatorSizes, translator_step
from bench.tools.script import note, run_main
from ucudnn.memory.policies.swaps.swap import SwapPolicy
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.graph import StepGraph

LAYERS = {"3 + 3 layers": 3, "4 + 4 layers": 4}
SWAPPING = {"3 + 3 layers, 40 steps": TranslatorSizes(40, 3), "4 + 4 layers, 50 steps": TranslatorSizes(50, 4)}
PAPER = {50: (350, 1100), 100: (90, 550), 200: (20, 230), 400: (2, 60)}
"""Largest mini-batches by time steps: with attention that keeps its score, and with the paper's."""

WHY = {
    "kept": "A sample takes 20 to 740 MiB here, where the paper's takes 35 MB to 6 GB.",
    "computed again": "A sample takes 11 to 118 MiB here.",
}
"""Why largest mini-batches differ, by what attention does with its score."""

SHARES = (0.0, 0.5)
"""Thresholds that are tried as published, in shares of the bytes that forward saves."""


def largest_batch(peak_bytes: Callable[[int], int], limit: int) -> int:
    """Return the largest mini-batch whose peak is at most a limit, for peaks that grow with it; 0 if none is."""
    known = {batch: peak_bytes(batch) for batch in (1, 2)}
    while True:
        low = max((batch for batch, peak in known.items() if peak <= limit), default=0)
        high = min((batch for batch, peak in known.items() if peak > limit), default=None)
        if high is not None and high - low <= 1:
            return low
        one, other = sorted(known, key=lambda batch: abs(known[batch] - limit))[:2]
        slope = (known[other] - known[one]) / (other - one)
        guess = one + int((limit - known[one]) // slope) if slope > 0 else 2 * low
        guess = max(low + 1, min(guess, high - 1 if high is not None else 4 * max(known)))
        known[guess] = peak_bytes(guess)


def run(graph: StepGraph, batch: int, policy: str | SwapPolicy, budget: int | None = None) -> Simulation:
    """Return what a policy takes on the M40."""
    found = simulated(graph.with_batch(batch), M40, policy, budget)
    assert found is not None
    return found


def largest_with(graph: StepGraph, policy: Callable[[StepGraph], str | SwapPolicy]) -> int:
    """Return the largest mini-batch of a policy, which may depend on the step, within the memory."""

    def peak(batch: int) -> int:
        return run(graph, batch, policy(graph.with_batch(batch))).peak_bytes

    return largest_batch(peak, MEMORY)


def percent_over_stock(graph: StepGraph, batch: int, found: Simulation) -> float:
    """Return by how many percent a step takes longer than with unlimited memory."""
    return 100 * (found.time_ms / run(graph, batch, "stock").time_ms - 1)


def published(share: float, graph: StepGraph) -> SwapPolicy:
    """Return the policy as published that lets a share of the saved bytes stay."""
    return SwapPolicy(threshold_bytes=int(share * saved_bytes(graph)))


def swapping_of(graph: StepGraph) -> dict[str, tuple[int, float, float]]:
    """Return the largest mini-batch, the milliseconds of a step and its percent over stock, by way."""
    found = {}
    base = largest_with(graph, lambda _: "stock")
    found["without swapping"] = (base, run(graph, base, "stock").time_ms, 0.0)
    batches = {share: largest_with(graph, partial(published, share)) for share in SHARES}
    share = max(SHARES, key=batches.__getitem__)
    batch = batches[share]
    done = run(graph, batch, published(share, graph.with_batch(batch)))
    found["as published"] = (batch, done.time_ms, percent_over_stock(graph, batch, done))
    batch = largest_with(graph, lambda _: SwapPolicy(capped=True))
    done = run(graph, batch, SwapPolicy(capped=True), MEMORY)
    found["with a cap"] = (batch, done.time_ms, percent_over_stock(graph, batch, done))
    return found


def swapping_rows(cases: Mapping[str, TranslatorSizes]) -> list[PaperRow]:
    """Return table 1(a)'s row of NMT."""
    found = {}
    for reading, sizes in cases.items():
        note(f"swapping: {reading}")
        found[reading] = swapping_of(translator_step(sizes, again=False))
    whys = {
        "without swapping": "The paper names neither layers nor steps of time. 4 + 4 layers and 50 steps agree.",
        "as published": "The best of two thresholds; what triggers bring back early fills the memory again.",
        "with a cap": "Here nothing comes back while it would exceed 12 GB.",
    }
    papers = {"without swapping": 496, "as published": 824, "with a cap": 824}
    rows = []
    for way, paper in papers.items():
        values = {reading: each[way] for reading, each in found.items()}
        batches: dict[str, float | None] = {reading: float(value[0]) for reading, value in values.items()}
        rows.append(PaperRow(f"NMT, largest mini-batch {way}", str(paper), batches, whys[way], "{:.0f}"))
        if way != "without swapping":
            costs: dict[str, float | None] = {reading: max(0.0, value[2]) for reading, value in values.items()}
            why = cost_why([value or 0.0 for value in costs.values()])
            rows.append(PaperRow(f"NMT, cost of time {way}", f"below {MOST_PERCENT} %", costs, why, "{:.0f} %"))
    return rows


def cost_why(percent: Sequence[float]) -> str:
    """Return what is said about the cost of swapping."""
    if max(percent) <= MOST_PERCENT:
        return (
            "As in the paper: products with 4096 x 2048 weights take about as long as the copies of what a cell keeps."
        )
    reversal = "**Reversed.** " if min(percent) > MOST_PERCENT else ""
    return f"{reversal}Forward saves more bytes than the link moves in the step's time."


def mib_of_a_sample(graph: StepGraph, batch: int) -> float:
    """Return the mebibytes that a sample adds to the peak near a mini-batch."""
    fewer = batch // 2
    peaks = [run(graph, size, "stock").peak_bytes if size else 0 for size in (fewer, batch)]
    return (peaks[1] - peaks[0]) / MIB / max(1, batch - fewer)


def attention_rows(time_steps: int) -> list[PaperRow]:
    """Return table 2(b)'s row, and how both layers' times compare at the mini-batch of the plain one."""
    rows = []
    note(f"attention: {time_steps} time steps")
    plain, again = (
        {reading: translator_step(TranslatorSizes(time_steps, layers), again=way) for reading, layers in LAYERS.items()}
        for way in (False, True)
    )
    batches = {
        kind: {reading: largest_with(graph, lambda _: "stock") for reading, graph in graphs.items()}
        for kind, graphs in (("kept", plain), ("computed again", again))
    }
    papers = [str(each) for each in PAPER.get(time_steps, ("", ""))]
    for (kind, values), paper in zip(batches.items(), papers, strict=True):
        graphs = plain if kind == "kept" else again
        sizes = ", ".join(f"{mib_of_a_sample(graph, values[reading]):.1f} MiB" for reading, graph in graphs.items())
        note(f"a sample takes {sizes}")
        title = f"NMT of {time_steps} time steps, largest mini-batch, score {kind}"
        why = WHY[kind]
        ours: dict[str, float | None] = {reading: float(value) for reading, value in values.items()}
        rows.append(PaperRow(title, paper, ours, why, "{:.0f}"))
    slower: dict[str, float | None] = {
        reading: 100 * (run(again[reading], batch, "stock").time_ms / run(graph, batch, "stock").time_ms - 1)
        for reading, graph in plain.items()
        if (batch := max(1, batches["kept"][reading]))
    }
    why = "At the mini-batch of the score kept. Operators are not fused: tanh runs twice, and saves no traffic."
    title = f"NMT of {time_steps} time steps, time with the score computed again"
    rows.append(PaperRow(title, "up to -9 %", slower, why, "{:+.1f} %"))
    return rows


def main() -> None:
    """Record and simulate everything, print a table and write it."""
    parser = table_parser(__doc__, "translation")
    parser.add_argument("--steps", type=int, nargs="+", help="numbers of time steps; default: those of the paper")
    run_main(partial(compare, parser.parse_args()))


def compare(arguments: Namespace) -> None:
    """Record and simulate everything for some numbers of time steps."""
    given = arguments.steps or ()
    cases = {f"3 + 3 layers, {each} steps": TranslatorSizes(each) for each in given} or SWAPPING
    rows = swapping_rows(cases)
    for time_steps in given or PAPER:
        rows += attention_rows(time_steps)
    print_and_save(arguments, rows)


if __name__ == "__main__":
    main()
