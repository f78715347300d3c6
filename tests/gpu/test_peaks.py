"""The peak of allocated memory of a program that is tuned while it runs: to the byte no more than PyTorch's alone."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.support.paths import ROOT  # noqa: E402

RESERVED_MORE = 20 << 20
"""A segment of PyTorch's allocator."""


def measured(network):
    """Return what two processes print that train a network side by side, without and with ucudnn.

    Peaks are those of a process, so neither changes the other's.
    """
    begun = []
    for setting in ("off", "on"):
        command = [sys.executable, "-m", "tests.support.peak_worker", network, setting]
        begun.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = [each.communicate() for each in begun]
    assert [each.returncode for each in begun] == [0, 0], [error for _, error in found]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in found]


@pytest.mark.parametrize("network", ["resnet", "efficientnet"])
def test_the_peak_is_at_most_that_of_pytorch_from_the_first_step_on_in_each_phase(network):
    off, on = measured(network)
    assert {"warming", "watching", "trying", "settled", "after"} <= on["phases"].keys(), on
    assert sum(count for what, count in on["outcomes"].items() if what != "new") > 10, "candidates were tried"
    most = off["phases"]["after"]
    assert {phase: peak for phase, peak in on["phases"].items() if peak > most} == {}, (most, on)
    assert on["steady"] <= off["steady"], on
    assert on["reserved"] <= off["reserved"] + RESERVED_MORE, on
