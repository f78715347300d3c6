"""Recorded training steps in a file: a StepGraph as JSON, gzipped where the name ends in .gz.

* `format` 'ucudnn-step' and `version` 1;
* `name`, `batch`, `recorded`, `gradients_kept` and `conditions`: the fields of StepGraph;
* `kinds`, `dtypes`, `modules`, `sources`: tables of texts, into which the rows of operations point;
* `problems`: a table of convolutions, each with the fields of ConvolutionProblem that differ from their defaults;
* `storages`: a row for each, [name, role, fixed bytes, bytes per sample, aliases];
* `operations`: a row for each, [name, kind, phase, dtype, reads, writes, flops, traffic, module, source, repeatable,
  problem, its batch], where flops, traffic and the problem's batch are [fixed, per sample]; the last two entries are
  absent where the operation computes no convolution;
* `measured`: the fields of Costs, as they were measured at `batch`; null where nothing was.

Files of steps differ line by line, because each storage and each operation has a line of its own.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ucudnn.errors import InvalidValueError, ProfileError, StepFileError, StepFileVersionError
from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import decode_problem, encode_problem

_FORMAT = "ucudnn-step"
_VERSION = 1


def load_step(path: Path) -> StepGraph:
    """Read a step from a file.

    Raises:
        StepFileError: if the file cannot be read, or holds no step, or one that makes no sense.
        StepFileVersionError: if the step has a version that this ucudnn does not know.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StepFileError(f"step {path} cannot be read: {error.strerror}") from error
    return decode_step(data, str(path))


def load_measured(path: Path) -> Costs | None:
    """Read what was measured when a step was recorded, at its `batch`; None where nothing was.

    Raises:
        StepFileError: see `load_step`; or if what was measured does not fit the step.
    """
    graph, content = load_step(path), _content(path.read_bytes(), str(path))
    measured = content.get("measured")
    if measured is None:
        return None
    try:
        fields: dict[str, Any] = {**measured, **{key: tuple(measured[key]) for key in ("time_ms", "scratch_bytes")}}
        found = Costs(**fields)
    except (KeyError, TypeError) as error:
        raise StepFileError(f"step {path} cannot be read: {type(error).__name__}: {error}") from error
    if not len(found.time_ms) == len(found.scratch_bytes) == len(graph.operations):
        raise StepFileError(f"step {path}: {len(found.time_ms)} operations were measured of {len(graph.operations)}")
    return found


def save_step(graph: StepGraph, path: Path, measured: Costs | None = None) -> None:
    """Write a step to a file, with what was measured of it at its mini-batch; gzipped where the name ends in .gz."""
    path.write_bytes(encode_step(graph, measured, compress=path.suffix == ".gz"))


def decode_step(data: bytes, source: str) -> StepGraph:
    """Return the step of a file's bytes, gzipped or not; messages name the source.

    Raises:
        StepFileError: see `load_step`.
    """
    try:
        return _decode(_content(data, source))
    except (InvalidValueError, ProfileError) as error:
        raise StepFileError(f"step {source}: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StepFileError(f"step {source} cannot be read: {type(error).__name__}: {error}") from error


def _content(data: bytes, source: str) -> dict[str, Any]:
    """Return the JSON of a file of this format and version."""
    try:
        text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        content = json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise StepFileError(f"step {source} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise StepFileError(f"step {source}: format is not {_FORMAT!r}: record one with `ucudnn memory record`")
    if content.get("version") != _VERSION:
        raise StepFileVersionError(
            f"step {source} has version {content.get('version')}, this ucudnn reads version {_VERSION}: record it again"
        )
    return content


def encode_step(graph: StepGraph, measured: Costs | None = None, *, compress: bool = False) -> bytes:
    """Return a step as the JSON that `decode_step` reads, with what was measured of it; gzipped if asked for."""
    kinds, dtypes, modules, sources, problems = _Table(), _Table(), _Table(), _Table(), _Table()
    operations = []
    for each in graph.operations:
        row: list[Any] = [each.name, kinds.row(each.kind), each.phase.value, dtypes.row(each.dtype)]
        row += [each.reads, each.writes, _affine(each.flops), _affine(each.traffic)]
        row += [modules.row(each.module), sources.row(each.source), int(each.repeatable)]
        if each.problem is not None:
            row += [problems.row(_compact(encode_problem(each.problem))), _affine(each.problem_batch)]
        operations.append(_compact(row))
    storages = [_compact([each.name, each.role.value, *_affine(each.size), each.aliases]) for each in graph.storages]
    head = {"format": _FORMAT, "version": _VERSION, "name": graph.name, "batch": graph.batch}
    head |= {"recorded": graph.recorded, "gradients_kept": graph.gradients_kept, "conditions": dict(graph.conditions)}
    head |= {"measured": None if measured is None else asdict(replace(measured, configurations={}))}
    head |= {"kinds": [*kinds], "dtypes": [*dtypes], "modules": [*modules], "sources": [*sources]}
    lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in head.items()]
    for key, rows in (("problems", problems), ("storages", storages), ("operations", operations)):
        lines.append(f"{json.dumps(key)}: [\n" + ",\n".join(rows) + "\n]")
    data = ("{" + ",\n".join(lines) + "}\n").encode()
    return gzip.compress(data, mtime=0) if compress else data


class _Table(dict[str, int]):
    """Texts by the row that they got when they came first."""

    def row(self, text: str) -> int:
        return self.setdefault(text, len(self))


def _decode(content: dict[str, Any]) -> StepGraph:
    problems = [decode_problem(given, 1) for given in content["problems"]]
    return StepGraph(
        name=content["name"],
        batch=content["batch"],
        operations=tuple(_decode_operations(content, problems)),
        storages=tuple(_decode_storages(content["storages"])),
        recorded=tuple(content["recorded"]),
        gradients_kept=content["gradients_kept"],
        conditions=dict(content["conditions"]),
    )


def _decode_operations(content: dict[str, Any], problems: list[ConvolutionProblem]) -> Iterator[StepOperation]:
    kinds, dtypes, modules, sources = (content[table] for table in ("kinds", "dtypes", "modules", "sources"))
    for row in content["operations"]:
        name, kind, phase, dtype, reads, writes, flops, traffic, module, source, repeatable, *convolution = row
        yield StepOperation(
            name=name,
            kind=kinds[kind],
            phase=Phase(phase),
            dtype=dtypes[dtype],
            reads=tuple(reads),
            writes=tuple(writes),
            flops=Affine(*flops),
            traffic=Affine(*traffic),
            module=modules[module],
            source=sources[source],
            repeatable=bool(repeatable),
            problem=problems[convolution[0]] if convolution else None,
            problem_batch=Affine(*convolution[1]) if convolution else Affine(0, 1),
        )


def _decode_storages(rows: Iterable[list[Any]]) -> Iterator[Storage]:
    for name, role, fixed, per_sample, aliases in rows:
        yield Storage(name=name, role=Role(role), size=Affine(fixed, per_sample), aliases=tuple(aliases))


def _affine(value: Affine) -> list[int]:
    return [value.fixed, value.per_sample]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
