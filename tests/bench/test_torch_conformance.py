"""bench.torch.conformance: what it counts, compares and keeps."""

import itertools
import re
import sys
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from bench.tools.results import RESULTS, load, save
from bench.torch import conformance
from bench.torch.conformance import counts_of, differences_of
from tests.support.reference import WRITTEN, reference_convolution, terms
from ucudnn.backends.base import Offset, Scaling
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.problem import ConvolutionProblem, Operation

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

    def test_unchosen(self):
        self.fail("it is chosen")
"""


def test_each_limit_with_each_policy_is_a_case_and_runs_once(tmp_path, monkeypatch, capsys):
    tests, out = tmp_path / "test_convolution.py", tmp_path / "found.json"
    tests.write_text(TESTS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    several = ["--limit", "1MiB", "--limit", "0", "--policy", "all", "--test-seconds", "3", "-k", "not unchosen"]
    monkeypatch.setattr(sys, "argv", ["conformance", str(tests), "--backend", "cpu", "--out", str(out), *several])
    assert not conformance.main()  # one test differs
    cases = load(out)["cases"]
    assert list(cases) == ["release 1MiB all", "release 0 all"]
    for case in cases.values():
        both = {"skipped": 1, "out of time": 1}
        assert (case["off"], case["on"]) == ({"passed": 2, **both}, {"passed": 1, "failed": 1, **both})
        assert list(case["differences"]) == ["TestConvolution::test_only_with_stock_kernels"]
        assert case["out_of_time"] == {way: ["TestConvolution::test_endless"] for way in ("off", "on")}
        assert case["compared"] == 3, "not what takes too long"
        assert case["through_ucudnn"]["calls"] == case["through_ucudnn"]["kernels"] == 1
        assert not case["cut_off"]
        ((problem, configuration),) = case["configurations"].items()
        assert problem == "Forward 4x3x6x6 * 2x3x3x3 float64 NCHW"
        assert re.match(r"\d+x\d+ \w+", configuration)
    capsys.readouterr()
    assert conformance.main()
    assert load(out)["cases"] == cases
    assert capsys.readouterr().out == "release 1MiB all is in the results\nrelease 0 all is in the results\n"


def test_a_test_that_one_way_lacks_differs_and_one_that_takes_too_long_is_not_compared():
    assert list(differences_of({"a": "passed", "b": "passed"}, {"a": "failed: 1"})) == ["a", "b"]
    assert differences_of({"a": "skipped: x", "b": "passed"}, {"a": "skipped: y", "b": "out of time: 3 s"}) == {}


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


ROUNDED = {
    # Two plans of one gradient: a call without the other gradient has no spare memory, and PyTorch asks for 1e-5.
    "TestConvolutionNN::test_functional_grad_conv2d": ConvolutionProblem(
        operation=Operation.BACKWARD_FILTER,
        batch=4,
        channels=8,
        spatial=(32, 32),
        filters=16,
        kernel=(3, 3),
        padding=(1, 1),
    ),
    # Two plans of one convolution in two layouts.
    "TestConvolutionNNDeviceTypeCPU::test_conv_thnn_nhwc_cpu_float32": ConvolutionProblem(
        operation=Operation.BACKWARD_DATA, batch=2, channels=8, spatial=(4, 4), filters=8, kernel=(3, 3), groups=8
    ),
}
"""The tests that differ on a CPU, with the largest problem of each: right results are farther apart than they allow."""


ROUNDINGS = {
    Operation.BACKWARD_FILTER: {"IMPLICIT_GEMM": 16, "GEMM": 16},
    Operation.BACKWARD_DATA: {"IMPLICIT_GEMM": 16, "GEMM": 16, "WINOGRAD_2X2": 16, "WINOGRAD_4X4": 64},
}
"""The algorithms that computed them, with each one's error in roundings of a sum; Winograd's larger tiles lose more."""


def test_pytorchs_own_tests_pass_in_micro_batches_on_the_cpu():
    cases = load(RESULTS / "torch" / "conformance_cpu.json")["cases"]
    ways = {(limit, policy) for limit in ("64MiB", "1MiB", "0") for policy in ("powerOfTwo", "all")}
    for version in ("2.10", "2.13"):
        assert {tuple(name.split()[-2:]) for name in cases if f"PyTorch {version} " in name} == ways
    for name, case in cases.items():
        assert case["conditions"]["torch"].startswith(name.split()[3] + ".")
        assert not case["cut_off"]
        assert case["compared"] + len({each for way in case["out_of_time"].values() for each in way}) == 586
        assert sum(map(len, case["out_of_time"].values())) <= 1
        assert case["through_ucudnn"]["calls"] > 20_000
        assert case["through_ucudnn"]["divided kernels"] > 30
        assert len(case["configurations"]) == case["through_ucudnn"]["kernels"]
        assert case["differences"].keys() <= ROUNDED.keys()


@pytest.mark.parametrize("test", ROUNDED)
def test_what_differs_on_the_cpu_are_right_results_that_round_otherwise(test):
    problem, generator = ROUNDED[test], np.random.default_rng(0)
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    spread = {"x": 8, "w": 4, "y": 2}  # as large as in the tests, or smaller
    given = {
        name: generator.uniform(-spread[name], spread[name], shape).astype(np.float32) for name, shape in shapes.items()
    }
    exact = [given[name].astype(np.float64) for name in "xwy"]
    size = reference_convolution(problem, *map(np.abs, exact)) / sqrt(terms(problem))
    expected, rounding = reference_convolution(problem, *exact), np.finfo(np.float32).eps * size.max()
    roundings, found = ROUNDINGS[problem.operation], []
    for algorithm, parts in itertools.product(roundings, (1, problem.batch)):
        found.append(in_parts(problem, algorithm, parts, given))
        assert np.abs(found[-1] - expected).max() <= roundings[algorithm] * rounding, (algorithm, parts)
    assert max(np.abs(one - other).max() for one, other in itertools.combinations(found, 2)) > 0
    stored = [
        float(re.search(r"Greatest absolute difference: (\S+)", case["differences"][test]["on"])[1])
        for case in load(RESULTS / "torch" / "conformance_cpu.json")["cases"].values()
        if test in case["differences"]
    ]
    assert stored
    assert max(stored) <= 2 * max(roundings.values()) * rounding  # no farther apart than two right results may be


def in_parts(problem, algorithm, parts, given):
    """Compute a problem on the CPU in equal micro-batches, into memory of NaN."""
    backend, part = CpuBackend(), replace(problem, batch=problem.batch // parts)
    written = WRITTEN[problem.operation]
    arrays = {**given, written: np.full_like(given[written], np.nan)}
    call = backend.prepare(part, algorithm)
    workspace = backend.allocate(call.workspace_bytes)
    for number in range(parts):
        samples = slice(number * part.batch, (number + 1) * part.batch)
        own = {name: each if name == "w" else each[samples] for name, each in arrays.items()}
        added = float(written == "w" and number > 0)
        call.launch(**own, workspace=workspace, offset=Offset(0), scaling=Scaling(1.0, added))
    return arrays[written]
