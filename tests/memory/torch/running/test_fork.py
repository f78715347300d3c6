"""A process that is forked after a fit, as by a data loader or a launcher, computes gradients, and runs the step."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
import signal

import torch
import ucudnn.memory

torch.set_num_threads(1)
model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
step = ucudnn.memory.fit(model, x)


def check_child(when):
    child = os.fork()
    if not child:
        signal.alarm(60)
        status = 1
        try:
            torch.nn.Linear(8, 8)(x).sum().backward()
            model.zero_grad()
            step(x).sum().backward()
            status = 0 if torch.equal(model.weight.grad, torch.ones(4, 8).T @ x) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, when


check_child("after the fit")
step(x).sum().backward()
check_child("after a step")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot fork here")
def test_a_child_that_is_forked_after_a_fit_computes_gradients():
    """It failed where PyTorch has CUDA and finds no GPU: a trace lets it believe that there is one."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "UCUDNN_DATABASE": "off"}  # a GPU has threads from the start
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=hidden, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
