"""FusedRegion: an operator of its own, which computes what a run of operators computes."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.memory.torch.compiling.region_graph import RegionForm, region_graph
from ucudnn.memory.torch.subject.traced_values import TracedCall

_parsed: Any = torch._C.parse_schema


@final
class FusedRegion:
    """An operator for all regions of one kind; it stands in a `TracedCall` where those of PyTorch do.

    Attributes:
        calls: what it computes, with storages numbered as in `form`.
        form: what it is given and returns.
        function: computes it: the calls one after another, or their compiled code.
        scratch_bytes: bytes of temporaries inside, as found on a CPU.
        is_compiled: whether it runs compiled code.
        reason: why it does not, where that was tried; else ''.
        is_apart: whether its calls must be operations of their own, because they do not return what was traced.
    """

    namespace = "ucudnn"
    tags: tuple[Any, ...] = ()

    def __init__(self, key: str, calls: Sequence[TracedCall], form: RegionForm) -> None:
        self.calls, self.form = tuple(calls), form
        self._opname = f"region_{sha256(key.encode()).hexdigest()[:16]}"
        self._schema = _parsed(_declaration(self._opname, form))
        self._eager: Callable[..., Any] = region_graph(calls, form).forward
        self.function = self._eager
        self.scratch_bytes = 0
        self.is_compiled, self.is_apart, self.reason = False, False, ""

    @property
    def is_tried(self) -> bool:
        """Whether somebody has tried to compile it."""
        return self.is_compiled or bool(self.reason)

    def use(self, function: Callable[..., Sequence[Tensor]]) -> None:
        """Run compiled code from now on."""
        self.function, self.is_compiled, self.reason = function, True, ""

    def leave(self, reason: str) -> None:
        """Run the calls one after another from now on, because they cannot be compiled."""
        self.function, self.is_compiled, self.reason = self._eager, False, reason

    def __call__(self, *args: Tensor) -> Any:
        """Return what the region computes."""
        return self.function(*args)

    def __str__(self) -> str:
        return f"{self.namespace}.{self._opname}{'.compiled' if self.is_compiled else ''}"

    __repr__ = __str__


def _declaration(name: str, form: RegionForm) -> str:
    given = (
        f"Tensor{f'(m{number}!)' if each.storage in form.written else ''} a{number}"
        for number, each in enumerate(form.arguments)
    )
    returned = ", ".join(["Tensor"] * len(form.results))
    return f"ucudnn::{name}({', '.join(given)}) -> ({returned})"
