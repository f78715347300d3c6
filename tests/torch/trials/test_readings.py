"""Readings are told in the order of their marks, once the device has reached them."""

import pytest

from tests.support.configurations import in_parts
from tests.support.host_gpu import PROBLEM
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import Candidate
from ucudnn.torch.trials.readings import Reading, Readings


class Marked:
    """A device that reaches its marks one by one, 1 ms apart."""

    def __init__(self):
        self.made = self.reached = 0

    def mark(self):
        self.made += 1
        return self.made

    def elapsed_ms(self, begin, end):
        return float(end - begin) if end <= self.reached else None


def test_a_distance_is_read_once_the_device_has_computed_it_and_not_with_the_times():
    program, site, read, ran = Marked(), CallSite(PROBLEM), [], []
    candidate = Candidate(in_parts("a"), 0)
    site.offer([candidate])
    readings = Readings(program, ran.append)
    readings.add(Reading(site, None, program.mark(), program.mark()))
    readings.add(Reading(site, candidate, program.mark(), program.mark(), lambda: read.append(program.reached) or 0.0))
    assert (len(readings), site.pending) == (2, 2)
    while program.reached < program.made:
        program.reached += 1
        readings.read()
        assert len(readings) == (2 if program.reached < 2 else 1 if program.reached < program.made else 0)
    assert site.baseline_ms == [1.0]
    assert read == [program.made] == [5], "after both marks around the candidate, the outputs are compared"
    assert ran == [1.0] == [candidate.rough_ms]
    assert site.pending == 0


def test_what_is_forgotten_is_not_told():
    program, site = Marked(), CallSite(PROBLEM)
    readings = Readings(program, pytest.fail)
    readings.add(Reading(site, None, program.mark(), program.mark()))
    readings.forget()
    program.reached = program.made
    readings.read()
    assert not readings
    assert site.baseline_ms == []
