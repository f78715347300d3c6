"""How many examples hypothesis draws, and strategies that are made once.

A strategy that is made for a draw takes several times as long as the draw.
"""

from functools import lru_cache

from hypothesis import settings
from hypothesis import strategies as st

BOOLEANS = st.booleans()
_MOST = 10_000  # that are kept of each kind


def examples(times):
    """Let a test draw so many times the examples of the profile: fewer where each is dear, more for several cases."""
    return settings(max_examples=max(1, round(times * settings.default.max_examples)))


@lru_cache(_MOST)
def whole(least, most):
    """Return what draws a whole number from the first to the second."""
    return st.integers(least, most)


@lru_cache(_MOST, typed=True)
def one_of(*values):
    """Return what draws one of some values."""
    return st.sampled_from(values)


@lru_cache(_MOST, typed=True)
def several_of(*values, least, most):
    """Return what draws a list of different values, from `least` to `most` of them."""
    return st.lists(one_of(*values), min_size=least, max_size=most, unique=True)
