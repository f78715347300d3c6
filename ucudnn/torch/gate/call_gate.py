"""The gate: which calls of PyTorch's convolutions it computes without Python, by cuDNN's plans or adopted kernels."""

import ctypes
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from ucudnn.backends.cudnn.api.library import Library
from ucudnn.torch.calls.aten_kernels import OPERATORS
from ucudnn.torch.calls.direct_kernel import DirectKernel
from ucudnn.torch.device.compilation import never_compiled
from ucudnn.torch.device.gpu import Sizes

_LOG = logging.getLogger(__name__)

Compute = Callable[..., bool]
"""Computes one of x, w and y, given the addresses of all three, and of the bias if it adds that."""

_CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
"""Numbers of c10::ScalarType."""

_PRECISIONS = ("none", "ieee", "tf32", "bf16")
"""PyTorch's names of ways to compute convolutions of float32; the gate has the same."""

_FUNCTIONS = ("CreateDescriptor", "SetAttribute", "Finalize", "Execute", "DestroyDescriptor")
"""Of cuDNN's backend API."""

_NUMBERS = count()


@final
class GateOutput(NamedTuple):
    """An output of stated sizes and strides that is computed here, if possible without Python by a direct kernel."""

    compute: Compute
    sizes: Sizes
    strides: Sizes
    direct: DirectKernel | None = None


@final
class GateRule(NamedTuple):
    """What is computed here of calls with one signature.

    Attributes:
        signature: the signature, as `signature_of` returns it.
        outputs: what is computed here: the output of a forward call at 0, the gradients of input and weight of a
            backward call at 0 and 1.
        bias_as: sizes and strides with which the bias of a forward call is added; () if there is none.
        fuses: whether the output's kernel adds the bias.
        bypass: one number. Calls are passed on while it is not 0, also where there are outputs. It may change at any
            time. None computes always.
    """

    signature: Sequence[int]
    outputs: Mapping[int, GateOutput]
    bias_as: tuple[Sizes, Sizes] = ((), ())
    fuses: bool = False
    bypass: "array[int] | None" = None


@final
class PythonOperators:
    """Operators of our own with kernels in Python for forward and backward calls that the gate passes on to them."""

    def __init__(self, device_type: str, kernels: Sequence[Callable[..., Any]]) -> None:
        self._library = torch.library.Library("ucudnn", "FRAGMENT")
        self.names: list[str] = []
        for aten, kernel in zip(OPERATORS, kernels, strict=True):
            name = f"{aten}_{next(_NUMBERS)}"
            schema = str(getattr(torch.ops.aten, aten).default._schema)
            self._library.define(schema.replace(f"aten::{aten}", name, 1))
            self._library.impl(name, never_compiled(kernel), device_type.upper())
            self.names.append(f"ucudnn::{name}")

    def close(self) -> None:
        """Give up the operators; no table may name them any more."""
        self._library._destroy()


@final
class CallGate:
    """PyTorch's operators with a gate in front of them; a process has one gate.

    Raises:
        OSError: if it cannot be loaded, or is another library.
    """

    def __init__(self, path: Path) -> None:
        self.is_open = False
        self._library = ctypes.CDLL(str(path))
        if not hasattr(self._library, "ucudnn_gate_use"):
            raise OSError(f"{path} is another library: it has no ucudnn_gate_use")
        self._callback = _CALLBACK(never_compiled(self._computed))
        self._library.ucudnn_gate_tables.restype = ctypes.c_int64
        self._computes: dict[int, Compute] = {}  # by numbers that are never used again
        self._count = 0
        self._rules: tuple[GateRule, ...] = ()  # the gate has addresses of what they refer to
        self._earlier: list[tuple[GateRule, ...]] = []  # of tables by which other threads may still compute

    def use(
        self,
        device_type: str,
        forward: Sequence[GateRule] = (),
        backward: Sequence[GateRule] = (),
        *,
        python: Sequence[str] = (),
    ) -> None:
        """Use another table of rules; called between the steps of a program.

        The gate is registered in front of the operators for which the table has something to do, unless it stands
        there. A table without rules and without kernels in Python gives the operators back. Calls of other threads that
        are in the gate meanwhile end by the table by which they began.

        Args:
            device_type: 'cuda' or 'cpu'.
            forward: rules of aten::_convolution.
            backward: rules of aten::convolution_backward.
            python: names of the operators of `PythonOperators` that compute forward and backward calls which no rule
                computes, by plans within a stated limit. Then the gate sums gradients of biases, and computes gradients
                of weights first, as they do. () where PyTorch's own kernels compute these calls.

        Raises:
            RuntimeError: if PyTorch refuses it, or does not say how many bytes live where these are limited.
        """
        self._earlier.append(self._rules)
        first, self._rules = self._count, (*forward, *backward)
        table = [number for rules in (forward, backward) for number in self._numbers_of(rules)]
        numbers = (ctypes.c_int64 * len(table))(*table)
        names: list[bytes | None] = [*(name.encode() for name in python)] or [None, None]
        given = (self._callback, *names, numbers, ctypes.c_int64(len(numbers)))
        try:
            self._call("use", device_type.upper().encode(), *given)
        except RuntimeError:
            self.close()  # it may stand in front of one operator already
            raise
        self.is_open = bool(forward or backward)
        if self._library.ucudnn_gate_tables() == 1:
            self._earlier.clear()
            self._computes = {number: each for number, each in self._computes.items() if number >= first}

    def passes_to_own(self) -> bool:
        """Return whether the gate has rules, and calls PyTorch's own kernels as functions where it passes calls on."""
        return self.is_open and bool(self._library.ucudnn_gate_passes_to_own())

    @contextmanager
    def in_python(self) -> Iterator[None]:
        """Return a context in which the gate uses no handle of cuDNN, because Python does."""
        self._call("in_python", 1)
        try:
            yield
        finally:
            self._call("in_python", -1)

    def close(self) -> None:
        """Give the operators back to PyTorch."""
        self.is_open = False
        self._call("close")

    def _numbers_of(self, rules: Sequence[GateRule]) -> Iterator[int]:
        """Yield the rules of one operator as the gate reads them; a list begins with its length."""
        yield len(rules)
        for rule in rules:
            yield from _listed(rule.signature)
            yield 0 if rule.bypass is None else rule.bypass.buffer_info()[0]
            yield from (*_listed(rule.bias_as[0]), *_listed(rule.bias_as[1]), rule.fuses)
            for output in map(rule.outputs.get, range(2)):
                if output is None:
                    yield -1
                    continue
                self._computes[self._count] = output.compute
                yield from (self._count, *_listed(output.sizes), *_listed(output.strides))
                yield from _numbers_of_direct(output.direct)
                self._count += 1

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, f"ucudnn_gate_{name}")
        function.restype = ctypes.c_char_p
        error = function(*arguments)
        if error is not None:
            raise RuntimeError(error.decode(errors="replace"))

    def _computed(self, kernel: int, x: int, w: int, y: int, bias: int | None) -> int:
        try:
            compute = self._computes[kernel]
            return compute(x, w, y) if bias is None else compute(x, w, y, bias)
        except Exception:  # noqa: BLE001 (nothing may pass through C++; PyTorch computes instead)
            _LOG.exception("PyTorch computes a convolution that failed")
            return 0


def _numbers_of_direct(direct: DirectKernel | None) -> list[int]:
    """Return what the gate needs to compute a kernel; an empty list of parts if it cannot."""
    if direct is None:
        return _listed(())
    parts = [number for part in direct.parts for number in (part.plan, *part[1:4])]
    shared = [each.buffer_info()[0] for each in (direct.calls, direct.other_stream)]
    most = -1 if direct.most_bytes is None else direct.most_bytes
    how = (direct.handle, direct.workspace_bytes, *shared, most)
    return [*_listed(parts), *_functions_of(direct.library), *how]


@lru_cache(maxsize=16)
def _functions_of(library: Library) -> list[int]:
    """Return the addresses of a library's functions that the gate calls; a process has one library, or a few."""
    loaded: list[Any] = [library.function(f"cudnnBackend{name}") for name in _FUNCTIONS]
    return [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in loaded]


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, *[ctypes.c_void_p] * 4)


def signature_of(parts: Sequence[Any]) -> list[int]:
    """Return a signature as numbers, from shapes, strides, types and devices of tensors, and the other arguments.

    Raises:
        KeyError: if a type is not one of cuDNN's.
    """
    found: list[int] = []
    for part in parts:
        _add_flat(found, part)
    return found


def _add_flat(found: list[int], part: Any) -> None:
    """Add a part of a signature as numbers; most parts are numbers, or tuples of them, which are short to add."""
    if part.__class__ is int:
        found.append(part)
    elif isinstance(part, tuple):
        found.append(len(part))
        for each in part:
            _add_flat(found, each)
    elif isinstance(part, torch.dtype):
        found.append(_CODES[part])
    elif isinstance(part, str):
        found.append(_PRECISIONS.index(part) if part in _PRECISIONS else -1)  # the gate has no such number
    else:
        found.append(-1 if part is None else int(part))


def _listed(values: Sequence[int]) -> list[int]:
    return [len(values), *values]
