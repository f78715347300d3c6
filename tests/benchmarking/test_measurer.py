"""The measurer of one process, as processes and ranks that measure together use it."""

from tests.support.counting_backend import CountingBackend
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn.benchmarking.findings import Findings
from ucudnn.benchmarking.measurer import Measurer
from ucudnn.benchmarking.request import Request
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.slabs import slabs_by_problem

PROBLEM = make_problem(batch=4, padding=(1, 1))
REQUEST = Request(problem=PROBLEM, sizes=(4,), limit_bytes=1000)


def measurer_of(workspaces):
    backend = CountingBackend(workspaces)
    findings = Findings(backend)
    return Measurer(findings, QUICK), findings, backend


def test_measurements_of_others_are_not_made_again():
    measurer, findings, backend = measurer_of({"SMALL": 0, "LARGE": 100})
    small = Measurement.of(Algorithm(name="SMALL", workspace_bytes=0, api="counting"), [7.0])
    findings.results.put(PROBLEM, small)
    assert not measurer.knows(REQUEST)
    found = measurer.find(REQUEST)
    assert measurer.knows(REQUEST)
    assert found == measurer.find(REQUEST)
    assert measurer.measured == 1
    assert backend.measured == [(PROBLEM, "LARGE")]
    assert (PROBLEM, small) in found.items


def test_a_slab_is_measured_until_an_algorithm_succeeds_within_the_limit():
    measurer, findings, backend = measurer_of({"BROKEN": 0, "LARGE": 2000, "SMALL": 10, "OTHER": 0})
    ((part, slabs), *_) = slabs_by_problem(PROBLEM.part(1), 3)
    found = measurer.measure_slab(PROBLEM, 1, slabs[0], 1000)
    assert (found.slab, found.algorithm, found.workspace_bytes) == (slabs[0], "SMALL", 10)
    assert [name for _, name in backend.measured] == ["BROKEN", "SMALL"]
    assert set(findings.results.of(part)) == {"BROKEN", "SMALL"}
    assert measurer.measure_slab(PROBLEM, 1, slabs[0], 1000, failed=("OTHER",)) is None, "all were measured or failed"
