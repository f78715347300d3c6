"""CUDA graphs of C++ programs: captured calls keep what they use, and nothing that CUDA refuses is done in captures."""

import pytest

WD = {"UCUDNN_TOTAL_WORKSPACE_SIZE": "8KiB"}
WR_AND_WD = pytest.mark.parametrize("env", [{}, WD], ids=["WR", "WD"])
UNPLANNED = "is captured in a CUDA graph before it was planned; call it once before the capture"
KEPT = "is replaced, but kept as well, because a CUDA graph was captured with it"


@pytest.fixture(scope="module")
def captured(computes):
    """Return a function that runs the program, and returns what it says on stderr."""
    return lambda what, env: computes("captures", what, **env)


@WR_AND_WD
@pytest.mark.parametrize("what", ["many scalings", "another limit", "another stream", "another stream in the capture"])
def test_a_graph_and_other_calls_do_no_harm_to_each_other(captured, what, env):
    assert "plain" not in captured(what, env)


def test_a_workspace_grows_while_another_stream_is_captured(captured):
    assert "plain" not in captured("another's capture", {})


@pytest.mark.parametrize(("what", "env"), [("a larger workspace", {}), ("another division", WD)], ids=["WR", "WD"])
def test_a_workspace_that_a_graph_uses_is_kept_and_told_of(captured, what, env):
    assert captured(what, env).count(KEPT) == 1


@WR_AND_WD
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a failure", "going on with the next best"),  # and the failed plan that a graph uses is kept
        ("unplanned", UNPLANNED),
        ("a failure in the capture", "CUDNN_STATUS_EXECUTION_FAILED from eng1 in a capture"),  # which does not end
    ],
)
def test_what_cannot_be_captured_is_told_once_and_does_no_harm(captured, what, env, said):
    assert captured(what, env).count(said) == 1


def test_a_limit_that_is_stated_in_a_capture_holds(captured):
    assert captured("a lower limit in the capture", {}).count(UNPLANNED) == 1
