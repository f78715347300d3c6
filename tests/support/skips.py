"""One line that says what the tests skipped, and why."""

from collections import Counter

_MOST_REASONS = 6


def skip_line(reasons):
    """Return the line for a list of reasons, one for each test or module that was skipped; '' if none was."""
    if not reasons:
        return ""
    counted = Counter(reason.removeprefix("Skipped: ").split("\n", 1)[0] for reason in reasons).most_common()
    named = [f"{count} because: {reason}" for reason, count in counted[:_MOST_REASONS]]
    others = sum(count for _, count in counted[_MOST_REASONS:])
    more = [f"{others} for other reasons"] if others else []
    return f"skipped {len(reasons)}: {'; '.join([*named, *more])} (`-rs` names each)"
