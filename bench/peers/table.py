"""The results of bench.peers.compare: a JSON file that several calls complete, and its Markdown table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.ways import (
    GRAPH,
    GRAPH_ONLY,
    HEURISTICS,
    LEGACY,
    POWER_OF_TWO,
    PYTORCH,
    UNDIVIDED,
    WITHOUT_COPIES,
)
from bench.tools import results
from ucudnn.units import format_bytes

USUAL_BYTES = 64 * 2**20
MACHINE = ("device", "cudnn", "torch")
"""Conditions in which rows must agree to be compared."""

MUCH = 0.1
"""Part of the time in short kernels above which a time is marked."""

Row = dict[str, Any]
Answer = dict[str, Any]
Key = tuple[Any, ...]

CAPTION = """\
Milliseconds of all convolutions, forward and both backward passes, executed in turn on the same tensors. The brackets
give the speedup over cuDNN graph and over cuDNN legacy, and for PyTorch its largest workspace, because PyTorch has no
limit. Square brackets give the least and the most of one round, where they were kept. A `*` marks a time of which
kernels below 0.05 ms take more than a tenth: there, the host's launches count. An empty cell was not measured yet."""

GAINS = """\
What each idea gains, within the same limit. *Choice*: the fastest algorithm of the graph API instead of the first that
cuDNN's heuristics offer. *Algorithms*: all candidates of ucudnn instead of those of the graph API on the tensors as
they are, still undivided. *Micro-batches*: `powerOfTwo` instead of the mini-batch undivided, with the same candidates.
The product of the three is *all*. Apart from that, *graph only* is what micro-batches gain in the graph API alone, and
*copies* what copies of strided inputs gain in micro-batches."""

STEPS = {
    "choice": (HEURISTICS, GRAPH),
    "algorithms": (GRAPH, UNDIVIDED),
    "micro-batches": (UNDIVIDED, POWER_OF_TWO),
    "all": (HEURISTICS, POWER_OF_TWO),
    "graph only": (GRAPH, GRAPH_ONLY),
    "copies": (WITHOUT_COPIES, POWER_OF_TWO),
}
"""For each idea, the way without it and the way with it."""


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of a row; its limit is None without a limit."""
    return row["network"], row["batch"], row["variant"], row["limit_bytes"], row["way"]


def load(path: Path) -> Answer:
    """Return the results in a file; no results if there is no file."""
    return results.load(path) if path.exists() else {"conditions": [], "rows": []}


def _machine(conditions: Mapping[str, str]) -> list[str | None]:
    return [conditions.get(name) for name in MACHINE]


def is_done(answer: Answer, key: Key, conditions: Mapping[str, str], check: bool) -> bool:
    """Whether there is a row of the same device and versions that did not fail; with `check`, a row with a distance."""
    row = next((each for each in answer["rows"] if key_of(each) == key), None)
    if row is None or "failed" in row or _machine(answer["conditions"][row["conditions"]]) != _machine(conditions):
        return False
    return "absent" in row or not check or row.get("distance") is not None


def merge(answer: Answer, rows: Sequence[Row], conditions: Mapping[str, str]) -> None:
    """Replace earlier rows, and compare all rows with those of cuDNN on the same machine.

    A row is left out if the results have a later one (`at`).
    """
    if conditions not in answer["conditions"]:
        answer["conditions"].append(dict(conditions))
    number = answer["conditions"].index(conditions)
    known = {key_of(row): row for row in answer["rows"]}
    for row in rows:
        before = known.get(key_of(row), {})
        if row.get("at", "") < before.get("at", ""):
            continue
        if "failed" not in row or "executed_ms" not in before:  # a failure does not replace a time
            known[key_of(row)] = {**row, "conditions": number}
    for key, row in known.items():
        for name, way in (("over_graph", GRAPH), ("over_legacy", LEGACY)):
            row[name] = _speedup(row, known.get((*key[:-1], way)), answer["conditions"])
    answer["rows"] = list(known.values())


def merge_all(answer: Answer, other: Answer) -> None:
    """Add the rows of other results."""
    for number, conditions in enumerate(other["conditions"]):
        merge(answer, [row for row in other["rows"] if row["conditions"] == number], conditions)


def _speedup(row: Row, base: Row | None, conditions: Sequence[Mapping[str, str]]) -> float | None:
    if base is None or row.get("executed_ms") is None or base.get("executed_ms") is None:
        return None
    if _machine(conditions[row["conditions"]]) != _machine(conditions[base["conditions"]]):
        return None
    return float(base["executed_ms"] / row["executed_ms"])


def markdown(answer: Answer, ways: Sequence[str], orders: Sequence[Sequence[str]] = ()) -> str:
    """Return the Markdown table of all results, and below it the reasons of missing times.

    Args:
        answer: the results.
        ways: the columns, in order.
        orders: names of networks and of variants in the order of the rows; others come last.
    """
    lines = [*(f"- {_conditions(each)}" for each in answer["conditions"]), "", CAPTION, ""]
    lines.append(f"| network, mini-batch | variant | limit | {' | '.join(ways)} |")
    lines.append("| --- " * (3 + len(ways)) + "|")
    lines += [f"| {' | '.join(cells)} |" for cells in times(answer, ways, orders)]
    missing = _missing(_cases(answer, orders))
    return "\n".join([*lines, *(["", *missing] if missing else [])])


def times(answer: Answer, ways: Sequence[str], orders: Sequence[Sequence[str]] = ()) -> list[list[str]]:
    """Return the rows of the table of all results; `markdown` says what the arguments are."""
    return [
        [f"{network} {batch}", variant, _limit(limit), *(_cell(rows.get(way)) for way in ways)]
        for (network, batch, variant, limit, *_), rows in _cases(answer, orders).items()
    ]


def gains(answer: Answer, orders: Sequence[Sequence[str]] = ()) -> list[str]:
    """Return the lines of a Markdown table of what each idea gains; no lines if no case has the ways for it.

    Args:
        answer: the results.
        orders: names of networks and of variants in the order of the rows; others come last.
    """
    lines = []
    for (network, batch, variant, limit, *_), rows in _cases(answer, orders).items():
        if {HEURISTICS, UNDIVIDED} <= set(rows):
            ratios = (_ratio(rows.get(slow), rows.get(fast)) for slow, fast in STEPS.values())
            lines.append(f"| {network} {batch} | {variant} | {_limit(limit)} | {' | '.join(ratios)} |")
    if not lines:
        return []
    head = f"| network, mini-batch | variant | limit | {' | '.join(STEPS)} |"
    return [GAINS, "", head, "| --- " * (3 + len(STEPS)) + "|", *lines]


def _ratio(slow: Row | None, fast: Row | None) -> str:
    """Return how many times as fast one way is as the other; a dash if one has no time."""
    slow_ms, fast_ms = (None if row is None else row.get("executed_ms") for row in (slow, fast))
    return "–" if slow_ms is None or fast_ms is None else f"{slow_ms / fast_ms:.2f}"


def _cases(answer: Answer, orders: Sequence[Sequence[str]]) -> dict[Key, dict[str, Row]]:
    """Return the rows of each network, variant and limit by way, in the order of the table."""
    cases: dict[Key, dict[str, Row]] = {}
    for row in sorted(answer["rows"], key=lambda row: _place(row, orders)):
        cases.setdefault(key_of(row)[:-1], {})[row["way"]] = row
    return cases


def verdict(rows: Sequence[Row], ours: Sequence[str], rivals: Sequence[str]) -> list[str]:
    """Return in words in how many cases our best way is ahead of its rivals in NCHW within 64 MiB, and the other cases.

    Args:
        rows: the results.
        ours: our ways.
        rivals: the ways that should be slower; a rival without a time does not count.
    """
    cases: dict[Key, dict[str, float]] = {}
    for row in rows:
        if row["limit_bytes"] == USUAL_BYTES and row["variant"].endswith("-first") and row.get("executed_ms"):
            cases.setdefault(key_of(row)[:3], {})[row["way"]] = row["executed_ms"]
    lines, ahead, count = [], 0, 0
    for (network, batch, variant), times in cases.items():
        own = min((times[way] for way in ours if way in times), default=None)
        if own is None:
            continue
        count += 1
        faster = {way: own / times[way] for way in rivals if way in times and times[way] <= own}
        ahead += not faster
        if faster:
            told = ", ".join(f"{way} is {ratio:.3f} times as fast" for way, ratio in faster.items())
            lines.append(f"- {network} {batch} {variant}: {told}")
    if not count:
        return []
    found = f"In NCHW within 64 MiB, ucudnn is ahead of {', '.join(rivals)} in {ahead} of {count} cases"
    return [f"{found}, but not in these:" if lines else f"{found}.", *lines]


def _place(row: Row, orders: Sequence[Sequence[str]]) -> tuple[Any, ...]:
    names = (row["network"], row["variant"])
    places = [
        order.index(name) if name in order else len(order)
        for name, order in zip(names, orders or ((), ()), strict=True)
    ]
    limit = row["limit_bytes"]
    return places[0], names[0], row["batch"] or 0, places[1], names[1], limit is None, limit or 0


def _limit(limit: int | None) -> str:
    return "none" if limit is None else format_bytes(limit)


def _conditions(conditions: Mapping[str, str]) -> str:
    return ", ".join(
        [conditions["device"], *(f"{name} {text}" for name, text in conditions.items() if name != "device")]
    )


def _cell(row: Row | None) -> str:
    """Return a cell such as '11.1* (3.35, 4.23)'; a dash if there is no time."""
    if row is None:
        return ""
    if row.get("executed_ms") is None:
        return "failed" if "failed" in row else "–"
    notes = [f"{speedup:.2f}" for name in ("over_graph", "over_legacy") if (speedup := row[name]) is not None]
    if row["way"] == PYTORCH and row["workspace_bytes"] is not None:
        notes.append(format_bytes(row["workspace_bytes"]))
    mark = "*" if row["short_share"] > MUCH else ""
    return milliseconds(row["executed_ms"]) + mark + _range(row) + (f" ({', '.join(notes)})" if notes else "")


def milliseconds(time_ms: float) -> str:
    """Return a time with three digits, or all before the point: '8.80', '11.1', '164', '2470'."""
    return f"{time_ms:.0f}" if time_ms >= 1000 else f"{time_ms:#.3g}".rstrip(".")


def _range(row: Row) -> str:
    """Return the least and the most of one round in square brackets; '' if they were not kept."""
    return f" [{', '.join(map(milliseconds, row['range_ms']))}]" if row.get("range_ms") else ""


def _missing(cases: Mapping[Key, Mapping[str, Row]]) -> list[str]:
    """Return the reasons why ways are absent or failed; equal reasons share a line."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for (network, batch, variant, limit, *_), rows in cases.items():
        for way, row in rows.items():
            reason = row.get("absent") or row.get("failed")
            if reason:
                where = f"{network} {batch} {variant} {_limit(limit)}"
                reasons.setdefault(reason, {}).setdefault(where, []).append(way)
    lines = []
    for reason, places in reasons.items():
        texts = (f"{where}: {', '.join(ways)}" for where, ways in places.items())
        lines.append(f"- {reason} ({'; '.join(texts)})")
    return lines
