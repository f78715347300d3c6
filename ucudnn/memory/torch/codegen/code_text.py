"""The text of generated code: lines of two functions, names, and the constants that they use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, final

from torch._ops import OpOverload

from ucudnn.memory.torch.subject.traced_values import TracedTensor

_INDENT = "    "


class _Line(NamedTuple):
    """A line of code, the names that it reads, and the names that it deletes; no text where it only deletes."""

    text: str
    uses: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()

    def written(self, known: Callable[[str], bool]) -> str:
        """Return the line; it deletes only names that are known."""
        if self.text:
            return f"{_INDENT}{self.text}\n"
        names = [name for name in self.deletes if known(name)]
        return f"{_INDENT}del {', '.join(names)}\n" if names else ""


@final
class CodeText:
    """Two functions, line by line. Each name is bound once.

    Tensors that exist before the step have names such as p3, inputs such as x0. The namespace has the globals of the
    code, constants and operators among them.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.namespace: dict[str, Any] = dict(given)
        self._lines: list[_Line] = []
        self._turn = 0
        self._counts: dict[int, int] = {}
        self._constants: dict[Any, str] = {}
        self._returned: tuple[str, ...] = ()
        self._groups: Sequence[Sequence[str]] = ()
        self._gradients: tuple[str | None, ...] = ()

    def name(self, storage: int) -> str:
        """Return a new name for a tensor of a storage."""
        count = self._counts[storage] = self._counts.get(storage, 0) + 1
        return f"t{storage}_{count}"

    def line(self, text: str, uses: Iterable[str] = ()) -> None:
        """Add a line."""
        self._lines.append(_Line(text, tuple(uses)))

    def assign(self, text: str, storages: Iterable[int], uses: Iterable[str] = ()) -> str:
        """Add a line that binds a new name, and return the name."""
        name = self.name(next(iter(storages)))
        self.line(f"{name} = {text}", uses)
        return name

    def delete(self, names: Sequence[str]) -> None:
        """Add a line that deletes names."""
        if names:
            self._lines.append(_Line("", deletes=tuple(names)))

    def end_forward(self, outputs: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
        """End the lines of forward, which returns outputs.

        It can hand each name of the groups to backward; those of one group hold the same bytes.
        """
        self._turn, self._returned, self._groups = len(self._lines), tuple(outputs), groups

    def hand_over(self, values: Sequence[str], uses: Iterable[str]) -> None:
        """Add a line that hands values over to the caller, who lets backward go on."""
        self.line(f"yield ({''.join(f'{value}, ' for value in values)})", uses)

    def end_backward(self, gradients: Sequence[str | None]) -> None:
        """End the lines of backward, which returns gradients."""
        self._gradients = tuple(gradients)

    def operator(self, function: Any) -> str:
        """Return the name of an operator, or of a function in its place."""
        name = str(function).replace(".", "_").replace("::", "_")
        # An OpOverload calls its `_op` and does nothing else, which takes the host 0.35 us.
        self.namespace[name] = getattr(function, "_op", function) if type(function) is OpOverload else function
        return name

    def constant(self, value: Any) -> str:
        """Return the name of a value that has no literal."""
        key = (type(value), repr(value)) if isinstance(value, float) else (type(value), id(value))
        if key not in self._constants:
            self._constants[key] = f"c{len(self._constants)}"
            self.namespace[self._constants[key]] = value
        return self._constants[key]

    def expression(self, value: Any, tensor: Callable[[TracedTensor], str]) -> str:
        """Return an argument as Python; tensors by a function that names them."""
        if isinstance(value, TracedTensor):
            return tensor(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.expression(each, tensor) for each in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if value else ''})"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
            return repr(value)
        return self.constant(value)

    def text(self) -> str:
        """Return the code of both functions."""
        first, second = self._lines[: self._turn], self._lines[self._turn :]
        used = {name for line in second for name in line.uses} | {name for name in self._gradients if name}
        deleted = {name for line in second for name in line.deletes}
        handed: list[str] = []
        left: set[str] = set()
        for group in self._groups:
            own = [name for name in group if name in used] or [name for name in group if name in deleted][:1]
            handed += [name for name in own if not name.startswith("p")]
            left.update({*group} - {*own})
        inner = ", ".join(handed)
        lines = ["def forward(transfers, persistent, inputs):\n"]
        first_used = {name for line in first for name in line.uses} | {*self._returned, *handed}
        lines += self._unpacked("p", "persistent", first_used) + self._unpacked("x", "inputs", first_used)
        lines += [line.written(lambda _: True) for line in first]
        lines.append(f"{_INDENT}return ({''.join(f'{name}, ' for name in self._returned)}), [{inner}]\n")
        lines.append("\n\ndef backward(transfers, persistent, state, grad_outputs):\n")
        lines += self._unpacked("p", "persistent", used)
        if handed:
            lines.append(f"{_INDENT}{inner}{',' if len(handed) == 1 else ''} = state\n")
        lines.append(f"{_INDENT}state.clear()\n")
        lines += [line.written(lambda name: name not in left) for line in second]
        lines.append(f"{_INDENT}return ({''.join(f'{name}, ' for name in self._gradients)})\n")
        return "".join(lines)

    def _unpacked(self, letter: str, source: str, used: Iterable[str]) -> list[str]:
        numbers = sorted(int(name[1:]) for name in used if name[0] == letter and name[1:].isdigit())
        return [f"{_INDENT}{letter}{number} = {source}[{number}]\n" for number in numbers]
