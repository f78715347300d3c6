"""The calls of one of PyTorch's operators, by signature, and which of them have something else to do than pass on."""

from collections.abc import Iterator
from typing import Any, final

from ucudnn.bounded import BoundedDict
from ucudnn.torch.tuning.tuned_call import TunedCall

_MOST_CALLS = 1 << 14

Shapes = tuple[Any, Any]
"""Of x and the weight."""


@final
class CallTable:
    """What becomes of the calls of one operator.

    Attributes:
        calls: what becomes of calls, by all that it depends on.
        busy: shapes of x and the weight of calls that do not pass on in this step; None while all calls are looked at.
    """

    def __init__(self) -> None:
        self.calls: BoundedDict[tuple[Any, ...], TunedCall] = BoundedDict(_MOST_CALLS)
        self.busy: set[Shapes] | None = None

    def __iter__(self) -> Iterator[TunedCall]:
        return iter(list(self.calls.values()))  # another thread may add to it meanwhile

    @property
    def replaces(self) -> bool:
        """Whether some calls do not pass on in this step."""
        return any(each.path is not None for each in self)

    def begin_step(self) -> None:
        """Decide what the calls do in the step that begins."""
        for each in self:
            each.begin_step()

    def look_at(self, *others: Shapes) -> None:
        """Look at calls of the shapes that do not pass on, and of some other shapes, and at no other calls."""
        self.busy = {each.shapes for each in self if each.path is not None}.union(others)
