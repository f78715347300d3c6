"""The paper's own algorithms, written from its text and sharing nothing with the package."""

from functools import cache


def desirable(configurations):
    """D of section 3.3.1: what no other configuration beats or equals in both time and workspace."""
    distinct = set(configurations)
    return {
        (time, workspace)
        for time, workspace in distinct
        if all(time < t or workspace < w for t, w in distinct if (t, w) != (time, workspace))
    }


def recurrence(micro, size):
    """C(b) of section 3.3.1 over (size, time, workspace), as a set of (time, workspace)."""

    @cache
    def solve(batch):
        if batch == 0:
            return frozenset({(0, 0)})
        return frozenset(
            desirable(
                (time + rest_time, max(workspace, rest_workspace))
                for part, time, workspace in micro
                if part <= batch
                for rest_time, rest_workspace in solve(batch - part)
            )
        )

    return solve(size)


def reuse(micro, size, limit):
    """T(B) of section 3.2, bottom up: the fastest division within a limit, or None."""
    fastest = {}
    for part, time, workspace in micro:
        if workspace <= limit:
            fastest[part] = min(time, fastest.get(part, time))
    best = {0: 0}
    for batch in range(1, size + 1):
        times = [time + best[batch - part] for part, time in fastest.items() if batch - part in best]
        if times:
            best[batch] = min(times)
    return best.get(size)
