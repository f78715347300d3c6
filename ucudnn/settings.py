"""Settings: arguments win over the environment, and the environment over defaults.

No other module reads the environment.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from math import inf
from operator import index
from typing import Any, TypeVar
from warnings import warn

from ucudnn.errors import InvalidSizeError, SettingsError
from ucudnn.policy import BatchSizePolicy
from ucudnn.units import parse_limit, shortened

_Choice = TypeVar("_Choice", bound=Enum)


class SolverName(Enum):
    """Solvers of WD's integer program, by their names in UCUDNN_SOLVER; AUTO is the fastest one that is installed."""

    AUTO = "auto"
    HIGHS = "highs"
    CBC = "cbc"
    GLPK = "glpk"
    GUROBI = "gurobi"
    CPLEX = "cplex"


def parse_choice(choices: type[_Choice], value: str | _Choice, name: str) -> _Choice:
    """Return a member of an enumeration from the member or its text, in upper or lower case.

    A SettingsError names the setting, the value and the allowed values.
    """
    if isinstance(value, choices):
        return value
    for choice in choices:
        if isinstance(value, str) and choice.value.lower() == value.strip().lower():
            return choice
    allowed = ", ".join(choice.value for choice in choices)
    raise SettingsError(f"{name}={value!r} is not known: give one of {allowed}")


def parse_size(value: int | str, name: str) -> int:
    """Return the bytes of a limit from a number or a text; a SettingsError names the setting and the value."""
    try:
        # The environment holds only text, so '67108864' is a number of bytes as well.
        return parse_limit(value, name)
    except InvalidSizeError as error:
        raise SettingsError(f"{name}: {error}") from error


def _parse_devices(value: str | int | Iterable[int], name: str) -> tuple[int, ...] | str:
    if isinstance(value, str) and value.strip().lower() in ("all", "ranks"):
        return value.strip().lower()
    try:
        parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else [*value]
        devices = tuple(int(part) if isinstance(part, str) else index(part) for part in parts)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{name}={shortened(value)} is not known: give numbers such as 0,1, or all, or ranks"
        ) from error
    if not devices or min(devices) < 0 or len(set(devices)) != len(devices):
        raise SettingsError(f"{name}={shortened(value)}: device numbers must be 0 or more and differ")
    return devices


def _parse_backend(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{name}={shortened(value)} is no name of a backend: give a text such as 'cpu'")
    kind, colon, target = value.strip().partition(":")
    if (kind in ("auto", "cpu", "cudnn") and not colon) or (kind in ("replay", "cudnn") and target):
        return value.strip()
    raise SettingsError(f"{name}={value!r} is not known: give auto, cpu, cudnn[:CANDIDATES] or replay:NAME-or-path")


def _parse_seconds(value: float | str, name: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name}={value!r} is no number of seconds") from error
    if not 0 < seconds < inf:
        raise SettingsError(f"{name}={value!r} must be more than 0 seconds")
    return seconds


def _parse_switch(value: bool | str, name: str) -> bool:
    known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    found = value if isinstance(value, bool) else known.get(str(value).casefold())
    if found is None:
        raise SettingsError(f"{name}={value!r} is not known: give 1 or 0")
    return found


def _parse_path(value: object, name: str) -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise SettingsError(f"{name}={shortened(value)} is no path of a file: give a text or a Path")
    if not text.strip():
        raise SettingsError(f"{name}={value!r} is empty: give the path of a file")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a handle.

    Attributes:
        policy: says which micro-batch sizes are benchmarked (UCUDNN_BATCH_SIZE_POLICY).
        workspace_limit_bytes: WR's limit for each kernel (UCUDNN_DEFAULT_WORKSPACE_LIMIT).
        total_workspace_bytes: WD's total for all kernels; None means WR (UCUDNN_TOTAL_WORKSPACE_SIZE).
        benchmark_devices: GPUs that measure together: numbers, 'all', or 'ranks' for those of torch.distributed. None
            for the current GPU alone (UCUDNN_BENCHMARK_DEVICES).
        database: file that keeps measurements; None for its default place, 'off' for no file (UCUDNN_DATABASE).
        backend: 'auto', 'cpu', 'cudnn', 'cudnn:CANDIDATES' or 'replay:NAME-or-path' (UCUDNN_BACKEND).
        solver: solver of WD's integer program (UCUDNN_SOLVER).
        solver_time_limit_seconds: seconds after which WD takes the best division so far; None waits for the optimum
            (UCUDNN_SOLVER_TIME_LIMIT).
        cudnn_library: the libcudnn to load; None searches for one (UCUDNN_CUDNN_LIBRARY).
        slabs: whether a single sample may be computed in slabs (UCUDNN_SLABS).
        remeasure: whether each problem is measured again in this process, whatever the database has (UCUDNN_REMEASURE).
        plans: file of plans to load; None for none (UCUDNN_PLANS).
        strict: whether a convolution of PyTorch that fails here is an error, and not left to PyTorch (UCUDNN_STRICT).
        names: by field, the name under which the user gave it, such as '--devices'. It is no setting itself.
    """

    policy: BatchSizePolicy = BatchSizePolicy.POWER_OF_TWO
    workspace_limit_bytes: int = 64 * 2**20
    total_workspace_bytes: int | None = None
    benchmark_devices: tuple[int, ...] | str | None = None
    database: str | None = None
    backend: str = "auto"
    solver: SolverName = SolverName.AUTO
    solver_time_limit_seconds: float | None = None
    cudnn_library: str | None = None
    slabs: bool = True
    remeasure: bool = False
    plans: str | None = None
    strict: bool = False
    names: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        names: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> "Settings":
        """Return settings from arguments, the environment and defaults; an argument of None counts as absent.

        Args:
            environment: variables to read; those of the process if None.
            names: by field, the name of the argument in errors, if it is not that of the argument of `Handle`.
            **arguments: values by field, as a value or as the text that the variable takes. A field may go by the name
                of its argument of `Handle`, which has no unit: `workspace_limit` for `workspace_limit_bytes`.

        Raises:
            SettingsError: names the argument or the variable, its value and the allowed values.
        """
        if environment is None:
            environment = os.environ
            for variable in environment:
                _warn_of_unknown(variable)
        unknown = set(arguments) - {*_FIELDS, *_ARGUMENTS}
        if unknown:
            raise SettingsError(f"unknown settings {sorted(unknown)}: there are {', '.join(_ARGUMENTS)}")
        arguments = {_ARGUMENTS.get(name, name): value for name, value in arguments.items()}
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for name, (variable, parse) in _FIELDS.items():
            value = arguments.get(name)
            if value is not None:
                given[name] = (names or {}).get(name, _without_unit(name))
            elif stated := _stated(variable, environment):
                given[name], value = stated
            if name in given:
                values[name] = parse(value, given[name])
        return cls(**values, names=given)

    def called(self, name: str) -> str:
        """Return the name under which the user gave a field: an option, a variable or an argument of `Handle`."""
        return self.names.get(name, _without_unit(name))


def _without_unit(name: str) -> str:
    """Return the name of a field as an argument of `Handle`."""
    return name.removesuffix("_bytes").removesuffix("_seconds")


def kernel_variables() -> dict[str, str]:
    """Return the variables of the environment by which libraries choose their kernels."""
    libraries = "CUBLAS", "CUDNN", "MKL_", "NVIDIA_TF32", "ONEDNN", "TORCH_CUDNN"
    return {name: value for name, value in os.environ.items() if name.startswith(libraries)}


_FIELDS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "policy": ("UCUDNN_BATCH_SIZE_POLICY", partial(parse_choice, BatchSizePolicy)),
    "workspace_limit_bytes": ("UCUDNN_DEFAULT_WORKSPACE_LIMIT", parse_size),
    "total_workspace_bytes": ("UCUDNN_TOTAL_WORKSPACE_SIZE", parse_size),
    "benchmark_devices": ("UCUDNN_BENCHMARK_DEVICES", _parse_devices),
    "database": ("UCUDNN_DATABASE", _parse_path),
    "backend": ("UCUDNN_BACKEND", _parse_backend),
    "solver": ("UCUDNN_SOLVER", partial(parse_choice, SolverName)),
    "solver_time_limit_seconds": ("UCUDNN_SOLVER_TIME_LIMIT", _parse_seconds),
    "cudnn_library": ("UCUDNN_CUDNN_LIBRARY", _parse_path),
    "slabs": ("UCUDNN_SLABS", _parse_switch),
    "remeasure": ("UCUDNN_REMEASURE", _parse_switch),
    "plans": ("UCUDNN_PLANS", _parse_path),
    "strict": ("UCUDNN_STRICT", _parse_switch),
}

_ARGUMENTS = {_without_unit(name): name for name in _FIELDS}

_ALSO = {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": "UCUDNN_WORKSPACE_LIMIT"}  # as its option and its argument are called
_OF_PROGRAMS = ("UCUDNN_REPORT", "UCUDNN_VERBOSE", "UCUDNN_PLAIN", "UCUDNN_PYTHON")

VARIABLES: dict[str, str] = {name: variable for name, (variable, _) in _FIELDS.items()}
"""The environment variable of each field of Settings."""


def report_file() -> str | None:
    """Return the file for a report at exit (UCUDNN_REPORT), or None for no report."""
    text = os.environ.get("UCUDNN_REPORT")
    return _parse_path(text, "UCUDNN_REPORT") if text else None


def is_set(name: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment sets a field of Settings; the environment is that of the process if None."""
    return _stated(VARIABLES[name], os.environ if environment is None else environment) is not None


def variables_set() -> dict[str, str]:
    """Return the variables of ucudnn that the environment sets, with their values."""
    return dict(filter(None, (_stated(variable, os.environ) for variable in VARIABLES.values())))


def _stated(variable: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a variable or the one that stands for it, and its value; None where neither is set."""
    names = (variable, _ALSO.get(variable, variable))
    return next(((name, environment[name]) for name in names if environment.get(name)), None)


@cache
def _warn_of_unknown(variable: str) -> None:
    """Warn of a variable that looks like one of ucudnn and is none, once in a process."""
    known = {*VARIABLES.values(), *_ALSO.values(), *_OF_PROGRAMS}
    if variable.startswith("UCUDNN_") and variable not in known:
        likely = get_close_matches(
            variable.removeprefix("UCUDNN_"), [each.removeprefix("UCUDNN_") for each in known], 1
        )
        meant = f": did you mean UCUDNN_{likely[0]}?" if likely else f": there are {', '.join(sorted(known))}"
        warn(f"{variable} is no variable of ucudnn, and has no effect{meant}", stacklevel=3)


def tell_libraries(variable: str, value: str) -> None:
    """Set a variable for libraries in C that this process has loaded or loads; `os.environ` stays as it is."""
    os.putenv(variable, value)
