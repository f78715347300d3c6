"""Ledger: what C++ handles of one GPU computed: kernels with their decisions, calls and replacements, for a report."""

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import final

from ucudnn.backends.base import Backend
from ucudnn.configuration import Configuration
from ucudnn.execution.entry import Entry
from ucudnn.execution.recovery import Replacement
from ucudnn.planning.decision import Decision, Decisions
from ucudnn.reporting.report import Report
from ucudnn.reporting.run_report import report_run


@final
class _Line:
    def __init__(self, decision: Decision, limit_bytes: int | None) -> None:
        self.entry = Entry(decision.kernel)
        self.limit_bytes = limit_bytes  # under WR; None under WD
        self.calls = self.entry.count_natively()  # C++ counts in the first number
        self.failed = ""  # why its configuration was given up, until there is another one


@final
class Ledger:
    """Keeps what happened to kernels, each of which has a key."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._decided: dict[int, list[Decisions]] = {}  # of WR, by limit

    def decide(
        self, key: Hashable, decision: Decision, limit_bytes: int | None = None, made: Decisions | None = None
    ) -> None:
        """Take a decision; the one that holds already changes nothing.

        Under WR, `limit_bytes` is the kernel's limit, and `made` has the decisions of which this is one.
        """
        line = self._lines.setdefault(key, _Line(decision, limit_bytes))
        before = line.entry.decision
        if decision is before:
            return
        if before is not None and line.failed:
            self._replaced(line, before.configuration, decision.configuration, line.failed, timed=decision.timed)
        elif made is not None and limit_bytes is not None:
            self._decided.setdefault(limit_bytes, []).append(made)
        line.failed = ""
        line.entry.decide(decision)

    def fail(self, key: Hashable, reason: str) -> None:
        """Take that a kernel's configuration is given up; the next decision replaces it."""
        if key in self._lines:
            self._lines[key].failed = reason

    def replaced(self, key: Hashable, after: Configuration, reason: str, calls: str = "") -> None:
        """Take that another configuration computes a kernel, or some of its calls, without another decision."""
        line = self._lines[key]
        if line.entry.decision is not None:
            timed = line.entry.decision.timed
            self._replaced(line, line.entry.decision.configuration, after, reason, calls, timed=timed)

    def calls(self, key: Hashable) -> "array[int]":
        """Return the numbers of which the first 64 bits count the calls of a kernel. They live until `end`."""
        return self._lines[key].calls

    def end(self, key: Hashable) -> None:
        """Take that a kernel's handle was destroyed. Ended kernels with one problem and configuration are one line."""
        line = self._lines.pop(key, None)
        if line is None or line.entry.decision is None:
            return
        decision = line.entry.decision
        kept = self._lines.setdefault((decision.kernel.problem, decision.configuration), line)
        if kept is not line:
            kept.calls[0] += line.calls[0]

    def reports(
        self, backend: Backend, policy: str, divided: Sequence[Decisions], now: Mapping[str, Decision]
    ) -> list[Report]:
        """Return a report for each limit, that of the division first.

        Under WD, `divided` is the latest division, and `now` has the decisions that hold, by the keys of their kernels.
        """
        for name, decision in now.items():
            self.decide(name, decision)
        groups: dict[int | None, list[_Line]] = {}
        for line in self._lines.values():
            groups.setdefault(line.limit_bytes, []).append(line)
        return [
            self._report(backend, policy, divided if limit is None else self._decided[limit], groups[limit])
            for limit in sorted(groups, key=lambda limit: -1 if limit is None else limit)
        ]

    @staticmethod
    def _report(backend: Backend, policy: str, decided: Sequence[Decisions], lines: Sequence[_Line]) -> Report:
        report = report_run(decided, [line.entry for line in lines], backend, policy)
        changed = sum(any(not each.calls for each in line.entry.replacements) for line in lines)
        return replace(report, changed=changed)

    @staticmethod
    def _replaced(
        line: _Line, before: Configuration, after: Configuration, reason: str, calls: str = "", *, timed: bool
    ) -> None:
        line.entry.note(Replacement(before=before, after=after, reason=reason, calls=calls, timed=timed))
