"""Decisions with other times."""

from dataclasses import replace

from ucudnn.configuration import Configuration


def slower(decision, factor):
    """Return a decision whose times were measured on a machine that was slower by a factor."""
    parts = tuple(replace(each, time_ms=each.time_ms * factor) for each in decision.configuration.parts)
    return replace(decision, configuration=Configuration(parts=parts))
