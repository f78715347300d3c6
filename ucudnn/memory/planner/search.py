"""PlanSearch bounds the time of a search for a plan and tells its progress; it compares plans as PlanCandidates."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, final

from ucudnn.errors import InvalidValueError
from ucudnn.units import format_ms, shortened

if TYPE_CHECKING:  # the command line takes the default from here, and most commands plan no step
    from ucudnn.memory.plans.plan import MemoryPlan
    from ucudnn.memory.policies.catalog import MemoryPolicy

PLAN_SECONDS = 20.0
"""How long a search takes at most, unless somebody says otherwise."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Let nothing look for garbage that refers to itself: a search makes many objects and hardly any such garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what is new counts as old, so that no collection follows at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@final
class PlanSearch:
    """Ends a search in time: a policy that plans is not interrupted, but none begins once the time is over.

    Attributes:
        other_ms: time of the best plan beside those of the search, so that it may end without one; None without one.

    Args:
        seconds: how long it may take from now on; None has no bound.
        tell: is called with the best plan so far, as often as that is asked for; None tells nothing.

    Raises:
        InvalidValueError: if `seconds` is no number, or below 0.
    """

    def __init__(self, seconds: float | None = None, tell: Callable[[str], None] | None = None) -> None:
        if seconds is not None and (type(seconds) not in (int, float) or not seconds >= 0):
            raise InvalidValueError(f"plan_seconds={shortened(seconds)} is not 0 or more seconds; None has no bound")
        self.other_ms: float | None = None
        self._went_on = False
        self._seconds, self._begin = inf if seconds is None else seconds, monotonic()
        self._tell = tell or (lambda _: None)

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return monotonic() - self._begin >= self._seconds

    @property
    def gives_up(self) -> bool:
        """Whether it ends without a plan of its own."""
        return self.other_ms is not None and self.over

    def ends(self, *, has_plan: bool) -> bool:
        """Return whether the time is over and there is a plan. Where there is none, tell once."""
        if self.over and not (has_plan or self.other_ms is not None or self._went_on):
            self._went_on = True
            self._tell(f"no plan is known after {self._seconds:g} s, so the search goes on until the first one")
        return self.over and has_plan

    def found(self, policy: str, step_ms: float, bound_ms: float, *, is_placed: bool) -> None:
        """Tell of the best plan so far: its policy, its step's time, how far that is from a lower bound.

        `is_placed` is whether its tensors are known to fit side by side.
        """
        above = ceil(100 * (step_ms / bound_ms - 1) - 1e-6) if 0 < bound_ms < inf else inf
        placed = "" if is_placed else ", its room is not looked at yet"
        self._tell(f"{policy} {format_ms(step_ms)}, at most {above:g} % above the bound{placed}")


class PlanCandidate(NamedTuple):
    """A plan of a policy, or a policy that has not planned, in the order in which candidates are looked at.

    The fastest comes first. Its time is the device's, or the host's where that is longer, because operations that run
    again are issued again. Of plans that the host issues as fast, the one that the device computes first is better.
    Once it is priced, the time has what moving storages or giving pages back takes. Where `bare_ms` is its time without
    that, pages go back, and its time is a guess that is hardly too high.
    """

    time_ms: float
    device_ms: float
    number: int
    tries: int
    peak_bytes: int
    policy: "MemoryPolicy"
    plan: "MemoryPlan | None"
    bare_ms: float | None = None
    is_priced: bool = False
