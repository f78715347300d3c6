"""Decisions with other times, and executions that only say how long they took."""

from dataclasses import replace

from ucudnn.configuration import Configuration
from ucudnn.reporting.kernel_report import report_kernel


def slower(decision, factor):
    """Return a decision whose times were measured on a machine that was slower by a factor."""
    parts = tuple(replace(each, time_ms=each.time_ms * factor) for each in decision.configuration.parts)
    return replace(decision, configuration=Configuration(parts=parts))


class Runner:
    """Executes nothing: a layer takes as many times its prediction as it is told, run by run."""

    def __init__(self, **factors):
        self.factors = factors
        self.ran = []

    def __call__(self, decision):
        layer = decision.kernel.layer
        self.ran.append(layer)
        return report_kernel(decision, executed_ms=decision.configuration.time_ms * self.factors[layer].pop(0))
