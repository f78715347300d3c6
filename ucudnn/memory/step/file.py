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
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ucudnn.bounded import read_whole
from ucudnn.errors import InvalidValueError, StepFileError, StepFileVersionError
from ucudnn.memory.step.costs import Costs, ScratchPieces
from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import decode_problem, encode_problem
from ucudnn.profiles.json_values import (
    MOST_WHOLE,
    entries,
    load_json,
    number,
    refused,
    text,
    texts,
    texts_by_name,
    whole,
)
from ucudnn.units import shortened

_FORMAT = "ucudnn-step"
_VERSION = 1
_LEAST_RATE = 1e-6  # of copies, in bytes per ms, of which any size is copied in a finite time


def load_step(path: Path) -> StepGraph:
    """Read a step from a file.

    Raises:
        StepFileError: if the file cannot be read, or holds no step, or one that makes no sense.
        StepFileVersionError: if the step has a version that this ucudnn does not know.
    """
    return decode_step(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except OSError as error:
        raise StepFileError(f"step {path} cannot be read: {error.strerror}") from error
    except InvalidValueError as error:
        raise StepFileError(f"step {path}: {error}") from error


def load_measured_step(path: Path) -> tuple[StepGraph, Costs | None]:
    """Read a step, and what was measured when it was recorded, at its `batch`; None where nothing was.

    Raises:
        StepFileError: see `load_step`; or if what was measured does not fit the step.
    """
    content = _content(_read(path), str(path))
    graph, measured = _checked(content, str(path)), content.get("measured")
    if measured is None:
        return graph, None
    with refused(f"step {path}", StepFileError):
        found = decode_measured(measured)
    for values in (found.time_ms, found.scratch_bytes, *((found.issue_ms,) if found.issue_ms else ())):
        if len(values) != len(graph.operations):
            raise StepFileError(f"step {path}: {len(values)} operations were measured of {len(graph.operations)}")
    return graph, found


def decode_step(data: bytes, source: str) -> StepGraph:
    """Return the step of a file's bytes, gzipped or not; messages name the source.

    Raises:
        StepFileError: see `load_step`.
    """
    return _checked(_content(data, source), source)


def _checked(content: dict[str, Any], source: str) -> StepGraph:
    with refused(f"step {source}", StepFileError):
        return _decode(content)


def _content(data: bytes, source: str) -> dict[str, Any]:
    with refused(f"step {source}", StepFileError):
        content = load_json(data)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise StepFileError(f"step {source}: format is not {_FORMAT!r}: record one with `ucudnn memory record`")
    if content.get("version") != _VERSION:
        raise StepFileVersionError(
            f"step {source} has version {shortened(content.get('version'))}, this ucudnn reads version {_VERSION}:"
            " record it again"
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
    head |= {"measured": None if measured is None else encode_measured(measured)}
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
    problems = [decode_problem(given, 1) for given in entries(content["problems"], "table of problems")]
    if type(content["gradients_kept"]) is not bool:
        raise InvalidValueError(f"gradients_kept {shortened(content['gradients_kept'])} is not true or false")
    return StepGraph(
        name=text(content["name"], "name"),
        batch=content["batch"],
        operations=tuple(_decode_operations(content, problems)),
        storages=tuple(
            Storage(
                name=text(name, "name of a storage"),
                role=Role(role),
                size=_decode_affine(size, f"size of {name}"),
                aliases=texts(aliases, f"alias of {name}"),
            )
            for name, role, *size, aliases in entries(content["storages"], "storages")
        ),
        recorded=_wholes(content["recorded"], "recorded mini-batch", least=1),
        gradients_kept=content["gradients_kept"],
        conditions=texts_by_name(content["conditions"], "condition"),
    )


def _decode_operations(content: dict[str, Any], problems: list[ConvolutionProblem]) -> Iterator[StepOperation]:
    tables = {name: texts(content[f"{name}s"], f"table of {name}s") for name in ("kind", "dtype", "module", "source")}

    def named(table: str, row: Any) -> str:
        return tables[table][whole(row, f"row of a {table}")]

    for row in entries(content["operations"], "operations"):
        name, kind, phase, dtype, reads, writes, flops, traffic, module, source, repeatable, *convolution = row
        text(name, "name of an operation")
        yield StepOperation(
            name=name,
            kind=named("kind", kind),
            phase=Phase(phase),
            dtype=named("dtype", dtype),
            reads=_wholes(reads, f"storage that {name} reads"),
            writes=_wholes(writes, f"storage that {name} writes"),
            flops=_decode_affine(flops, f"operations of {name}"),
            traffic=_decode_affine(traffic, f"traffic of {name}"),
            module=named("module", module),
            source=named("source", source),
            repeatable=bool(whole(repeatable, f"whether {name} is repeatable,", most=1)),
            problem=problems[whole(convolution[0], "row of a problem")] if convolution else None,
            problem_batch=_decode_affine(convolution[1], f"batch of {name}") if convolution else Affine(0, 1),
        )


def _decode_affine(value: Any, what: str) -> Affine:
    fixed, per_sample = _wholes(value, what, least=-MOST_WHOLE)
    return Affine(fixed, per_sample)


def _wholes(value: Any, what: str, least: int = 0) -> tuple[int, ...]:
    return tuple(whole(each, what, least) for each in entries(value, what))


def encode_measured(measured: Costs) -> dict[str, Any]:
    """Return costs as a JSON value, without what convolutions can choose from."""
    fields = asdict(replace(measured, configurations={}, scratch_pieces={}))
    del fields["modelled"]
    pieces = [[operation, *map(list, each)] for operation, each in sorted(measured.scratch_pieces.items())]
    return {**fields, "scratch_pieces": pieces}


def decode_measured(given: Any) -> Costs:
    """Return the costs of a JSON value; one of `UNREADABLE`, or an InvalidValueError, if it makes no sense."""
    fields: dict[str, Any] = dict(given)
    for name in ("configurations", "modelled"):  # neither is ever written
        fields.pop(name, None)
    for name, value in fields.items():
        what = f"measured {name}"
        if name == "device":
            text(value, what)
        elif name in ("time_ms", "issue_ms"):
            fields[name] = tuple(number(each, what) for each in entries(value, what))
        elif name == "scratch_bytes":
            fields[name] = _wholes(value, what)
        elif name == "scratch_pieces":
            fields[name] = {
                whole(operation, what): ScratchPieces(_wholes(order, what, least=-MOST_WHOLE), _wholes(later, what))
                for operation, order, later in entries(value, what)
            }
        elif name in ("memory_bytes", "granularity"):
            whole(value, what)
        else:
            number(value, what, least=_LEAST_RATE)
    return Costs(**fields)


def _affine(value: Affine) -> list[int]:
    return [value.fixed, value.per_sample]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
