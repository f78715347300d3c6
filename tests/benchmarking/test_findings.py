"""Answers from what was measured: nothing in these tests measures."""

from contextlib import closing
from dataclasses import replace

import pytest

from tests.support.counting_backend import CountingBackend
from tests.support.problems import make_problem
from ucudnn.benchmarking.findings import Finding, Findings
from ucudnn.benchmarking.request import Exploration, Request, SlabDivision
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import MachineStore
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.slabs import slabs_by_problem, slabs_of

PROBLEM = make_problem(batch=4, padding=(1, 1))
REQUEST = Request(problem=PROBLEM, sizes=(1, 4), limit_bytes=100)
EXPLORATION = Exploration(names=("SMALL", "LARGE"), sizes=(1, 4))


def measured(name, workspace_bytes, time_ms, **options):
    algorithm = Algorithm(name=name, workspace_bytes=workspace_bytes, api="counting")
    return Measurement(algorithm=algorithm, time_ms=time_ms, **options)


def finding(*measurements, exploration=EXPLORATION, size=4):
    return Finding(REQUEST, exploration, [(PROBLEM.part(size), each) for each in measurements])


@pytest.fixture
def findings():
    return Findings(CountingBackend({}))


@pytest.fixture
def storage(tmp_path):
    with closing(Database(tmp_path / "measurements.db")) as database:
        yield MachineStore(database, {"device": "none"}, "counting")


def micros(found):
    return [(each.size, each.algorithm, each.time_ms) for each in found]


def test_a_request_gets_its_algorithms_within_its_limit(findings):
    other = measured("OTHER", 0, 1.0)
    findings.add(finding(measured("SMALL", 10, 3.0), measured("LARGE", 101, 1.0), other))
    assert micros(findings.micro_configurations(REQUEST, EXPLORATION)) == [(4, "SMALL", 3.0)]
    assert micros(findings.known_micro_configurations(REQUEST)) == [(4, "SMALL", 3.0), (4, "OTHER", 1.0)]
    names = [each.algorithm.name for _, each in findings.of(REQUEST, EXPLORATION).items]
    assert names == ["SMALL", "LARGE"], "the limit leaves out nothing here"


def test_incomplete_measurements_count_only_if_nothing_else_makes_a_configuration(findings):
    findings.add(finding(measured("SMALL", 10, 3.0, complete=False)))
    assert micros(findings.known_micro_configurations(REQUEST)) == [(4, "SMALL", 3.0)]
    findings.add(finding(measured("LARGE", 20, 9.0)))
    assert micros(findings.known_micro_configurations(REQUEST)) == [(4, "LARGE", 9.0)]


def test_a_discarded_algorithm_is_left_out_at_every_size_and_its_requests_are_open_again(findings):
    findings.add(finding(measured("SMALL", 10, 3.0), measured("LARGE", 20, 1.0)))
    assert findings.explored[REQUEST] == EXPLORATION
    findings.discard(PROBLEM.with_batch(64), "LARGE")
    assert REQUEST not in findings.explored
    assert micros(findings.micro_configurations(REQUEST, EXPLORATION)) == [(4, "SMALL", 3.0)]
    assert set(findings.discarded(PROBLEM)) == {"LARGE"}
    assert not findings.discarded(make_problem(channels=8))


def test_a_slab_gets_the_fastest_algorithm_that_did_not_fail(findings):
    ((part, slabs), *_) = slabs_by_problem(PROBLEM.part(1), 3)
    known = [measured("SMALL", 10, 3.0), measured("FAST", 20, 1.0), measured("LARGE", 200, 0.5)]
    findings.results.update((part, each) for each in known)
    chosen = [
        findings.slab_configuration(PROBLEM, 1, slabs[0], limit, failed)
        for limit, failed in ((100, ()), (100, ("FAST",)), (9, ()))
    ]
    assert [each and (each.slab, each.algorithm) for each in chosen] == [(slabs[0], "FAST"), (slabs[0], "SMALL"), None]


def test_slabs_make_micro_configurations_of_the_divisions_that_were_measured(findings):
    division = SlabDivision(1, 3)
    items = [(part, measured("SMALL", 10, 1.0)) for part, _ in slabs_by_problem(PROBLEM.part(1), 3)]
    exploration = Exploration(names=("SMALL",), sizes=(), divisions=(division,))
    findings.add(Finding(REQUEST, exploration, items))
    for found in (findings.micro_configurations(REQUEST, exploration), findings.known_micro_configurations(REQUEST)):
        (each,) = found
        assert each.size == 1
        assert [slab.slab for slab in each.slabs] == list(slabs_of(PROBLEM, 3))


@pytest.mark.parametrize("reuses", [True, False])
def test_a_request_that_is_finished_in_the_storage_is_finished_here_unless_all_is_to_be_measured(storage, reuses):
    Findings(CountingBackend({}), storage).add(finding(measured("SMALL", 10, 3.0)))
    findings = Findings(CountingBackend({}), storage, reuses=reuses)
    assert findings.load(REQUEST) == (EXPLORATION if reuses else None)
    assert (REQUEST in findings.explored) == reuses
    assert micros(findings.known_micro_configurations(REQUEST)) == ([(4, "SMALL", 3.0)] if reuses else [])
    findings.discard(PROBLEM, "SMALL")
    assert findings.load(REQUEST) is None, "a problem with a discarded algorithm is not taken from the storage"


@pytest.mark.parametrize("left", [(), (3, 10), (4, 101)], ids=["nothing", "no divisor", "none within the limit"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_request_whose_measurements_are_gone_is_not_finished(storage, left, apart):
    request = replace(REQUEST, sizes=(3, 4), apart=apart)
    exploration = Exploration(names=("SMALL",), sizes=(3, 4))
    if left:
        size, workspace_bytes = left
        storage.save([(PROBLEM.part(size), measured("SMALL", workspace_bytes, 3.0))])
    storage.save_exploration(request, exploration)
    findings = Findings(CountingBackend({}), storage)
    assert findings.load(request) is None
    assert request not in findings.explored
    storage.save([(PROBLEM.part(size), measured("SMALL", 10, 3.0)) for size in (3, 4)])
    assert findings.load(request) == exploration
