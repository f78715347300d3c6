"""Files of plans: the configuration of each kernel, so that every process and rank computes with the same calls.

A file is a JSON text. Its keys are:

* `format`: always 'ucudnn-plans';
* `version`: 2. Files of version 1 have no sums in float32;
* `backend`: the name of the backend that planned;
* `conditions`: its device and versions. A plan names algorithms that only the same device and versions have;
* `plans`: a list. Each plan has its `layer`, its `batch` and the other fields of its `problem` that differ from their
  defaults, `count`, `spare_bytes`, `fresh`, and its `parts`. A part is [size, algorithm, time_ms, workspace_bytes,
  slabs], and a slab [first row, rows, algorithm, time_ms, workspace_bytes]. A time is null if nothing was measured. The
  parts of a filter gradient of 16 bits that are added in float32 have a `float32_sum`, which is [bytes, time_ms].
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, final

from ucudnn.backends.base import Backend
from ucudnn.bounded import read_whole
from ucudnn.configuration import Configuration, Float32Sum, MicroConfiguration, SlabConfiguration
from ucudnn.errors import InvalidValueError, MeasurementError, PlanFileError, ProfileError
from ucudnn.kernel import Kernel, KernelKey
from ucudnn.planning.float32_sums import summed
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import decode_problem, encode_problem
from ucudnn.profiles.json_values import MALFORMED, load_json, number, whole
from ucudnn.slabs import Slab, is_divisible, pieces_of, row_count
from ucudnn.units import bytes_down, bytes_up, shortened
from ucudnn.workspace.spare import own_bytes

_FORMAT = "ucudnn-plans"
_MOST_SHOWN = 200  # letters of a path
_VERSION = 2
_READ = (1, _VERSION)
_DECIDING = ("device", "capability", "cudnn", "cpus", "numpy")
_AGAIN = "make a new file with `--save-plans FILE` or `Handle.save_plans`"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """The plan of one kernel, as a file keeps it.

    Attributes:
        kernel: the kernel; its count is the number of layers that have this configuration.
        configuration: its configuration.
        timed: whether the times of the configuration were measured.
    """

    kernel: Kernel
    configuration: Configuration
    timed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """Plans, and what they were made for."""

    backend: str
    conditions: Mapping[str, str]
    plans: tuple[SavedPlan, ...]


@final
class LoadedPlans:
    """The plans of a file, to look up."""

    def __init__(self, plans: Iterable[SavedPlan] = (), name: str = "") -> None:
        self._name = name
        self._layers: dict[KernelKey, list[SavedPlan]] = {}
        self._any: dict[KernelKey, list[SavedPlan]] = {}  # whatever the layer is
        for each in plans:
            key = each.kernel.key()
            self._layers.setdefault(key, []).append(each)
            self._any.setdefault(key._replace(layer=""), []).append(each)

    def find(self, kernel: Kernel) -> SavedPlan | None:
        """Return the plan of a kernel.

        That of its layer comes first, then one of the same problem, if all plans of the problem are the same.
        """
        key = kernel.key()
        own = self._layers.get(key) or self._any.get(key._replace(layer="")) or []
        return own[0] if len({each.configuration for each in own}) == 1 else None

    def assigned(self, kernels: Iterable[Kernel]) -> list[tuple[Kernel, SavedPlan | None]]:
        """Return kernels with their plans; a kernel whose layers have several plans (WD) once for each of these."""
        found: list[tuple[Kernel, SavedPlan | None]] = []
        for kernel in kernels:
            own = self._layers.get(kernel.key(), ())
            if len(own) > 1 and sum(each.kernel.count for each in own) == kernel.count:
                found += [(each.kernel, each) for each in own]
            else:
                found.append((kernel, self.find(kernel)))
        return found

    def check(self, kernel: Kernel, plan: SavedPlan, backend: Backend, limit_bytes: int) -> None:
        """Refuse a plan that exceeds its limit (WR) or the total (WD), or that the backend would compute otherwise.

        The PlanFileError names the kernel and the way out.
        """
        problem, configuration = kernel.problem, plan.configuration
        where = f"{self._name}: the plan of {kernel}"
        need = configuration.workspace_bytes
        if not kernel.spare_bytes:
            need = own_bytes(problem, configuration, fresh=kernel.fresh)
        if need > limit_bytes:
            raise PlanFileError(
                f"{where} needs a workspace of {bytes_up(need)}, and the limit is {bytes_down(limit_bytes)}: give"
                f" that much, or {_AGAIN} within this limit"
            )
        asked = problem if configuration.float32_sum is None else summed(problem)
        offered = backend.float32_sum(problem)
        if asked is not problem and (offered is None or offered.size_bytes != configuration.sum_bytes):
            raise PlanFileError(
                f"{where} has a float32 sum of {bytes_up(configuration.sum_bytes)}, and backend {backend.name} keeps"
                f" {'none' if offered is None else bytes_up(offered.size_bytes)}: {_AGAIN}"
            )
        for part in dict.fromkeys(configuration.parts):
            pieces = pieces_of(asked, part.size, [each.slab for each in part.slabs])
            calls: Sequence[MicroConfiguration | SlabConfiguration] = part.slabs or [part]
            for piece, call in zip(pieces, calls, strict=True):
                algorithm = backend.algorithm(piece.problem, call.algorithm)
                if algorithm is None or algorithm.workspace_bytes != call.workspace_bytes:
                    has = "does not have" if algorithm is None else f"needs {bytes_up(algorithm.workspace_bytes)} for"
                    raise PlanFileError(
                        f"{where} does not fit: backend {backend.name} {has} {shortened(call.algorithm)} at size"
                        f" {part.size}, planned with {bytes_up(call.workspace_bytes)}: {_AGAIN}"
                    )


NO_PLANS = LoadedPlans()
"""The plans of no file."""


def read_plans(path: str | PathLike[str]) -> PlanFile:
    """Read a file of plans; a PlanFileError says if there is none, if it has another version, or if it is damaged."""
    try:
        content = load_json(read_whole(Path(path)))
    except InvalidValueError as error:
        raise PlanFileError(f"plans {_shown(path)}: {error}") from error
    except OSError as error:
        raise PlanFileError(
            f"plans {_shown(path)} cannot be read: {error.strerror or error}; `--save-plans FILE` makes a file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{_shown(path)} is no file of plans, or it is damaged: {_AGAIN}") from error
    try:
        return _decode(content)
    except PlanFileError as error:
        raise PlanFileError(f"{_shown(path)}: {error}") from error
    except (*MALFORMED, ProfileError, MeasurementError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PlanFileError(f"{_shown(path)} is damaged ({reason}): {_AGAIN}") from error


def load_plans(path: str | PathLike[str], backend: Backend) -> LoadedPlans:
    """Return the plans of a file for a backend.

    Raises:
        PlanFileError: as `read_plans`, and if the file was made for another device or other versions.
    """
    found = read_plans(path)
    refuse_difference(found.conditions, backend, f"{_shown(path)} (backend {found.backend})")
    return LoadedPlans(found.plans, _shown(path))


def refuse_difference(made: Mapping[str, str], backend: Backend, what: str) -> None:
    """Refuse plans that were made under other conditions than a backend's.

    The PlanFileError calls the plans `what`, and names the first condition that differs.
    """
    here = backend.machine()
    for name in _DECIDING:
        if made.get(name) != here.get(name):
            raise PlanFileError(
                f"{what} was made for {name} {made.get(name, 'unknown')}, and backend {backend.name} has"
                f" {here.get(name, 'none')}: {_AGAIN} here"
            )


def encode_plans(plans: Sequence[SavedPlan], backend: Backend) -> bytes:
    """Return the content of a file; each plan has a line of its own, so that two files can be compared."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "backend": backend.name,
        "conditions": dict(backend.machine()),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = ",\n".join(json.dumps(_encode(each), separators=(",", ":")) for each in plans)
    return ("{" + ",\n".join([*lines, f'"plans": [\n{rows}\n]']) + "}\n").encode()


def encode_all(made: Sequence[tuple[Backend, Sequence[SavedPlan]]]) -> bytes:
    """Return the file of the plans that several backends made; of one kernel, the first.

    Raises:
        PlanFileError: if there is no backend, or if they are of different devices.
    """
    if not made:
        raise PlanFileError("there are no plans to save, because no convolution was planned yet")
    first, *others = (backend for backend, _ in made)
    for other in others:
        refuse_difference(first.machine(), other, "the first device's plans")
    plans = {each.kernel: each for _, saved in reversed(made) for each in saved}
    return encode_plans(list(plans.values()), first)


def _encode(plan: SavedPlan) -> dict[str, Any]:
    kernel = plan.kernel

    def time(value: float) -> float | None:
        return value if plan.timed else None

    total = plan.configuration.float32_sum
    return {
        **({} if total is None else {"float32_sum": [total.size_bytes, total.time_ms]}),
        "layer": kernel.layer,
        "batch": kernel.problem.batch,
        "problem": encode_problem(kernel.problem),
        "count": kernel.count,
        "spare_bytes": kernel.spare_bytes,
        "fresh": kernel.fresh,
        "parts": [
            [
                each.size,
                each.algorithm,
                time(each.time_ms),
                each.workspace_bytes,
                [
                    [one.slab.first, one.slab.rows, one.algorithm, time(one.time_ms), one.workspace_bytes]
                    for one in each.slabs
                ],
            ]
            for each in plan.configuration.parts
        ],
    }


def _decode(content: Any) -> PlanFile:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlanFileError(f"it is no file of plans, because its format is not {_FORMAT!r}: {_AGAIN}")
    if type(content["version"]) is not int or content["version"] not in _READ:
        raise PlanFileError(
            f"its version is {shortened(content['version'])}, and this ucudnn reads version {_VERSION}: {_AGAIN}, or"
            " use the ucudnn that wrote it"
        )
    conditions = {str(name): str(value) for name, value in content["conditions"].items()}
    plans = tuple(_decode_plan(each) for each in content["plans"])
    return PlanFile(backend=str(content["backend"]), conditions=conditions, plans=plans)


def _decode_plan(given: Any) -> SavedPlan:
    problem = decode_problem(given["problem"], whole(given["batch"], "batch", 1))
    layer, fresh = given["layer"], given["fresh"]
    if not isinstance(layer, str) or not isinstance(fresh, bool):
        raise PlanFileError(f"a plan of {problem} has layer {shortened(layer)} and fresh {shortened(fresh)}: {_AGAIN}")
    kernel = Kernel(
        layer=layer,
        problem=problem,
        count=whole(given["count"], "count", 1),
        spare_bytes=whole(given["spare_bytes"], "spare_bytes"),
        fresh=fresh,
    )
    parts = tuple(_decode_part(problem, *each) for each in given["parts"])
    if sum(each.size for each in parts) != problem.batch:
        raise PlanFileError(f"the parts of {kernel} are not its {problem.batch} samples: {_AGAIN}")
    timed = all(time is not None for _, _, time, *_ in given["parts"])
    total: Float32Sum | None = None
    if given.get("float32_sum") is not None:
        size_bytes, time_ms = given["float32_sum"]
        if not problem.is_rounded_gradient:
            raise PlanFileError(f"{problem} has no float32 sum: {_AGAIN}")
        total = Float32Sum(size_bytes=whole(size_bytes, "size of the float32 sum", 1), time_ms=_time(time_ms, 1))
    return SavedPlan(kernel=kernel, configuration=Configuration(parts=parts, float32_sum=total), timed=timed)


def _decode_part(
    problem: ConvolutionProblem, size: Any, algorithm: Any, time_ms: Any, workspace_bytes: Any, slabs: Any
) -> MicroConfiguration:
    size, workspace_bytes = whole(size, "size", 1), whole(workspace_bytes, "workspace")
    if not slabs:
        return MicroConfiguration(
            size=size, algorithm=_text(algorithm), time_ms=_time(time_ms, size), workspace_bytes=workspace_bytes
        )
    if not is_divisible(problem):
        raise PlanFileError(f"{problem} has no slabs: {_AGAIN}")
    found, at = [], 0
    for first, rows, name, slab_ms, slab_bytes in slabs:
        slab = Slab(first=whole(first, "first row", at), rows=whole(rows, "rows", 1))
        if slab.first != at:
            raise PlanFileError(f"slabs of {problem} overlap or leave rows out: {_AGAIN}")
        at += slab.rows
        found.append(
            SlabConfiguration(
                slab=slab,
                algorithm=_text(name),
                time_ms=_time(slab_ms, slab.rows),
                workspace_bytes=whole(slab_bytes, "workspace"),
            )
        )
    if at != row_count(problem):
        raise PlanFileError(f"slabs of {problem} have {at} rows of {row_count(problem)}: {_AGAIN}")
    return MicroConfiguration.of_slabs(size, found)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise PlanFileError(f"{shortened(value)} is no name of an algorithm: {_AGAIN}")
    return value


def _time(value: Any, otherwise: int) -> float:
    return float(otherwise) if value is None else number(value, "time", 0, 1e12)


def _shown(path: str | PathLike[str]) -> str:
    """Return a path as an error shows it: whole, or with its end, which has the name of the file."""
    text = str(path)
    return repr(text if len(text) <= _MOST_SHOWN else f"...{text[-_MOST_SHOWN:]}")
