"""Training steps that ship with ucudnn, so that planning needs neither PyTorch nor a GPU.

They were recorded by `python -m bench.memory.record_steps` and hold for every mini-batch.
"""

from importlib import resources
from pathlib import Path

from ucudnn.bounded import named_file
from ucudnn.errors import StepFileError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.file import decode_step, load_measured_step, load_step
from ucudnn.memory.step.graph import StepGraph

__all__ = ["open_measured_step", "open_step", "shipped_steps"]

_SUFFIX = ".json"


def shipped_steps() -> tuple[str, ...]:
    """Return the names of the steps that ship with ucudnn, in alphabetic order."""
    files = (entry.name for entry in resources.files("ucudnn.memory").joinpath("steps").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def open_step(name: str) -> StepGraph:
    """Return a step that ships with ucudnn, or that a file holds.

    Raises:
        StepFileError: if there is no such step or file, or it cannot be read.
        StepFileVersionError: if the step has a version that this ucudnn does not know.
    """
    if name in shipped_steps():
        return decode_step((resources.files("ucudnn.memory").joinpath("steps") / f"{name}{_SUFFIX}").read_bytes(), name)
    return load_step(_file(name))


def _file(name: str) -> Path:
    neither = (
        f"a file nor one that ships with ucudnn: {', '.join(shipped_steps())}; `ucudnn memory record` makes one, and a"
        " model in PyTorch is MODULE:CALLABLE"
    )
    return named_file("step", name, StepFileError, neither)


def open_measured_step(name: str) -> tuple[StepGraph, Costs | None]:
    """Return a step, and what was measured when it was recorded; None where nothing was.

    Raises:
        StepFileError: see `open_step`.
    """
    return (open_step(name), None) if name in shipped_steps() else load_measured_step(_file(name))
