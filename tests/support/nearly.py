"""Compare nested results whose floats differ in the last bits: since Python 3.12, `sum` adds floats more exactly."""

from math import isclose


def nearly_equal(found, expected):
    """Return whether two nested results are equal but for the rounding of their floats."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(nearly_equal(found[key], expected[key]) for key in found)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(nearly_equal, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return isclose(found, expected, rel_tol=1e-12)
    return type(found) is type(expected) and found == expected
