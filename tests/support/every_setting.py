"""Settings whose every field differs from its default, as each face is told of them."""

import tempfile
from dataclasses import fields
from pathlib import Path

from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.planning.plan_file import encode_plans
from ucudnn.policy import BatchSizePolicy
from ucudnn.settings import VARIABLES, Settings, SolverName

_FOLDER = tempfile.TemporaryDirectory()  # which is removed at the end of the process
NO_PLANS = Path(_FOLDER.name) / "plans.json"
"""A file without plans."""
NO_PLANS.write_bytes(encode_plans([], CpuBackend()))

EVERY = Settings(
    policy=BatchSizePolicy.ALL,
    workspace_limit_bytes=8 * 2**20,
    total_workspace_bytes=2**20,
    benchmark_devices=(0,),
    database="off",
    backend="cpu",
    solver=SolverName.HIGHS,
    solver_time_limit_seconds=2.5,
    cudnn_library="/nowhere/libcudnn.so.9",
    slabs=False,
    remeasure=True,
    plans=str(NO_PLANS),
    strict=True,
)
"""Every field differs from its default; the CPU can plan with them."""

TEXTS = {
    "policy": "all",
    "workspace_limit_bytes": "8MiB",
    "total_workspace_bytes": "1MiB",
    "benchmark_devices": "0",
    "database": "off",
    "backend": "cpu",
    "solver": "highs",
    "solver_time_limit_seconds": "2.5",
    "cudnn_library": "/nowhere/libcudnn.so.9",
    "slabs": "0",
    "remeasure": "1",
    "plans": str(NO_PLANS),
    "strict": "1",
}
"""The same as environment variables and arguments have them, by field."""

OPTIONS = {
    "policy": ["--policy", "all"],
    "total_workspace_bytes": ["--total-workspace", "1MiB"],
    "benchmark_devices": ["--devices", "0"],
    "database": ["--database", "off"],
    "backend": ["--backend", "cpu"],
    "solver": ["--solver", "highs"],
    "solver_time_limit_seconds": ["--solver-time-limit", "2.5"],
    "slabs": ["--no-slabs"],
    "remeasure": ["--remeasure"],
    "plans": ["--plans", str(NO_PLANS)],
    "strict": ["--strict"],
}
"""The same as options. `cudnn_library` has no option, and a limit has no effect beside a total."""

ALL_OPTIONS = [word for words in OPTIONS.values() for word in words]


def set_variables(monkeypatch, given):
    """Set the environment variables of some fields to their texts, and unset all others."""
    for field, variable in VARIABLES.items():
        if field in given:
            monkeypatch.setenv(variable, TEXTS[field])
        else:
            monkeypatch.delenv(variable, raising=False)


def arguments(given):
    return {name.removesuffix("_bytes").removesuffix("_seconds"): TEXTS[name] for name in given}


def partly(given):
    """Return settings in which some fields differ from their defaults."""
    return Settings(**{name: getattr(EVERY, name) for name in given})


FIELDS = [field.name for field in fields(Settings) if field.name != "names"]  # what is no setting itself
assert all(getattr(EVERY, field.name) != field.default for field in fields(Settings) if field.name in FIELDS)
assert set(TEXTS) == set(FIELDS)
assert {*OPTIONS, "workspace_limit_bytes", "cudnn_library"} == set(FIELDS)
