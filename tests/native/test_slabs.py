"""Slabs through the whole cuDNN backend, on a stand-in for cuDNN that computes on host memory."""

import json
import sys

import pytest

from tests.support.paths import NATIVE


@pytest.mark.parametrize("refuses", [False, True], ids=["takes gaps", "refuses gaps"])
def test_results_are_right_within_the_limit(libraries, process, refuses):
    names, rows = set(), []
    for seed in range(3):
        stub = str(libraries / "libcudnn.so.9")
        command = [sys.executable, NATIVE / "in_slabs.py", stub, str(seed), str(int(refuses))]
        done = process(command, UCUDNN_CUDNN_LIBRARY=stub)
        assert done.returncode == 0, done.stderr[-2000:]
        rows += [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 30
    for row in rows:
        assert row["error"] < 1, row
        assert row["workspace"] <= row["limit"], row
        names.add(row["configuration"])
    assert any("rows eng1" in name for name in names), "slabs were needed"
    assert any("+packed" in name for name in names) is refuses
