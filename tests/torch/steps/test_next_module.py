"""A function is called once, before the next module is."""

import subprocess
import sys
from threading import Thread

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.modules import module as modules

from ucudnn.torch.steps.next_module import NextModule


class Noted(torch.nn.Module):
    """A module that notes its calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self):
        self.calls.append("module")


@pytest.fixture(autouse=True)
def hooks():
    """Look whether hooks are left."""
    before = len(modules._global_forward_pre_hooks)
    yield
    assert len(modules._global_forward_pre_hooks) == before


def test_a_function_is_called_once_before_the_next_module():
    calls = []
    module, one = Noted(calls), NextModule()
    assert not one.is_awaited
    one.wait(lambda: calls.append("other"))
    one.wait(lambda: calls.append("action"))
    assert one.is_awaited
    module()
    assert not one.is_awaited
    module()
    assert calls == ["action", "module", "module"]
    one.wait(lambda: one.wait(lambda: calls.append("again")))
    module()
    module()
    assert calls == ["action", "module", "module", "module", "again", "module"]


def test_what_is_forgotten_is_not_called():
    calls = []
    one = NextModule()
    one.wait(lambda: calls.append("action"))
    one.forget()
    one.forget()
    Noted(calls)()
    assert calls == ["module"]


def test_any_thread_may_call_the_module():
    calls = []
    one = NextModule()
    one.wait(lambda: calls.append("action"))
    thread = Thread(target=Noted(calls))
    thread.start()
    thread.join()
    assert calls == ["action", "module"]


def test_a_process_knows_whether_it_has_compiled_anything():
    code = """
import torch
from ucudnn.torch.steps.next_module import has_compiled
module = torch.nn.Linear(2, 2)
torch.optim.SGD(module.parameters(), lr=0.1).step()
assert not has_compiled()
torch.compile(module, backend="eager")(torch.ones(1, 2))
assert has_compiled()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
