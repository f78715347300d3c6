"""The rows of the database: how problems, measurements and explorations are written, and read back with a check.

SQLite checks neither the types nor the meaning of what it reads, and people edit rows by hand. What makes no sense is a
ValueError that names it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from ucudnn.benchmarking.request import Exploration, Request, SlabDivision
from ucudnn.bounded import BoundedDict
from ucudnn.errors import InvalidValueError, UcudnnError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import decode_problem, encode_problem
from ucudnn.profiles.json_values import MALFORMED, entries, number, text, texts, texts_by_name, whole
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus
from ucudnn.slabs import row_count
from ucudnn.units import shortened

EXPLORATION_COLUMNS = ("problem", "request", "names", "sizes", "divisions", "explored_at")
"""The columns of an exploration beside its machine, in the order in which they are written and read."""

_APIS = ("graph", "legacy", "cpu")  # of the backends that compute
_MOST_MS = 1e12  # 30 years; sums of larger times could overflow
_MOST_KNOWN = 1 << 16
_MOST_SLABS = 1 << 17  # of all divisions
_MOST_REASON = 10_000  # characters
_STATUS = {each.value: each for each in MeasurementStatus}
_AROUND_BATCH: BoundedDict[tuple[Any, ...], tuple[str, str]] = BoundedDict(_MOST_KNOWN)
_UNREADABLE = (*MALFORMED, UcudnnError)
"""What reading a text that is no such row can raise."""

_all_but_batch = attrgetter(*(each.name for each in fields(ConvolutionProblem) if each.init and each.name != "batch"))


def dump(value: Any) -> str:
    """Return a value as JSON; equal values make equal texts."""
    return json.dumps(value if not isinstance(value, Mapping) else dict(value), separators=(",", ":"), sort_keys=True)


def problem_text(problem: ConvolutionProblem) -> str:
    """Return a problem as JSON. Problems that differ only in their batch share the text around it."""
    rest = _all_but_batch(problem)
    around = _AROUND_BATCH.get(rest)
    if around is None:
        before, _, after = dump({**encode_problem(problem), "batch": 0}).partition('"batch":0')
        around = _AROUND_BATCH[rest] = f'{before}"batch":', after
    return f"{around[0]}{problem.batch}{around[1]}"


@lru_cache(maxsize=_MOST_KNOWN)
def key_of(text: str) -> bytes:
    """Return the key of a machine or a problem, which is given as text."""
    return blake2b(text.encode(errors="surrogateescape"), digest_size=16).digest()  # wrong bytes have another key


def check_key(key: Any, text: Any) -> None:
    """Raise an error if a key is not that of a machine or a problem, which is given as text."""
    if not isinstance(text, str):
        raise ValueError(f"{shortened(text)} is no text")
    if key != key_of(text):
        raise ValueError(f"{shortened(text)} has the key of something else")


def decode_problem_text(text: Any) -> ConvolutionProblem:
    """Return the problem of a text."""
    try:
        values = json.loads(text)
        return decode_problem(values, values.pop("batch"))
    except _UNREADABLE as error:
        raise _unreadable(f"problem {shortened(text)}", error) from error


def decode_conditions(text: Any) -> dict[str, str]:
    """Return the conditions of a machine from their text."""
    try:
        return texts_by_name(json.loads(text), "condition")
    except _UNREADABLE as error:
        raise _unreadable(f"machine {shortened(text)}", error) from error


def decode_exploration(row: Sequence[Any], problem: ConvolutionProblem) -> Exploration:
    """Return what was tried for a problem, from its names, sizes and divisions."""
    try:
        names, sizes, divisions = (json.loads(text) for text in row)
        rows = row_count(problem)
        found = Exploration(
            names=texts(names, "names"),
            sizes=tuple(whole(each, "size", 1, problem.batch) for each in entries(sizes, "sizes")),
            divisions=tuple(
                SlabDivision(whole(size, "size", 1, problem.batch), whole(height, "rows", 1, rows))
                for size, height in divisions
            ),
        )
        if sum(-(-rows // each.rows) for each in found.divisions) > _MOST_SLABS:
            raise ValueError("it has more slabs than any plan")
        if found.divisions:
            found.parts(problem)
    except _UNREADABLE as error:
        raise _unreadable(f"what was tried for {problem}", error) from error
    return found


def _unreadable(what: str, error: Exception) -> ValueError:
    return ValueError(f"{what} cannot be read: {type(error).__name__}: {error}")


def request_text(name: str, request: Request) -> str:
    """Return a request on a backend as JSON, without its problem."""
    sizes = request.sizes
    whole = sizes == tuple(range(1, request.problem.batch + 1))
    values = {
        "backend": name,
        "sizes": "all" if whole else sizes,
        "limit": request.limit_bytes,
        "whole": request.whole,
        "apart": request.apart,
        "adaptive": request.adaptive,
        "least": request.least_size,
    }
    return dump(values | {"rows": request.rows} if request.rows else values)


def encode_measurement(part: ConvolutionProblem, measurement: Measurement, measured_at: str) -> tuple[Any, ...]:
    """Return the values of MEASUREMENT_COLUMNS."""
    algorithm = measurement.algorithm
    return (
        key_of(problem_text(part)),
        algorithm.api,
        algorithm.name,
        " ".join(algorithm.notes),
        int(algorithm.compiles),
        measurement.status.value,
        measurement.time_ms,
        measurement.spread_ms,
        measurement.samples,
        int(measurement.complete),
        algorithm.workspace_bytes,
        measurement.reason[:_MOST_REASON].encode(errors="backslashreplace").decode(),
        measured_at,
    )


@lru_cache(maxsize=_MOST_KNOWN)
def _notes(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MEASUREMENT_COLUMNS = (
    *("problem", "api", "algorithm", "notes", "compiles", "status", "time_ms", "spread_ms"),
    *("samples", "complete", "workspace_bytes", "reason", "measured_at"),
)
"""The columns of a measurement beside its machine, in the order in which they are written and read."""


def decode_measurement(row: Sequence[Any]) -> Measurement:
    """Return a measurement from the values between its problem and its date."""
    api, name, notes, compiles, status, time_ms, spread_ms, samples, complete, workspace_bytes, reason = row
    try:
        if status not in _STATUS:
            raise ValueError(f"status {shortened(status)} is none of {', '.join(_STATUS)}")
        if not name:
            raise ValueError(f"algorithm {shortened(name)} is no name")
        if not time_ms and status == MeasurementStatus.MEASURED.value:
            raise ValueError(f"{shortened(time_ms)} ms is no time")
        return Measurement(
            algorithm=Algorithm(
                name=text(name, "algorithm"),
                workspace_bytes=whole(workspace_bytes, "workspace_bytes"),
                api=text(api, "api"),
                notes=_notes(text(notes, "notes")),
                compiles=bool(whole(compiles, "compiles", 0, 1)),
            ),
            status=_STATUS[status],
            time_ms=number(time_ms, "time_ms", 0, _MOST_MS),
            spread_ms=number(spread_ms, "spread_ms", 0, _MOST_MS),
            samples=whole(samples, "samples"),
            complete=bool(whole(complete, "complete", 0, 1)),
            reason=text(reason, "reason"),
        )
    except (TypeError, ValueError, InvalidValueError) as error:
        raise ValueError(f"{shortened(name)}: {error}") from error


def check_rows(
    problems: Sequence[ConvolutionProblem], measurements: Sequence[Any], explorations: Sequence[Any]
) -> None:
    """Raise an error if a row makes no sense; indices of problems stand for their keys."""
    try:
        for at, *row, date in measurements:
            problems[at]
            found = decode_measurement(row)
            _check_texts(date, *row)
            if found.algorithm.api not in _APIS:
                raise ValueError(f"{found.algorithm.name}: API {found.algorithm.api!r} is none of {', '.join(_APIS)}")
        for at, request, *row, date in explorations:
            decode_exploration(row, problems[at])
            _check_texts(date, request, *row)
            if not isinstance(json.loads(request), dict):
                raise ValueError(f"request {shortened(request)} is no JSON object")
    except MALFORMED as error:
        raise _unreadable("a row", error) from error


def _check_texts(date: Any, *row: Any) -> None:
    for value in row:
        if isinstance(value, str):
            value.encode()  # fails if the bytes were no UTF-8
    if not isinstance(date, str):
        raise ValueError(f"date {shortened(date)} is no text")
    datetime.fromisoformat(date)
