"""Trials of several policies as one table: predictions, measurements, and why a policy could not run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, final

from ucudnn.errors import InvalidValueError
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.torch.comparison.trial import run_apart
from ucudnn.memory.torch.comparison.trial_result import PYTORCH, TrialResult, TrialSettings
from ucudnn.units import format_bytes, format_ms

FAMILIES = {"vdnn": "vdnn-dynamic", "vdnn-ext": "vdnn-ext-dynamic"}
"""Policies that choose what they offload themselves, by the names that papers give them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """Trials of one step: what they ran, except for the policy, and a result for each policy, losers first."""

    settings: TrialSettings
    results: tuple[TrialResult, ...]

    def title(self) -> str:
        """Return what ran, as one line."""
        budget = self.settings.budget
        within = "" if budget is None else f", within {format_bytes(budget)}"
        recipe = self.settings.recipe
        chosen = f", convolutions by the plan ({self.settings.convolutions})" if self.settings.convolutions else ""
        return f"{recipe.model}, mini-batch {recipe.batch}, measured on {self.settings.device}{within}{chosen}"

    def headings(self) -> list[str]:
        """Return the headings of the table."""
        return [
            *("policy", "predicted", "measured", "spread", "predicted peak", "allocated", "reserved"),
            *("to host", "back", "overlap"),
        ]

    def cells(self) -> list[list[str]]:
        """Return the table, a list for each policy that ran, the slowest first."""
        return [_cells(each) for each in self.results if each.figures is not None]

    def lines(self) -> list[str]:
        """Return why policies did not run, a line each."""
        return [f"{each.policy}: {each.reason}" for each in self.results if each.reason]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        return {
            "model": self.settings.recipe.model,
            "batch": self.settings.recipe.batch,
            "device": self.settings.device,
            "budget_bytes": self.settings.budget,
            "policies": [each.to_dict() for each in self.results],
        }


def compare_trials(
    settings: TrialSettings,
    policies: Sequence[str],
    progress: Callable[[int, str], None] = lambda _, __: None,
    run: Callable[[TrialSettings], TrialResult] = run_apart,
) -> TrialTable:
    """Run a trial of each policy, one after another, by a function; names are those that `trial_policy` takes.

    `progress` is called with 0 and what is about to be done, and with 1 when it is done.

    Raises:
        InvalidValueError: if there is no such policy.
    """
    results = []
    names = dict.fromkeys(map(trial_policy, policies))
    for name in names:
        progress(0, f"training with {name}")
        results.append(run(replace(settings, policy=name)))
        progress(1, "")
    slowest_first = sorted(results, key=lambda each: -each.figures.step_ms if each.figures is not None else -inf)
    return TrialTable(settings=settings, results=tuple(slowest_first))


def trial_policy(name: str) -> str:
    """Return the name of a policy; 'vdnn' and 'vdnn-ext' stand for their dynamic ones, 'auto' for the fastest.

    Raises:
        InvalidValueError: if there is no such policy.
    """
    found = FAMILIES.get(name, name)
    if found not in (PYTORCH, "auto"):
        try:
            find_policy(found)
        except InvalidValueError as error:
            raise InvalidValueError(f"{error}, {', '.join(FAMILIES)}, auto, {PYTORCH}") from None
    return found


def _cells(result: TrialResult) -> list[str]:
    figures = result.figures
    assert figures is not None
    return [
        result.policy,
        "–" if figures.predicted_ms is None else format_ms(figures.predicted_ms),
        format_ms(figures.step_ms),
        f"{format_ms(figures.fastest_ms)} to {format_ms(figures.slowest_ms)}",
        _size(figures.predicted_peak),
        format_bytes(figures.allocated),
        _size(figures.reserved),
        format_bytes(figures.offloaded),
        format_bytes(figures.prefetched),
        "–" if figures.overlap is None else f"{figures.overlap:.0%}",
    ]


def _size(size: int | None) -> str:
    return "–" if size is None else format_bytes(size)
