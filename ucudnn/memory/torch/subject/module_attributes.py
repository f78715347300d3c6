"""ModuleAttributes: what a traced step read of its modules besides tensors, compared before the step runs again.

A plan's code holds these values: the probability of a dropout, a switch, the entries of a list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from types import MappingProxyType
from typing import Any, final

from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.subject.attribute_content import ABSENT, AttributeContent, size_of


@final
@dataclass(frozen=True, slots=True, eq=False)
class AttributeRead:
    """An attribute that was read.

    Attributes:
        owner: what `read_now` takes.
        key: the name of the attribute there.
        label: its name in messages, with the path of the module.
    """

    owner: Any
    key: str
    label: str
    content: AttributeContent

    def value(self) -> Any:
        """Return its value now."""
        return read_now(self.owner, self.key)


def read_now(owner: Any, key: str) -> Any:
    """Return the entry of a dictionary, what a class itself defines, or an attribute of any other object, or ABSENT."""
    if type(owner) is dict:
        return owner.get(key, ABSENT)
    if isinstance(owner, type):
        return vars(owner).get(key, ABSENT)
    try:
        return getattr(owner, key, ABSENT)
    except ValueError:
        return ABSENT  # a variable of a function that is not set


@final
class ModuleAttributes:
    """Knows whether attributes are what they were.

    No line of Python runs for each attribute before a step, as long as all values are the same objects.
    """

    def __init__(self, reads: Sequence[AttributeRead]) -> None:
        tables = [each for each in reads if type(each.owner) is dict]
        classes = [each for each in reads if isinstance(each.owner, type)]
        others = [each for each in reads if type(each.owner) is not dict and not isinstance(each.owner, type)]
        self._reads = (*tables, *classes, *others)
        self._groups: list[tuple[Any, list[Any], list[str]]] = [
            (dict.get, [each.owner for each in tables], [each.key for each in tables]),
            (MappingProxyType.get, [vars(each.owner) for each in classes], [each.key for each in classes]),
            (getattr, [each.owner for each in others], [each.key for each in others]),
        ]
        self._look([each.content for each in self._reads])

    def check(self) -> None:
        """Check that nothing has changed.

        Raises:
            InvalidValueError: if an attribute has changed; the message names it, with both values.
        """
        values, entries = self._values_now(), [*chain.from_iterable(self._views)]
        same = len(entries) == len(self._entries) and all(map(is_, entries, self._entries))
        if not same or not all(map(is_, values, self._values)) or [*map(size_of, self._long)] != self._lengths:
            self._compare(values)

    def _values_now(self) -> list[Any]:
        try:
            return [*chain.from_iterable(map(get, owners, keys, repeat(ABSENT)) for get, owners, keys in self._groups)]
        except ValueError:
            return [each.value() for each in self._reads]

    def _compare(self, values: Sequence[Any]) -> None:
        contents = []
        for read, value, before, content in zip(self._reads, values, self._values, self._contents, strict=True):
            if value is before and not content.views and not content.long:
                contents.append(content)
                continue
            now = AttributeContent(value)
            if now != read.content:
                raise InvalidValueError(read.content.change(read.label, now))
            contents.append(now)
        self._look(contents)  # equal values in other objects

    def _look(self, contents: list[AttributeContent]) -> None:
        self._contents = contents
        self._values = self._values_now()
        self._views = [view for content in contents for view in content.views]
        self._entries = [*chain.from_iterable(self._views)]
        self._long = [each for content in contents for each in content.long]
        self._lengths = [*map(size_of, self._long)]
