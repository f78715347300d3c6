"""Recorded profiles: the measurements of one machine in a file, to plan for that machine from anywhere.

A profile is a JSON text. It is compressed by gzip if its name ends in .gz. Its keys are:

* `format`, which is 'ucudnn-profile', and `version`, which is 3;
* `conditions`: the device and the versions that the times depend on;
* `columns`: the meaning of a row, ["algorithm", "time_ms", "spread_ms", "workspace_bytes"];
* `algorithms`: a table of [api, name, notes], to which the first column of a row is an index;
* `recordings`: for each network a list of problems. Each has the fields of ConvolutionProblem that differ from their
  defaults, and its rows by micro-batch size;
* `database`, which is optional: the rows of a database, as `ucudnn profile --export` moves them.

Recordings were measured at different times, so times of different recordings are never mixed.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from importlib import resources
from math import prod
from typing import Any

from ucudnn.bounded import named_file, read_whole
from ucudnn.errors import InvalidProblemError, ProfileError
from ucudnn.problem import ENUM_FIELDS, ConvolutionProblem, Layout
from ucudnn.profiles.json_values import load_json, refused, texts_by_name, whole
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.units import shortened

_FORMAT = "ucudnn-profile"
_VERSION = 3
_COLUMNS = ["algorithm", "time_ms", "spread_ms", "workspace_bytes"]
_DIGITS = 5  # of a time, more than a measurement is precise to
_MOST_BYTES = 1 << 27  # of a file, unpacked: 1,000,000 rows of a database
_MOST_MS = 1e12  # 30 years; sums of larger times could overflow

Recording = Mapping[ConvolutionProblem, tuple[Measurement, ...]]
"""The measurements of each problem at its (micro-)batch size."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of one machine.

    Attributes:
        name: the name it was loaded by.
        conditions: the device and the versions that the times depend on.
        recordings: the measurements by the name of the recorded network.
        database: all rows of a database of which the profile was exported; only `Database.import_profile` reads them.
    """

    name: str
    conditions: Mapping[str, str]
    recordings: Mapping[str, Recording]
    database: Mapping[str, Any] | None = None


def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that ship with ucudnn."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _shipped()))


def load_profile(name: str) -> Profile:
    """Read a profile that ships with ucudnn ('h200') or a file.

    A ProfileError says if there is no such profile, if it has another version, or if it is damaged.
    """
    shipped = shipped_profiles()
    if name in shipped:
        return _load_shipped(name)
    neither = f"a file nor one that ships with ucudnn: {', '.join(shipped)}"
    return _read(name, named_file("profile", name, ProfileError, neither))


@lru_cache(maxsize=2)
def _load_shipped(name: str) -> Profile:
    """Return a profile that ships with ucudnn; it is kept, because several parts of a program read it."""
    return _read(name, next(entry for entry in _shipped() if entry.name == f"{name}.json"))


def _read(name: str, source: Any) -> Profile:
    with refused(f"profile {name}", ProfileError):
        return _decode(name, load_json(read_whole(source, _MOST_BYTES), _MOST_BYTES))


def encode_profile(profile: Profile, *, compress: bool = False) -> bytes:
    """Return the content of a profile's file.

    Each micro-batch size of a problem has a line of its own, so that two versions of a file can be compared.
    """
    text = "".join(_encode(profile)).encode()
    return gzip.compress(text, mtime=0) if compress else text


def refuse_other_conditions(profile: Profile, conditions: Mapping[str, str]) -> None:
    """Raise a ProfileError if a profile was recorded under other conditions."""
    if dict(profile.conditions) != dict(conditions):
        raise ProfileError(
            f"{profile.name} was recorded under {dict(profile.conditions)}, not {dict(conditions)}: record to another"
            " file"
        )


def merged(profile: Profile, other: Profile) -> Profile:
    """Return a profile with the recordings of another one added, which was recorded under the same conditions.

    If both measured an algorithm of the same problem, the other's measurement is kept.
    """
    refuse_other_conditions(profile, other.conditions)
    recordings = {name: dict(recording) for name, recording in profile.recordings.items()}
    for name, recording in other.recordings.items():
        mine = recordings.setdefault(name, {})
        for problem, records in recording.items():
            both = {
                (record.algorithm.api, record.algorithm.name): record for record in (*mine.get(problem, ()), *records)
            }
            mine[problem] = tuple(both.values())
    rows = profile.database or other.database
    return Profile(name=profile.name, conditions=profile.conditions, recordings=recordings, database=rows)


def recorded(measurement: Measurement) -> Measurement:
    """Return a measurement as a profile keeps it: with its median, its spread, its workspace and its notes only."""
    return Measurement(
        algorithm=replace(measurement.algorithm, compiles=False),
        time_ms=measurement.time_ms,
        spread_ms=measurement.spread_ms,
    )


def count_records(profile: Profile) -> int:
    """Return how many measurements a profile holds."""
    return sum(len(records) for recording in profile.recordings.values() for records in recording.values())


def _shipped() -> Iterator[Any]:
    folder = resources.files("ucudnn") / "profiles"
    return (entry for entry in folder.iterdir() if entry.name.endswith(".json"))


def _decode(name: str, content: Any) -> Profile:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ProfileError(f"format is not {_FORMAT!r}")
    if content["version"] != _VERSION:
        raise ProfileError(
            f"format version {shortened(content['version'])} is not version {_VERSION}, which this ucudnn reads:"
            " record the network again with `ucudnn profile NETWORK --out FILE`, or use the ucudnn that wrote it"
        )
    if content["columns"] != _COLUMNS:
        raise ProfileError(f"columns {shortened(content['columns'])} are not {_COLUMNS}")
    algorithms = [(api, algorithm, tuple(notes)) for api, algorithm, notes in content["algorithms"]]
    for api, algorithm, notes in algorithms:
        if not all(isinstance(text, str) for text in (api, algorithm, *notes)):
            raise ProfileError(f"algorithm {shortened([api, algorithm, *notes])} is not named by texts")
    recordings = {}
    shared: dict[tuple[int, int], Algorithm] = {}
    for network, entries in content["recordings"].items():
        recording: dict[ConvolutionProblem, tuple[Measurement, ...]] = {}
        for entry in entries:
            for problem, rows in _by_size(entry):
                recording[problem] = tuple(_decode_row(problem, row, algorithms, shared) for row in rows)
        recordings[network] = recording
    conditions = texts_by_name(content["conditions"], "condition")
    database = content.get("database")
    if database is not None and not isinstance(database, dict):
        raise ProfileError("the rows of its database are no JSON object")
    return Profile(name=name, conditions=conditions, recordings=recordings, database=database)


def _by_size(entry: Mapping[str, Any]) -> Iterator[tuple[ConvolutionProblem, list[Any]]]:
    """Yield a problem at each of its sizes, with its rows; it differs in nothing else, so the rest is checked once."""
    given = decode_problem(entry["problem"], batch=1)
    for size, rows in entry["rows"].items():
        try:
            problem = given.with_batch(int(size))
        except InvalidProblemError as error:
            raise ProfileError(str(error)) from error
        yield problem, rows


def _decode_row(
    problem: ConvolutionProblem,
    row: list[Any],
    algorithms: list[tuple[str, str, tuple[str, ...]]],
    shared: dict[tuple[int, int], Algorithm],
) -> Measurement:
    """Return the measurement of a row; `shared` keeps its algorithm for other rows, of which most have an equal one."""
    index, time_ms, spread_ms, workspace_bytes = row
    api, algorithm, notes = algorithms[index]
    if not (type(time_ms) in (int, float) and 0 < time_ms < _MOST_MS):
        raise ProfileError(f"{problem}: {algorithm} took {time_ms} ms, which is no time")
    if not (type(spread_ms) in (int, float) and 0 <= spread_ms < _MOST_MS):
        raise ProfileError(f"{problem}: {algorithm} has times {spread_ms} ms apart, which is no spread")
    size = whole(workspace_bytes, lambda: f"{problem}: workspace of {algorithm}")  # a profile has thousands of rows
    key = index, size
    if key not in shared:
        shared[key] = Algorithm(name=algorithm, workspace_bytes=size, api=api, notes=notes)
    return Measurement(algorithm=shared[key], time_ms=time_ms, spread_ms=spread_ms)


def decode_problem(given: Mapping[str, Any], batch: int) -> ConvolutionProblem:
    """Return a problem from the fields that `encode_problem` returned; a ProfileError says if they make none."""
    values: dict[str, Any] = {"batch": batch}
    for field, value in given.items():
        if field in ENUM_FIELDS:
            value = ENUM_FIELDS[field](value)
        elif isinstance(value, list):
            value = tuple(value)
        values[field] = value
    try:
        return ConvolutionProblem(**values)
    except InvalidProblemError as error:
        raise ProfileError(str(error)) from error


def encode_problem(problem: ConvolutionProblem) -> dict[str, Any]:
    """Return the fields of a problem that differ from their defaults, except for the batch, as JSON values."""
    dimensions = len(problem.spatial)
    unpadded = (size - taps + 1 for size, taps in zip(problem.spatial, problem.kernel, strict=True))
    defaults = {
        "padding": (0,) * dimensions,
        "stride": (1,) * dimensions,
        "dilation": (1,) * dimensions,
        "layout": Layout.channels_first(dimensions),
        "x_batch_stride": problem.channels * prod(problem.spatial),
        "y_batch_stride": problem.filters * prod(unpadded),  # its value without padding and stride
    }
    values = {}
    for field in fields(ConvolutionProblem):
        value = getattr(problem, field.name)
        default = defaults.get(field.name, field.default)
        if field.name.endswith("_batch_stride") and value != getattr(problem, f"{field.name[0]}_sample"):
            default = MISSING  # decoding would fill in another value
        if field.init and field.name != "batch" and (default is MISSING or value != default):
            values[field.name] = value.value if isinstance(value, Enum) else value
    return values


def _encode(profile: Profile) -> Iterator[str]:
    algorithms: dict[tuple[str, str, tuple[str, ...]], int] = {}
    recordings = [
        f"{json.dumps(network)}: [\n{_encode_recording(recording, algorithms)}\n]"
        for network, recording in profile.recordings.items()
    ]
    head = {"format": _FORMAT, "version": _VERSION, "conditions": dict(profile.conditions), "columns": _COLUMNS}
    yield "".join(f"{'{' if key == 'format' else ''}{json.dumps(key)}: {json.dumps(head[key])},\n" for key in head)
    yield '"algorithms": [\n' + ",\n".join(_compact([*key]) for key in algorithms) + "\n],\n"
    yield '"recordings": {\n' + ",\n".join(recordings) + "\n}"
    if profile.database is not None:
        parts = (
            f"{json.dumps(key)}: [\n" + ",\n".join(map(_compact, rows)) + "\n]"
            for key, rows in profile.database.items()
        )
        yield ',\n"database": {\n' + ",\n".join(parts) + "\n}"
    yield "}\n"


def _encode_recording(recording: Recording, algorithms: dict[tuple[str, str, tuple[str, ...]], int]) -> str:
    entries: dict[str, dict[str, list[list[Any]]]] = {}
    for problem, records in recording.items():
        rows = entries.setdefault(_compact(encode_problem(problem)), {})
        own = rows[str(problem.batch)] = []
        for record in records:
            key = (record.algorithm.api, record.algorithm.name, record.algorithm.notes)
            times = (float(f"{value:.{_DIGITS}g}") for value in (record.time_ms, record.spread_ms))
            own.append([algorithms.setdefault(key, len(algorithms)), *times, record.algorithm.workspace_bytes])
    return ",\n".join(
        f'{{"problem": {problem}, "rows": {{\n'
        + ",\n".join(f"{json.dumps(batch)}: {_compact(batch_rows)}" for batch, batch_rows in rows.items())
        + "}}"
        for problem, rows in entries.items()
    )


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
