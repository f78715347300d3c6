"""Tests of bench.caffe.conformance: it counts and forces divided kernels, and its stored results meet the rules."""

import json
import sqlite3
from contextlib import closing

import pytest

from bench.caffe.conformance import MODES, POLICIES, WORSE_MS, counted, force, is_met, most_divided
from bench.tools.results import RESULTS, load

OUTPUT = """\
[==========] Running 3 tests from 2 test cases.
[ RUN      ] CuDNNConvolutionLayerTest/0.TestSetupCuDNN
[       OK ] CuDNNConvolutionLayerTest/0.TestSetupCuDNN (1 ms)
[ RUN      ] CuDNNConvolutionLayerTest/1.TestGradientCuDNN
ucudnn: Forward 2x3x6x4 * 2x3x3x3 float32 NCHW: 2x1 eng1, workspace 512 bytes
ucudnn: BackwardData 2x3x6x4 * 2x3x3x3 float32 NCHW: 1x2 eng1, workspace 512 bytes
ucudnn: BackwardFilter 2x3x6x4 * 2x3x3x3 float32 NCHW: 2x1 eng0, workspace 0 bytes
ucudnn: plain cuDNN, not in micro-batches: no reason
[       OK ] CuDNNConvolutionLayerTest/1.TestGradientCuDNN (9 ms)
"""
DIVIDED = "divided with workspace"


def test_kernels_in_micro_batches_are_counted_for_each_test():
    assert counted(OUTPUT) == {
        "0.TestSetupCuDNN": {"planned": 0, "divided": 0, DIVIDED: 0},
        "1.TestGradientCuDNN": {"planned": 3, "divided": 2, DIVIDED: 1},
    }


def test_only_whole_mini_batches_get_worse_and_only_once(tmp_path):
    path = tmp_path / "measurements.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE problems (key, problem)")
        connection.execute("CREATE TABLE measurements (problem, time_ms)")
        connection.executemany("INSERT INTO problems VALUES (?, ?)", [(n, json.dumps({"batch": n})) for n in (1, 2)])
        connection.executemany("INSERT INTO measurements VALUES (?, 0.5)", [(1,), (2,)])
    force(path)
    force(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM measurements").fetchall() == [(1, 0.5), (2, WORSE_MS + 0.5)]


def passed(count=1, **other):
    run = {"passed": 1, "failed": [], "status": 0, "plain": [], DIVIDED: {"0.TestSetupCuDNN": 0, "0.Test": count}}
    return [{**run, "mode": mode, "policy": policy, **other} for mode in MODES for policy in POLICIES]


@pytest.mark.parametrize(
    "runs",
    [
        passed(count=0),
        passed(failed=["CuDNNConvolutionLayerTest/0.Test"]),
        passed(status=1),
        passed(plain=["plain cuDNN, not in micro-batches: no reason"]),
        passed()[1:],
        [*passed(), {**passed()[0], "passed": 0}],
        [],
    ],
    ids=["undivided", "failed", "status", "plain", "missing", "none passed", "nothing"],
)
def test_what_was_not_divided_or_failed_is_not_met(runs):
    assert is_met(passed(), DIVIDED)
    assert not is_met(runs, DIVIDED)


def test_each_policy_divides_each_of_caffes_convolution_tests():
    found = load(RESULTS / "caffe" / "conformance.json")
    assert is_met(found["runs"], DIVIDED)
    assert {run["passed"] for run in found["runs"]} == {12}
    divided = most_divided(found["runs"], DIVIDED)
    assert found["most divided with workspace"] == divided
    assert {way: len(tests) for way, tests in divided.items()} == {f"{m} {p}": 10 for m in MODES for p in POLICIES}
    (plain,) = (run for run in found["runs"] if run["name"] == "plain")
    assert sum(plain["planned"].values()) == 0
