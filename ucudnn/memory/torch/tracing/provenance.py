"""Provenance: which module of a model, and which line of its program, an operator comes from."""

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch

_PYTORCH, _PYTORCH_SHOWN = "torch/", ("torch/nn/", "torch/optim/")
_OURS = "ucudnn/memory/torch/"
_BETWEEN = "step_effects.py", "step_reads.py", "tracer.py"  # these run between lines of a model
_WATCHING = f"{_OURS}subject/", *(f"{_OURS}tracing/{name}" for name in _BETWEEN)
_PYTHON = str(Path(os.__file__).parent)
_next_number: Any = torch._C._autograd._get_sequence_nr


def short_line(calls: Iterable[tuple[str, int]]) -> str:
    """Return the line that a stack of calls comes from, as 'model.py:61'.

    That is the innermost line outside of PyTorch and Python's library, or else the innermost one of PyTorch's modules
    and optimizers. What called the recorder does not count.
    """
    fallback = ""
    for file, line in calls:
        name = _short(file)
        if name.startswith(_OURS) and not name.startswith(_WATCHING):
            break
        if not name.endswith(".py") or name.startswith(_WATCHING):
            continue
        if not name.startswith(_PYTORCH) and (not file.startswith(_PYTHON) or "site-packages" in file):
            return f"{name}:{line}"
        if not fallback and name.startswith(_PYTORCH_SHOWN) and not name.endswith("/module.py"):
            fallback = f"{name}:{line}"
    return fallback


@lru_cache(maxsize=4096)
def _short(file: str) -> str:
    """Return a file's name as seen from the folder that one is in, or from where Python found it."""
    roots = sorted({str(Path.cwd()), *filter(None, sys.path)}, key=len, reverse=True)
    return next((file.removeprefix(f"{root}/") for root in roots if file.startswith(f"{root}/")), file)


def told(place: tuple[str, str]) -> str:
    """Return a module and a line for messages."""
    module, line = place
    return f"{module or 'the step'} at {line}" if line else module or "the step"


def is_library(frame: FrameType) -> bool:
    """Whether code is PyTorch's, or of Python's own library."""
    file = frame.f_code.co_filename
    own = file.startswith((_PYTHON, "<frozen")) and "site-packages" not in file
    return own or _short(file).startswith(_PYTORCH)


def is_called_by_gc(frame: FrameType) -> bool:
    """Whether it is code that Python runs when it collects garbage, in the middle of whatever code."""
    return any(getattr(each, "__code__", None) is frame.f_code for each in gc.callbacks)


def _calls(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


@final
class Provenance:
    """Knows where operators come from while it is entered.

    An operator of backward comes from where the operation of forward comes from whose gradient it computes: autograd
    gives the nodes of both one number.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name or f"({type(model).__name__})" for name, module in model.named_modules()}
        self._owners = {id(value): name.rpartition(".")[0] for name, value in model.named_parameters()}
        self._model = model
        self._stack: list[str] = []
        self._of_node: dict[int, tuple[str, str]] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Follow which module runs."""
        with ExitStack() as hooks:
            for module in self._model.modules():
                hooks.enter_context(module.register_forward_pre_hook(self._enter))
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            yield

    def place(self, node: Any, number: int | None) -> tuple[str, str]:
        """Return the module and the line of the operator that is about to run."""
        # Backward on a GPU runs in a thread that no Python code started, so the dispatched call may have no caller.
        if node is None:
            place = self._stack[-1] if self._stack else "", short_line(_calls(sys._getframe(1).f_back))
            # The node of an operation is made before the operation runs, so it has the last number that was given.
            self._of_node.setdefault(_next_number() - 1, place)
            return place
        variable = getattr(node, "variable", None)  # AccumulateGrad has one
        if variable is not None:
            return self._owners.get(id(variable), ""), ""
        module, line = self._of_node.get(number or 0, ("", ""))
        own = short_line(_calls(sys._getframe(1).f_back))  # a line of a backward that the program defines
        return module, own or line

    def here(self, frame: FrameType) -> str:
        """Return the module and the line that a call comes from, as 'layer1 at model.py:61', for messages."""
        while is_library(frame) and frame.f_back is not None:
            frame = frame.f_back
        return told((self._stack[-1] if self._stack else "", short_line(_calls(frame))))

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), ""))

    def _leave(self, *_: Any) -> None:
        self._stack.pop()
