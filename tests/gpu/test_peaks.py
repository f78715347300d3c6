"""The peak of allocated memory of a program that is tuned while it runs: to the byte no more than PyTorch's alone."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.support.paths import ROOT  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU")

RESERVED_MORE = 20 << 20
"""A segment of PyTorch's allocator."""


def measured(network, setting):
    """Return what a process prints that trains a network with or without ucudnn."""
    command = [sys.executable, "-m", "tests.support.peak_worker", network, setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("network", ["resnet", "efficientnet"])
def test_the_peak_is_at_most_that_of_pytorch_from_the_first_step_on_in_each_phase(network):
    off = measured(network, "off")
    on = measured(network, "on")
    assert {"warming", "watching", "trying", "settled", "after"} <= on["phases"].keys(), on
    assert sum(count for what, count in on["outcomes"].items() if what != "new") > 10, "candidates were tried"
    most = off["phases"]["after"]
    assert {phase: peak for phase, peak in on["phases"].items() if peak > most} == {}, (most, on)
    assert on["steady"] <= off["steady"], on
    assert on["reserved"] <= off["reserved"] + RESERVED_MORE, on
