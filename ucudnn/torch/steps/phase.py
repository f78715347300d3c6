"""TuningPhase: where the tuning of a program is."""

from enum import Enum


class TuningPhase(Enum):
    """What the tuner does in a step."""

    WARMING = "warming"
    PACING = "pacing"
    OPENING = "opening"
    WATCHING = "watching"
    TRYING = "trying"
    COMPARING = "comparing"
    SETTLED = "settled"
