"""TuningPhase: where the tuning of a program is, and the transitions from one phase to the next."""

from enum import Enum


class TuningPhase(Enum):
    """What the tuner does in a step."""

    WARMING = "warming"
    HOST_CHECK = "checking the host"
    OPENING = "opening"
    WATCHING = "watching"
    TRYING = "trying"
    COMPARING = "comparing"
    SETTLED = "settled"


class Transition(Enum):
    """What ends a phase."""

    STEADY = "some steps are delayed, because their time is known"
    UNCHECKED = "the host cannot be checked"
    HOST_BOUND = "the host bounds the program"
    DEVICE_BOUND = "the device bounds it, or delays were not possible"
    OPENED = "candidates can be asked for"
    FAILED = "there will be no candidates"
    WATCHED = "calls were timed"
    TRIED = "some candidates are faster"
    NOTHING_FASTER = "no candidate is faster"
    COMPARED = "whole steps were compared"
    OTHER_STEPS = "steps are others from now on, so what is known of earlier ones does not count"


_NEXT = {
    (TuningPhase.WARMING, Transition.STEADY): TuningPhase.HOST_CHECK,
    (TuningPhase.WARMING, Transition.UNCHECKED): TuningPhase.OPENING,
    (TuningPhase.HOST_CHECK, Transition.HOST_BOUND): TuningPhase.SETTLED,
    (TuningPhase.HOST_CHECK, Transition.DEVICE_BOUND): TuningPhase.OPENING,
    (TuningPhase.OPENING, Transition.OPENED): TuningPhase.WATCHING,
    (TuningPhase.OPENING, Transition.FAILED): TuningPhase.SETTLED,
    (TuningPhase.WATCHING, Transition.WATCHED): TuningPhase.TRYING,
    (TuningPhase.TRYING, Transition.TRIED): TuningPhase.COMPARING,
    (TuningPhase.TRYING, Transition.NOTHING_FASTER): TuningPhase.SETTLED,
    (TuningPhase.COMPARING, Transition.COMPARED): TuningPhase.SETTLED,
}


def next_phase(phase: TuningPhase, transition: Transition) -> TuningPhase:
    """Return the phase to which a transition leads; a KeyError if the phase has no such transition."""
    return TuningPhase.WARMING if transition is Transition.OTHER_STEPS else _NEXT[phase, transition]
