"""The predicted time of decisions."""

from math import fsum


def time_ms(decisions):
    """Return the milliseconds of all kernels, each as often as it occurs."""
    return fsum(each.configuration.time_ms * each.kernel.count for each in decisions.kernels)
