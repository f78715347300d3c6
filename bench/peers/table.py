"""The results of bench.peers.compare: a JSON file that several calls complete, and what each idea gains."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.ways import (
    GRAPH,
    GRAPH_ONLY,
    HEURISTICS,
    LEGACY,
    POWER_OF_TWO,
    UNDIVIDED,
    WITHOUT_COPIES,
)
from bench.tools import results

MACHINE = ("device", "cudnn", "torch")
"""Conditions in which rows must agree to be compared."""

Row = dict[str, Any]
Answer = dict[str, Any]
Key = tuple[Any, ...]

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
    """Replace earlier rows, and compare all rows with those of cuDNN on the same machine."""
    if conditions not in answer["conditions"]:
        answer["conditions"].append(dict(conditions))
    number = answer["conditions"].index(conditions)
    known = {key_of(row): row for row in answer["rows"]}
    for row in rows:
        before = known.get(key_of(row), {})
        if "failed" not in row or "executed_ms" not in before:  # a failure does not replace a time
            known[key_of(row)] = {**row, "conditions": number}
    for key, row in known.items():
        for name, way in (("over_graph", GRAPH), ("over_legacy", LEGACY)):
            row[name] = _speedup(row, known.get((*key[:-1], way)), answer["conditions"])
    answer["rows"] = list(known.values())


def _speedup(row: Row, base: Row | None, conditions: Sequence[Mapping[str, str]]) -> float | None:
    if base is None or row.get("executed_ms") is None or base.get("executed_ms") is None:
        return None
    if _machine(conditions[row["conditions"]]) != _machine(conditions[base["conditions"]]):
        return None
    return float(base["executed_ms"] / row["executed_ms"])


def milliseconds(time_ms: float) -> str:
    """Return a time with three digits, or all before the point: '8.80', '11.1', '164', '2470'."""
    return f"{time_ms:.0f}" if time_ms >= 1000 else f"{time_ms:#.3g}".rstrip(".")
