"""StepEffects: refuses what a step does beside its outputs and the tensors that it writes, because no plan would do it.

A trace sees operators. So calls of Python and of C are watched while code of the model runs, those on tensors too, and
settings of PyTorch and generators are compared with what they were.
"""

import datetime
import gc
import inspect
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.tracing.provenance import Provenance, is_library

_OTHERWISE = ", which no plan does in its steps: "
_DRAWS = "draws a number in Python" + _OTHERWISE + "draw it in the loop and make it an argument, or draw a tensor"
_SEEDS = "sets or reads a generator's state" + _OTHERWISE + "do it in the loop, before the step"
_CLOCK = "reads a clock" + _OTHERWISE + "read it in the loop"
_BACKWARD = (
    "calls backward, which adds to .grad of parameters"
    + _OTHERWISE
    + "use torch.autograd.grad, which returns the gradients"
)
_STRUCTURE = "changes parameters, modules or hooks of the model" + _OTHERWISE + "do it before the fit"
_GRADIENTS = "reads or sets .grad of {}" + _OTHERWISE + "do it in the loop, or use torch.autograd.grad"
_REPLACES = "changes what {} is, beside its values" + _OTHERWISE + "do it before the fit"
_VALUES = (
    "reads the value of a tensor, which may change from step to step: a plan cannot hold it; return the tensor as an"
    " output, and read that in the loop"
)

_BUILT_IN: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("manual_seed", "seed", "set_state", "set_offset", "initial_seed"), (Generator, _SEEDS)),
    **dict.fromkeys(("graphsafe_set_state", "clone_state"), (Generator, _SEEDS)),
    **dict.fromkeys(("random", "getrandbits", "setstate"), (random.Random, _DRAWS)),
    **dict.fromkeys(("now", "utcnow", "today"), (datetime.date, _CLOCK)),
    **dict.fromkeys(
        (name for name in dir(time) if name.startswith(("time", "perf_", "mono", "process"))), (time, _CLOCK)
    ),
    "set_": (Tensor, _REPLACES),
    "urandom": (sys.modules[os.urandom.__module__], _DRAWS),
}
"""Functions of C that are refused by their names, if they belong to such an object or module."""


def _code(function: Any) -> int:
    return id(inspect.unwrap(function).__code__)


def _python() -> dict[int, str]:
    names = "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "set_rng_state", "set_rng_state_all"
    found = {
        _code(getattr(each, name)): _SEEDS
        for each in (torch, torch.cuda, torch.mps, torch.xpu)
        for name in names
        if hasattr(each, name)
    }
    return {**found, _code(torch.autograd.backward): _BACKWARD, _code(torch.save): _VALUES}


_PYTHON = _python()
"""Functions of Python that are refused, by their code."""

_SETS, _DELETES = _code(nn.Module.__setattr__), _code(nn.Module.__delattr__)
_MAKES_RANDOM = _code(random.Random.__init__)
_ADDS_BUFFER = _code(nn.Module.register_buffer)
_METHODS = {
    *(_code(getattr(nn.Module, name)) for name in dir(nn.Module) if name.startswith("register_")),
    *map(_code, (nn.Module.add_module, nn.Module._apply, nn.Module.requires_grad_)),
    *(_SETS, _DELETES),
}
"""Methods that are refused on modules of the model."""

_GRAD, _DATA, _NEEDS = (vars(torch._C.TensorBase)[name] for name in ("grad", "data", "requires_grad"))
_OF_LEAVES: dict[Any, str] = {
    **dict.fromkeys((_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__), _GRADIENTS),
    **dict.fromkeys((_DATA.__set__, _NEEDS.__set__, Tensor.requires_grad_), _REPLACES),
    **dict.fromkeys((Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.share_memory_), _REPLACES),
}
_OF_ALL: dict[Any, str] = {
    Tensor.backward: _BACKWARD,
    **dict.fromkeys((Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__), _VALUES),
    **dict.fromkeys((Tensor.__repr__, Tensor.__format__, Tensor.data_ptr, Tensor.__reduce_ex__), _VALUES),
}


_KERNELS: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch._C._get_deterministic_algorithms,
    "mkldnn.enabled": torch._C._get_mkldnn_enabled,
    "cudnn.enabled": torch._C._get_cudnn_enabled,
    "cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "the number of threads": torch.get_num_threads,
}
"""Settings that choose kernels when an operator runs: the code of a plan would run it under others."""

_SETTINGS: dict[str, Callable[[], Any]] = {
    **_KERNELS,
    "the grad mode": torch.is_grad_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "autocast of CUDA": lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
    "autocast's cache": torch.is_autocast_cache_enabled,
    "the default device": lambda: _device.CURRENT_DEVICE,
    "anomaly detection": torch.is_anomaly_enabled,
}
"""These and others that a step may change, and must leave as they were; a `Snapshot` puts them back."""


def _values_of(settings: Mapping[str, Callable[[], Any]]) -> list[Any]:
    return [read() for read in settings.values()]


def _drawn_state() -> tuple[Any, bytes]:
    """Return the state of Python's and of NumPy's global generator; no profile sees functions of the latter."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), b"" if numpy is None else pickle.dumps(numpy.get_state())


@final
class StepEffects:
    """Watches code of a model while it is traced.

    Attributes:
        unplaced: whether an effect was found when the code had ended, so that its place is not known.

    Args:
        provenance: tells where something happens.
        leaves: names of tensors that are there before the step, by their ids.
        modules: ids of the model's modules.
        called: is told of each code of Python that begins to run.
        changed: returns what the step has changed and must not, None for nothing.
        seeks: whether the place of a change is looked for, which takes long.
    """

    def __init__(
        self,
        provenance: Provenance,
        leaves: Mapping[int, str],
        modules: Set[int],
        called: Callable[[FrameType], None],
        changed: Callable[[], str | None],
        *,
        seeks: bool,
    ) -> None:
        self._provenance, self._leaves, self._modules = provenance, leaves, modules
        self._called, self._changed, self._seeks = called, changed, seeks
        self._codes, self._refusal = set[int](), ""
        self._generators = _drawn_state()
        self._kernels, self._settings = _values_of(_KERNELS), _values_of(_SETTINGS)
        self._places: dict[str, str] = {}
        self._made: list[random.Random] = []
        self.unplaced = False
        self._watch = self._profiled

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Watch what runs.

        Raises:
            StepGraphError: if it does what a plan would not do; even where the model catches the error.
        """
        before, self._settings = sys.getprofile(), _values_of(_SETTINGS)
        sys.setprofile(self._watch)
        try:
            with _Functions(self):
                yield
        except Exception:
            self._raise_again()
            raise
        finally:
            sys.setprofile(before if callable(before) else None)
            getattr(before, "enable", lambda: None)()  # of cProfile
        self._raise_again()
        self._check()

    @contextmanager
    def paused(self, frame: FrameType) -> Iterator[None]:
        """Watch nothing while an operator is traced, which is most of the time.

        Raises:
            StepGraphError: if the operator would run otherwise in the code of a plan.
        """
        watched = sys.getprofile() is self._watch
        if watched:
            sys.setprofile(None)
        if (now := _values_of(_KERNELS)) != self._kernels:
            name = next(name for name, *each in zip(_KERNELS, now, self._kernels, strict=True) if each[0] != each[1])
            self._refuse(f"computes under another value of {name}{_OTHERWISE}set it around fit and the steps", frame)
        alone = watched and torch._C._len_torch_function_stack() == 1  # a device of the program stays
        with torch._C.DisableTorchFunction() if alone else nullcontext():
            try:
                yield
            finally:
                if watched:
                    sys.setprofile(self._watch)

    def met(self, function: Any, tensor: Any, frame: FrameType) -> None:
        """Check a function of PyTorch that is called on a tensor."""
        name, effect = self._leaves.get(id(tensor)), _OF_ALL.get(function)
        if effect is not None and isinstance(tensor, FakeTensor):
            pointer = function is Tensor.data_ptr  # recurrent layers look at those of their parameters
            if not (pointer and (is_library(frame) or isinstance(tensor, nn.Parameter))):
                self._refuse(effect, frame)
        elif name is not None and function in _OF_LEAVES:
            self._refuse(_OF_LEAVES[function].format(name), frame)

    def _check(self) -> None:
        """Raise an error if settings or generators are not as they were."""
        for name, now, before in zip(_SETTINGS, _values_of(_SETTINGS), self._settings, strict=True):
            if now != before:
                place, self.unplaced = self._places.get(name, "forward"), True
                raise StepGraphError(f"{place} changes {name}{_OTHERWISE}set it around fit and the steps")
        if change := self._drawn() or self._changed():
            self.unplaced = True
            raise StepGraphError(f"forward {change}")

    def _refuse(self, what: str, frame: FrameType) -> None:
        """Raise an error that tells the place."""
        self._refusal = f"{self._provenance.here(frame)} {what}"
        raise StepGraphError(self._refusal)

    def _raise_again(self) -> None:
        if self._refusal:
            raise StepGraphError(self._refusal)

    def _drawn(self) -> str | None:
        """Return what to say if Python's or NumPy's generator is not as it was."""
        return _DRAWS if _drawn_state() != self._generators else None

    def _profiled(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            owner, effect = _BUILT_IN.get(called.__name__, (None, ""))
            if effect and self._belongs(called.__self__, owner, frame):
                self._refuse(effect.format(self._leaves.get(id(called.__self__))), frame)
        elif event == "call":
            code = id(frame.f_code)
            if code not in self._codes:
                self._codes.add(code)
                self._called(frame)
            if code in _PYTHON and not _in_checkpoint(frame):
                self._refuse(_PYTHON[code], frame)
            if code == _MAKES_RANDOM and frame.f_locals["x"] is not None:  # it draws the same numbers in each step
                self._made.append(frame.f_locals["self"])
            if code in _METHODS and self._restructures(frame):
                self._refuse(_STRUCTURE, frame)
        if self._seeks:
            with torch._C.DisableTorchFunction():
                self._seek(frame, event)

    def _restructures(self, frame: FrameType) -> bool:
        """Return whether a method changes the structure of the model: what sets an attribute need not."""
        given, code = frame.f_locals, id(frame.f_code)
        module, name = given["self"], given.get("name")
        if id(module) not in self._modules:
            return False
        if code == _SETS:
            return isinstance(given["value"], nn.Module)
        if code == _DELETES:
            return any(name in table for table in (module._modules, module._parameters, module._buffers))
        return code != _ADDS_BUFFER or name not in module._buffers  # one that is there may be set anew

    def _seek(self, frame: FrameType, event: str) -> None:
        """Look for the place of a change; what a library has changed is seen where it returns to the program."""
        if is_library(frame) and (event != "return" or frame.f_back is None or is_library(frame.f_back)):
            return
        for name, now, before in zip(_SETTINGS, _values_of(_SETTINGS), self._settings, strict=True):
            if now == before:
                self._places.pop(name, None)
            elif name not in self._places:
                self._places[name] = self._provenance.here(frame)
        if change := self._drawn() or self._changed():
            self._refuse(change, frame)

    def _belongs(self, own: Any, owner: Any, frame: FrameType) -> bool:
        """Return whether a function of C is one that is refused here: PyTorch and Python read clocks, too."""
        if owner is datetime.date:
            return isinstance(own, type) and issubclass(own, owner)
        if owner is Tensor:
            return id(own) in self._leaves
        if isinstance(owner, type):
            return isinstance(own, owner) and not any(own is each for each in self._made) and not _in_checkpoint(frame)
        collects = any(getattr(each, "__code__", None) is frame.f_code for each in gc.callbacks)
        return own is owner and not (own is time and (is_library(frame) or collects))


def _in_checkpoint(frame: FrameType | None) -> bool:
    """Whether it is PyTorch's checkpoint that runs: it leaves generators as they are, and `check_calls` looks at it."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


class _Functions(TorchFunctionMode):
    """Shows which functions of PyTorch are called on tensors."""

    def __init__(self, effects: StepEffects) -> None:
        super().__init__()
        self._effects = effects

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, if it is not refused."""
        if func in _OF_ALL or func in _OF_LEAVES:
            self._effects.met(func, args[0] if args else None, sys._getframe(1))
        return func(*args, **(kwargs or {}))
