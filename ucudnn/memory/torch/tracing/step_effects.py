"""StepEffects: refuses what a step does beside its outputs and the tensors that it writes, because no plan would do it.

A trace sees operators. So calls of Python and of C are watched while code of the model runs, those on tensors too, and
settings of PyTorch and generators are compared with what they were.
"""

import datetime
import inspect
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.subject.call_modes import KERNELS, SETTINGS, values_of
from ucudnn.memory.torch.subject.left_as_found import drawn_state
from ucudnn.memory.torch.subject.model_checks import INSTEAD_OF_COMPILED
from ucudnn.memory.torch.subject.traced_values import each_in
from ucudnn.memory.torch.tracing.provenance import Provenance, is_called_by_gc, is_library

_OTHERWISE = ", which no plan does in its steps: "
_DRAWS = "draws a number in Python" + _OTHERWISE + "draw it in the loop and make it an argument, or draw a tensor"
_SEEDS = "sets or reads a generator's state" + _OTHERWISE + "do it in the loop, before the step"
_THREAD = "computes in a thread of its own, whose operators no trace sees: compute it in the thread of the step"
_CLOCK = "reads a clock" + _OTHERWISE + "read it in the loop"
_BACKWARD = (
    "calls backward, which adds to .grad of parameters"
    + _OTHERWISE
    + "use torch.autograd.grad, which returns the gradients"
)
_SCRIPTED = (
    "calls a function of TorchScript, which computes otherwise after its first calls: a plan cannot follow it; call the"
    " Python function that torch.jit.script made it of"
)
_STRUCTURE = "changes parameters, modules or hooks of the model" + _OTHERWISE + "do it before the fit"
_GRADIENTS = "reads or sets .grad of {}" + _OTHERWISE + "do it in the loop, or use torch.autograd.grad"
_REPLACES = "changes what {} is, beside its values" + _OTHERWISE + "do it before the fit"
_VALUES = (
    "reads the value of a tensor, which may change from step to step: a plan cannot hold it; return the tensor as an"
    " output, and read that in the loop"
)
_SMOOTHED = (
    "sums the weights of the targets that are not ignored, and which these are may change from step to step: a plan"
    " cannot hold it; leave out weight or label_smoothing, or compute the loss in the loop"
)


def _code(function: Any) -> int:
    return id(inspect.unwrap(function).__code__)


def _is_leaf(effects: "StepEffects", tensor: Any, frame: FrameType) -> bool:
    return id(tensor) in effects.leaves


def _is_fake(effects: "StepEffects", tensor: Any, frame: FrameType) -> bool:
    return isinstance(tensor, FakeTensor)


def _is_no_parameter(effects: "StepEffects", tensor: Any, frame: FrameType) -> bool:
    """Recurrent layers look at the addresses of their parameters, and libraries at any."""
    return isinstance(tensor, FakeTensor) and not (isinstance(tensor, nn.Parameter) or is_library(frame))


def _is_outside_checkpoint(effects: "StepEffects", owner: Any, frame: FrameType | None) -> bool:
    """PyTorch's checkpoint leaves generators as they are, and `check_calls` looks at it."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return False
        frame = frame.f_back
    return True


def _sums_chosen_weights(effects: "StepEffects", logits: Any, frame: FrameType) -> bool:
    """PyTorch selects these weights, but a trace, which cannot, adds zeros to them: the last bits differ."""
    given = frame.f_locals
    chosen = given["weight"] is not None and given["label_smoothing"] > 0 and given["reduction"] == "mean"
    return chosen and _is_fake(effects, logits, frame) and not given["target"].is_floating_point()


def _is_generator(kind: type) -> "_Applies":
    def applies(effects: "StepEffects", owner: Any, frame: FrameType) -> bool:
        known = isinstance(owner, kind) and not any(owner is each for each in effects.made)
        return known and _is_outside_checkpoint(effects, owner, frame)

    return applies


def _is_clock(effects: "StepEffects", owner: Any, frame: FrameType) -> bool:
    """PyTorch and Python read clocks, too, and so may what runs when garbage is collected, in whatever code."""
    return owner is time and not is_library(frame) and not is_called_by_gc(frame)


def _restructures(effects: "StepEffects", module: Any, frame: FrameType) -> bool:
    """Whether a method changes the structure of the model: what sets an attribute need not."""
    given, code = frame.f_locals, id(frame.f_code)
    name = given.get("name")
    if id(module) not in effects.modules:
        return False
    if code == _SETS:
        return isinstance(given["value"], nn.Module)
    if code in _HOOKS and not effects.settled:
        effects.hooked = True
        return False
    if code == _DELETES:
        return any(name in table for table in (module._modules, module._parameters, module._buffers))
    return code != _ADDS_BUFFER or name not in module._buffers  # one that is there may be set anew


def _is_unknown_generator(effects: "StepEffects", generator: Any, frame: FrameType) -> bool:
    """Note a generator that code makes with a seed: it draws the same numbers in each step."""
    if frame.f_locals["x"] is not None:
        effects.made.append(generator)
    return False


_Applies = Callable[["StepEffects", Any, FrameType], bool]
_Rule = tuple[str, _Applies]
"""What an error says of a call, and whether one is such: its object and its frame tell."""


def _rules(names: Iterable[str], effect: str, applies: _Applies) -> dict[str, _Rule]:
    return dict.fromkeys(names, (effect, applies))


_BUILT_IN: dict[str, _Rule] = {
    **_rules(("manual_seed", "seed", "set_state", "set_offset", "initial_seed"), _SEEDS, _is_generator(Generator)),
    **_rules(("graphsafe_set_state", "clone_state"), _SEEDS, _is_generator(Generator)),
    **_rules(("random", "getrandbits", "setstate"), _DRAWS, _is_generator(random.Random)),
    **_rules(
        ("now", "utcnow", "today"), _CLOCK, lambda _, own, __: isinstance(own, type) and issubclass(own, datetime.date)
    ),
    **_rules((each for each in dir(time) if each.startswith(("time", "perf_", "mono", "process"))), _CLOCK, _is_clock),
    **_rules(("set_", "requires_grad_"), _REPLACES, _is_leaf),
    **_rules(("numpy",), _VALUES, _is_fake),
    **_rules(("data_ptr",), _VALUES, _is_no_parameter),
    **_rules(("urandom",), _DRAWS, lambda _, own, __: own is sys.modules[os.urandom.__module__]),
}
"""Functions of C that may be refused, by their names."""

_SETS, _DELETES = _code(nn.Module.__setattr__), _code(nn.Module.__delattr__)
_ADDS_BUFFER = _code(nn.Module.register_buffer)
_HOOKS = {_code(nn.Module.register_forward_hook), _code(nn.Module.register_forward_pre_hook)}
_SEED_NAMES = "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "set_rng_state", "set_rng_state_all"
_METHODS = *(name for name in dir(nn.Module) if name.startswith("register_")), "add_module", "_apply", "requires_grad_"
_PYTHON: dict[int, _Rule] = {
    _code(function): rule
    for (owners, names), rule in {
        ((torch, torch.cuda, torch.mps, torch.xpu), _SEED_NAMES): (_SEEDS, _is_outside_checkpoint),
        ((torch.autograd,), ("backward",)): (_BACKWARD, _is_outside_checkpoint),
        ((torch.nn.functional,), ("cross_entropy",)): (_SMOOTHED, _sums_chosen_weights),
        ((torch,), ("save",)): (_VALUES, _is_outside_checkpoint),
        ((Tensor,), ("__array__", "__dlpack__", "__repr__", "__format__", "__reduce_ex__")): (_VALUES, _is_fake),
        ((Tensor,), ("register_hook", "register_post_accumulate_grad_hook", "share_memory_")): (_REPLACES, _is_leaf),
        ((nn.Module,), (*_METHODS, "__setattr__", "__delattr__")): (_STRUCTURE, _restructures),
        ((random.Random,), ("__init__",)): ("", _is_unknown_generator),
    }.items()
    for owner in owners
    for name in names
    if (function := getattr(owner, name, None)) is not None
}
"""Functions of Python that may be refused, by their code."""


def _guarded(name: str, effect: str, *, reads: bool = False) -> property:
    """Return a property in the place of a tensor's own, which no profile sees."""
    own = vars(torch._C.TensorBase)[name]

    def check(tensor: Tensor) -> None:
        effects = getattr(sys.getprofile(), "__self__", None)  # where a trace watches
        if isinstance(effects, StepEffects) and id(tensor) in effects.leaves:
            effects.refuse(effect, tensor, sys._getframe(2))

    def get(tensor: Tensor) -> Any:
        check(tensor)
        return own.__get__(tensor)

    def put(tensor: Tensor, value: Any) -> None:
        check(tensor)
        own.__set__(tensor, value)

    def delete(tensor: Tensor) -> None:
        check(tensor)
        own.__delete__(tensor)

    return property(get if reads else own.__get__, put, delete)


GUARDED = {
    "grad": _guarded("grad", _GRADIENTS, reads=True),
    "data": _guarded("data", _REPLACES),
    "requires_grad": _guarded("requires_grad", _REPLACES),
}
"""Properties of tensors without memory while a step is traced."""


def _is_apart(frame: FrameType) -> bool:
    """Whether code is a library's, or the tracer's, which PyTorch calls in other modes."""
    return is_library(frame) or frame.f_globals.get("__name__", "").startswith("ucudnn.memory.torch.")


@final
class StepEffects:
    """Watches code of a model while it is traced.

    Attributes:
        leaves: names of tensors that are there before the step, by their ids.
        modules: ids of the model's modules.
        made: generators of Python that the step makes with a seed.
        settled: whether what a model does in its first step only is done, such as to register hooks of forward.
        hooked: whether the step registered such hooks.
        unplaced: whether an effect was found when the code had ended, so that its place is not known.
        refuses: whether an effect is an error; else `found` tells of it.

    `called` is told of each code of Python that begins to run, and `changed` returns what the step has changed and must
    not. Where the trace seeks, it looks for the place of a change, which takes long.
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
        settled: bool,
    ) -> None:
        self.leaves, self.modules = leaves, modules
        self.settled, self.hooked = settled, False
        self.made: list[random.Random] = []
        self.unplaced, self.refuses = False, True
        self._provenance, self._called, self._changed, self._seeks = provenance, called, changed, seeks
        self._codes, self._refusal, self._thread = dict[int, CodeType](), "", 0
        self._generators = drawn_state()
        self._kernels, self._settings = values_of(KERNELS), values_of(SETTINGS)
        self._places: dict[str, str] = {}
        self._watch = self._profiled

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Watch what runs.

        Raises:
            StepGraphError: if it does what a plan would not do; even where the model catches the error.
        """
        before, self._settings = sys.getprofile(), values_of(SETTINGS)
        self._thread = get_ident()
        self.resume()
        try:
            with self._scripts_watched():
                yield
        except Exception:
            self._raise_again()
            raise
        finally:
            self._thread = 0
            sys.setprofile(before if callable(before) else None)
            getattr(before, "enable", lambda: None)()  # of cProfile
        self._raise_again()
        if self.refuses:
            self._check()

    def found(self) -> bool:
        """Return whether the watched code had an effect, or left a setting or a generator changed."""
        with suppress(StepGraphError):
            self._check()
            return bool(self._refusal)
        return True

    @contextmanager
    def _scripts_watched(self) -> Iterator[None]:
        """Refuse functions of TorchScript where its compiler changes bits: in gradients, and in fused kernels of GPUs.

        The profile of Python does not see their calls.
        """
        kind: Any = torch.jit.ScriptFunction
        plain = vars(kind)["__call__"]

        def call(script: Any, *args: Any, **kwargs: Any) -> Any:
            found = plain.__get__(script, kind)(*args, **kwargs)
            tensors = [each for each in each_in(found, Tensor) if each.is_floating_point()]
            if sys.getprofile() is self._watch and any(each.requires_grad or each.is_cuda for each in tensors):
                self.refuse(_SCRIPTED, None, sys._getframe(1))
            return found

        kind.__call__ = call
        try:
            yield
        finally:
            kind.__call__ = plain

    def pause(self) -> bool:
        """Watch nothing while an operator is traced, which is most of the time; return whether this thread is watched.

        Raises:
            StepGraphError: if the operator would run otherwise in the code of a plan.
        """
        watched = sys.getprofile() is self._watch
        if watched:
            sys.setprofile(None)
        if (now := values_of(KERNELS)) != self._kernels:
            name = next(name for name, *each in zip(KERNELS, now, self._kernels, strict=True) if each[0] != each[1])
            frame = sys._getframe(1)  # of backward on a GPU, whose thread no code of Python started, it has no caller
            frame = frame.f_back or frame
            self.refuse(
                f"computes under another value of {name}{_OTHERWISE}set it around fit and the steps", None, frame
            )
        return watched

    def resume(self) -> None:
        """Watch again."""
        sys.setprofile(self._watch)

    def check_thread(self) -> None:
        """Refuse an operator of a thread that the model started; autograd hands the modes of a trace to its own."""
        if self._thread not in (0, get_ident()) and torch._C._current_autograd_node() is None:
            self.refuse(_THREAD, None, sys._current_frames()[self._thread])

    def refuse(self, effect: str, owner: Any, frame: FrameType) -> None:
        """Raise an error that tells the place, and the name of the tensor whose function was called."""
        self._refusal = f"{self._provenance.here(frame)} {effect.format(self.leaves.get(id(owner)))}"
        if self.refuses:
            raise StepGraphError(self._refusal)

    def _check(self) -> None:
        for name, now, before in zip(SETTINGS, values_of(SETTINGS), self._settings, strict=True):
            if now != before:
                place, self.unplaced = self._places.get(name, "forward"), True
                raise StepGraphError(f"{place} changes {name}{_OTHERWISE}set it around fit and the steps")
        if change := self._drawn() or self._changed():
            self.unplaced = True
            raise StepGraphError(f"forward {change}")

    def _raise_again(self) -> None:
        if self._refusal and self.refuses:
            raise StepGraphError(self._refusal)

    def _drawn(self) -> str | None:
        return _DRAWS if drawn_state() != self._generators else None

    def _profiled(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in self._codes:
                self._codes[id(code)] = code
                self._called(frame)
            if code.co_name == "compile_wrapper":
                self.refuse(f"calls what torch.compile made{INSTEAD_OF_COMPILED}", None, frame)
            if id(code) in _PYTHON:
                owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
                self._apply(_PYTHON[id(code)], owner, frame)
        elif event == "c_call" and called.__name__ in _BUILT_IN:
            self._apply(_BUILT_IN[called.__name__], called.__self__, frame)
        if self._seeks:
            sys.setprofile(None)  # what is compared is no read of the model
            self._seek(frame, event)
            self.resume()

    def _apply(self, rule: _Rule, owner: Any, frame: FrameType) -> None:
        effect, applies = rule
        if applies(self, owner, frame):
            self.refuse(effect, owner, frame)

    def _seek(self, frame: FrameType, event: str) -> None:
        """Look for the place of a change; what a library has changed is seen where it returns to the program."""
        if _is_apart(frame) and (event != "return" or frame.f_back is None or _is_apart(frame.f_back)):
            return
        for name, now, before in zip(SETTINGS, values_of(SETTINGS), self._settings, strict=True):
            if now == before:
                self._places.pop(name, None)
            elif name not in self._places:
                self._places[name] = self._provenance.here(frame)
        if change := self._drawn() or self._changed():
            self.refuse(change, None, frame)


@final
class StepFakes(FakeTensorMode):
    """Tensors without memory of a step, whose operators are those of one thread."""

    effects: StepEffects | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.effects is not None:
            self.effects.check_thread()
        return super().__torch_dispatch__(func, types, args, kwargs or {})
