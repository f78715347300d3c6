"""A C++ program that calls as Caffe does, planned by Python in its process, on a stand-in for cuDNN."""

import re
from itertools import pairwise

import pytest

from ucudnn.problem import Operation

FORWARD, DATA, FILTER = Operation


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        ({}, {}),
        ({"groups": 2, "limit": 1200}, {}),
        ({"groups": 2, "limit": 1200}, {"UCUDNN_BACKEND": "cudnn:legacy"}),
        ({"stride": 2, "n": 7}, {"UCUDNN_BATCH_SIZE_POLICY": "all"}),
        ({"double": 1, "alpha": 0.5, "beta": -2, "limit": 6000}, {}),
        ({"double": 1, "alpha": 0.5, "beta": -2, "limit": 6000}, {"UCUDNN_BACKEND": "cudnn:legacy"}),
        ({"shift": 1}, {}),
        ({"shift": 2, "groups": 2, "limit": 1200}, {"UCUDNN_BACKEND": "cudnn:legacy"}),
        ({"groups": 2}, {"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"}),
        ({"shift": 1}, {"UCUDNN_TOTAL_WORKSPACE_SIZE": "4KiB", "UCUDNN_BATCH_SIZE_POLICY": "all"}),
    ],
    ids=lambda value: " ".join(f"{key}={each}" for key, each in value.items()) or "-",
)
def test_micro_batches_give_what_a_reference_gives(run, arguments, env):
    done = run(**arguments, env=env, repeats=2)
    done.check(iterations=2)
    for iteration in (0, 1):
        batches = [done.batches(operation, iteration) for operation in Operation]
        assert {sum(each) for each in batches} == {done.arguments["n"] * done.arguments["groups"]}
        assert max(map(len, batches)) > done.arguments["groups"]
    assert {call["api"] for call in done.calls[1]} == {int("legacy" in env.get("UCUDNN_BACKEND", ""))}
    assert "plain" not in done.errors


@pytest.mark.parametrize(
    ("arguments", "env", "batches", "algorithm"),
    [
        ({}, {"UCUDNN_BATCH_SIZE_POLICY": "undivided"}, [8], 0),  # the other one needs more than the limit
        ({}, {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": ""}, [4, 4], 1),  # the caller's is the workspace of 4 samples
        ({}, {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": "2KiB"}, [2, 2, 2, 2], 1),  # it wins over the caller's
        ({"preference": 1}, {}, [8], 1),  # no limit is stated, and the default holds
        ({"limit": 6000, "room": 1600}, {}, [2, 2, 2, 2], 1),  # memory has no room
    ],
    ids=["undivided", "stated", "of the environment", "default", "no room"],
)
def test_the_limit_that_rules_holds(run, arguments, env, batches, algorithm):
    done = run(**arguments, env=env)
    done.check()
    assert done.batches(FORWARD) == batches
    assert {call["algorithm"] for call in done.calls[0] if call["operation"] == 0} == {algorithm}
    assert done.iterations[0]["sizes"] == [0, 0, 0]  # the workspace that the caller must allocate
    allocated = done.iterations[0]["allocated"]
    assert (allocated > 0) == (algorithm > 0)
    assert allocated <= 3 * (672 * max(batches) * algorithm + 300)
    assert done.other["left"] == 0


@pytest.mark.parametrize("env", [{}, {"UCUDNN_BACKEND": "cudnn:legacy-fma"}], ids=["any", "without TF32"])
def test_another_limit_makes_another_plan(run, env):
    done = run(limit=3000, limit_then=1600, repeats=3, env=env)
    done.check(iterations=3)
    assert [done.batches(FORWARD, iteration)[0] for iteration in range(3)] == [4, 2, 2]
    assert done.iterations[2]["allocated"] <= 3 * 3000


@pytest.mark.parametrize("env", [{}, {"UCUDNN_TOTAL_WORKSPACE_SIZE": "1MiB"}], ids=["WR", "WD"])
def test_no_workspace_is_honoured(run, env):
    done = run(preference=0, env=env | {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": "1MiB"})
    done.check()
    assert {call["algorithm"] for call in done.calls[0]} == {0}
    assert done.iterations[0]["allocated"] == 0


def test_each_kernel_is_planned_once(run):
    done = run(groups=2, limit=1200, repeats=4, env={"UCUDNN_VERBOSE": "1"})
    done.check(iterations=4)
    lines = done.errors.splitlines()
    assert len(lines) == 6  # three operations of two groups, each on its own handle
    assert all("2x4 eng1" in line or "4x2 eng1" in line for line in lines)
    assert done.calls[1] == done.calls[2] == done.calls[3]


def test_each_stream_has_a_workspace(run):
    done = run(groups=2, limit=1200)
    by_stream = {call["stream"]: call["workspace"] for call in done.calls[0]}
    assert len(by_stream) == len(set(by_stream.values())) == 6


@pytest.mark.parametrize("streams", [1, 2], ids=["by the handle", "by cuDNN's own"])
def test_a_handle_on_another_stream_gets_another_workspace(run, streams):
    done = run(repeats=3, streams=streams, env={"UCUDNN_VERBOSE": "1"})
    done.check(iterations=3)
    assert done.iterations[1]["allocated"] == 2 * done.iterations[0]["allocated"] == done.iterations[2]["allocated"]
    assert len(done.errors.splitlines()) == 3  # and no other plan
    assert done.other["left"] == 0


def test_one_workspace_is_divided_among_all_handles(run):
    total = 12 * 1024
    done = run(groups=2, repeats=3, env={"UCUDNN_TOTAL_WORKSPACE_SIZE": str(total)})
    done.check(iterations=3)
    assert done.iterations[2]["allocated"] <= total
    sample = 336  # bytes of workspace of one sample of a group
    segments = {}
    for call in done.calls[2]:
        if call["algorithm"]:
            begin, end = segments.get(call["stream"], (call["workspace"], 0))
            segments[call["stream"]] = begin, max(end, call["workspace"] + call["batch"] * sample)
    ordered = sorted(segments.values())
    assert len(ordered) == 6
    assert all(first[1] <= second[0] for first, second in pairwise(ordered))
    assert done.other["left"] == 0


def test_destroyed_layers_leave_their_part_of_the_total(run):
    done = run(again=2, env={"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"})
    done.check()
    assert len(done.iterations) == 3
    assert [sorted(done.batches(FORWARD, each)) for each in range(3)] == [done.batches(FORWARD)] * 3
    assert done.other["left"] == 0


def test_threads_have_handles_of_their_own(computes):
    assert computes("threads") == ""


def test_divided_segments_are_waited_for_on_another_stream(run):
    done = run(repeats=2, streams=1, env={"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"})
    done.check(iterations=2)
    assert done.other["waits"] >= 3


def test_a_division_that_is_too_small_is_plain(run):
    done = run(n=1, env={"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"}, room=100)
    done.check()
    assert "no room for a total workspace" in done.errors
    assert {call["api"] for call in done.calls[0]} == {1}


def test_plain_cudnn_takes_an_algorithm_without_workspace_if_the_caller_has_none(run):
    done = run(seven=2, room=100, env={"UCUDNN_TOTAL_WORKSPACE_SIZE": "12KiB"})
    done.check()
    assert {(call["api"], call["algorithm"]) for call in done.calls[0] if call["operation"] == 0} == {(1, 0)}


@pytest.mark.parametrize("fail", [0, 1])
def test_an_algorithm_that_fails_is_replaced_from_its_first_missing_sample_on(run, fail):
    done = run(repeats=2, fail_at=1, fail=fail)
    done.check(iterations=2)
    assert "going on with the next best" in done.errors
    forward = [(call["algorithm"], call["batch"]) for call in done.calls[1] if call["operation"] == 0]
    assert forward[:fail] == [(1, 4)] * fail
    assert {algorithm for algorithm, _ in forward[fail:]} == {0}
    assert sum(batch for _, batch in forward) == 8  # nothing is computed twice


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"UCUDNN_PYTHON": "/nowhere/libpython3.so"}, "Python cannot be loaded: /nowhere/libpython3.so"),
        ({"UCUDNN_PYTHON": "/nowhere/python"}, "no shared library .* of /nowhere/python"),
        ({"PYTHONHOME": "/nowhere"}, r"Python cannot be started: \S+: init_fs_encoding: failed"),
        ({"UCUDNN_PYTHON": "/nowhere.software/python"}, "no shared library .* of /nowhere.software/python"),
        ({"UCUDNN_BATCH_SIZE_POLICY": "most"}, "SettingsError: UCUDNN_BATCH_SIZE_POLICY='most' is not known"),
        ({"UCUDNN_PLAIN": "1"}, None),
    ],
    ids=["no library", "no interpreter", "another's home", "like a library", "bad setting", "as asked"],
)
def test_without_python_there_is_plain_cudnn(run, env, text):
    done = run(env=env, repeats=2)
    done.check(iterations=2)
    assert {(call["api"], call["batch"]) for calls in done.calls for call in calls} == {(1, 8)}
    lines = [line for line in done.errors.splitlines() if line.startswith("ucudnn: ")]
    assert len(lines) == (text is not None)
    if text is not None:
        assert re.match(rf"ucudnn: plain cuDNN, not in micro-batches: {text}", lines[0])


@pytest.mark.parametrize(
    ("limit", "env", "algorithm"),
    [(3000, {}, 0), (6000, {}, 1), (3000, "6 KiB", 1), (6000, "3KB", 0), (3000, "1e30", 0), (3000, "inf", 0)],
)
def test_plain_cudnn_keeps_within_the_limit(run, limit, env, algorithm):
    env = {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": env} if env else {}
    done = run(limit=limit, env=env | {"UCUDNN_PLAIN": "1"})
    done.check()
    assert {call["algorithm"] for call in done.calls[0]} == {algorithm}
    assert done.iterations[0]["sizes"] == [algorithm * 8 * 672] * 3


def test_convolutions_that_no_problem_expresses_are_plain(run):
    done = run(flip=1, repeats=2)
    assert {call["api"] for call in done.calls[0]} == {1}
    assert done.errors.count("a convolution that flips its filters") == 3  # once for each operation


def test_algorithms_are_listed_virtually(run):
    done = run(seven=1)
    done.check()
    assert done.other["v7"] == [2, 0, 1, 0]  # two; algorithm 0; the second is deterministic; no workspace


def test_a_request_for_determinism_has_its_own_plan(run):
    done = run(seven=2, preference=1, env={"UCUDNN_VERBOSE": "1"})
    done.check()
    assert done.batches(Operation.FORWARD) == [8]
