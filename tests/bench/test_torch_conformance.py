"""bench.torch.conformance: what it counts, compares and keeps."""

import os
import re
import subprocess
import sys

import pytest

from bench.tools.results import RESULTS, ROOT, load, save
from bench.torch.conformance import counts_of, differences_of

pytest.importorskip("torch")

TESTS = """\
import time
import unittest
import torch
from torch.testing._internal.common_cuda import tf32_is_not_fp32


class TestConvolution(unittest.TestCase):
    def test_right(self):
        x, w = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 3, 6, 6), (2, 3, 3, 3)))
        expected = torch.nn.functional.unfold(x, 3).transpose(1, 2) @ w.flatten(1).T
        torch.testing.assert_close(torch.conv2d(x, w).flatten(2), expected.transpose(1, 2))

    def test_only_with_stock_kernels(self):
        from ucudnn.torch.overrides import process_overrides
        assert process_overrides.interceptor is None

    def test_skipped(self):
        self.skipTest("no reason")

    def test_endless(self):
        while True:
            pass
"""


def run(folder, *options):
    """Run the script on the tests above; return its exit status, its output and its cases."""
    tests, out = folder / "test_convolution.py", folder / "found.json"
    tests.write_text(TESTS)
    command = [sys.executable, "-m", "bench.torch.conformance", tests, "--backend", "cpu", "--out", out, *options]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=300
    )
    assert out.exists(), ended.stdout + ended.stderr
    return ended.returncode, ended.stdout, load(out)["cases"]


def test_each_limit_with_each_policy_is_a_case_and_runs_once(tmp_path):
    several = ["--limit", "1MiB", "--limit", "0", "--policy", "all", "-k", "not endless"]
    status, _, cases = run(tmp_path, *several)
    assert status == 1  # one test differs
    assert list(cases) == ["release 1MiB all", "release 0 all"]
    for case in cases.values():
        assert (case["off"], case["on"]) == ({"passed": 2, "skipped": 1}, {"passed": 1, "failed": 1, "skipped": 1})
        assert list(case["differences"]) == ["TestConvolution::test_only_with_stock_kernels"]
        assert case["compared"] == 3
        assert case["through_ucudnn"]["calls"] == case["through_ucudnn"]["kernels"] == 1
        assert not case["cut_off"]
        ((problem, configuration),) = case["configurations"].items()
        assert problem == "Forward 4x3x6x6 * 2x3x3x3 float64 NCHW"
        assert re.match(r"\d+x\d+ \w+", configuration)
    status, said, again = run(tmp_path, *several)
    assert (status, again) == (0, cases)
    assert said == "every case is in the results\n"


def test_a_test_that_takes_too_long_is_given_up_and_not_compared(tmp_path):
    status, _, cases = run(tmp_path, "--test-seconds", "5", "-k", "endless or right")
    (case,) = cases.values()
    assert status == 0
    assert case["out_of_time"] == {way: ["TestConvolution::test_endless"] for way in ("off", "on")}
    assert case["compared"] == 1
    assert case["off"] == case["on"] == {"out of time": 1, "passed": 1}


def test_a_test_that_one_way_lacks_differs_only_if_there_was_time_for_all():
    off, on = {"a": "passed", "b": "passed"}, {"a": "failed: 1"}
    assert list(differences_of(off, on, whole=True)) == ["a", "b"]
    assert list(differences_of(off, on, whole=False)) == ["a"]
    assert differences_of({"a": "skipped: x"}, {"a": "skipped: y"}, whole=True) == {}


def test_kernels_of_several_processes_count_once_and_are_divided_if_one_divides(tmp_path):
    for name, configuration, divided in [("1", "1x4 GEMM", False), ("2", "2x2 GEMM", True)]:
        kernels = [["Forward a", configuration, divided]]
        counts = {"calls": 3, "planned": 1, "divided": 3 * divided, "left": {"complex": 1}, "past_limit": 2}
        save(tmp_path / f"{name}.json", {**counts, "kernels": kernels})
    found = counts_of(tmp_path)
    assert found["through_ucudnn"] == {
        "calls": 6,
        "planned": 2,
        "divided calls": 3,
        "past the limit": 4,
        "kernels": 1,
        "divided kernels": 1,
    }
    assert found["left"] == {"complex": 2}
    assert found["configurations"] == {"Forward a": "1x4 GEMM or 2x2 GEMM"}


def test_pytorchs_own_tests_pass_in_micro_batches_on_the_cpu():
    cases = load(RESULTS / "torch" / "conformance_cpu.json")["cases"]
    assert {case["conditions"]["torch"].partition("+")[0] for case in cases.values()} == {"2.10.0", "2.13.0"}
    rounded = {"TestConvolutionNN::test_functional_grad_conv2d"}  # two plans of one gradient, the same to 1e-5
    for case in cases.values():
        assert case["compared"] > 40
        assert case["through_ucudnn"]["calls"] > 2000
        assert case["through_ucudnn"]["divided kernels"] > 0
        assert len(case["configurations"]) == case["through_ucudnn"]["kernels"]
        assert case["differences"].keys() <= rounded
