"""Options that cannot be obeyed are refused before anything is turned on."""

import re

import pytest
import torch

import ucudnn.torch
from tests.support.torch_cases import enable_on_cpu
from ucudnn.errors import BackendUnavailableError, SettingsError
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.factory import open_interceptor, tunes
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor

AUTO = {"workspace_limit": "auto"}


@pytest.fixture
def with_gpu(monkeypatch):
    """Let options be checked as where PyTorch has a GPU."""
    monkeypatch.setattr("ucudnn.torch.factory._refuse_without_gpu", lambda: None)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cpu", "workspace_limit": "much"}, "workspace_limit: size 'much' cannot be read"),
        ({"backend": "gpu"}, "backend='gpu'"),
        ({"backend": "cpu", "limit": "1MiB"}, "unknown settings"),
        ({"backend": "cpu", "groups": [["a", "b"]]}, "groups say how a total is divided"),
        ({"backend": "replay:h200"}, "plans but cannot execute"),
        ({"benchmark_devices": "0,1"}, "or together as 'ranks'"),
        ({**AUTO, "policy": "all", "database": "off", "effort": 1, "total_workspace": None}, "takes no effort, policy"),
        ({**AUTO, "backend": "cpu"}, "needs an NVIDIA GPU, and backend='cpu' has none"),
        ({"workspace_limit": " Auto", "trial_share": 2}, "trial_share=2 must be between 0 and 1"),
        ({"tune": "soon"}, "tune='soon' is not known: give one of first, program"),
        ({"tune": "program", "policy": "all", "effort": 1}, "it takes no effort, policy"),
        ({"tune": "program", "total_workspace": "8MiB"}, "it takes no total_workspace"),
        ({"backend": "cpu", "tune": "program"}, "it needs an NVIDIA GPU, not backend='cpu'"),
        ({"backend": "cpu", "memory_limit": "8MiB"}, "memory_limit needs an NVIDIA GPU"),
        ({"memory_limit": "8 apples"}, "memory_limit: "),
        ({"workspace_limit": "8MiB", "trial_share": 2}, "trial_share=2 must be between 0 and 1"),
        ({**AUTO, "memory_limit": "8MiB"}, "it takes no memory_limit"),
        ({**AUTO, "tune": "first"}, "it takes no tune"),
    ],
    ids=str,
)
def test_wrong_options_and_those_that_do_not_go_together_are_refused_by_name(options, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        ucudnn.torch.enable(**options)
    torch.nn.functional.conv2d(torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3))
    assert ucudnn.torch.report().calls == 0, "nothing is turned on"


def test_what_pytorch_lacks_is_named(monkeypatch):
    if not torch.cuda.is_available():
        for options in ({}, AUTO):
            with pytest.raises(BackendUnavailableError, match="has no NVIDIA GPU"):
                ucudnn.torch.enable(**options)
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(BackendUnavailableError, match=r"2\.10 is the first that will do"):
        enable_on_cpu()


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (None, {}),
        ("cudnn", {"workspace_limit": None, "policy": None}),
        ("cudnn:best", {"database": "off"}),
        ("auto", {"cudnn_library": "libcudnn.so.9"}),
        (None, {"trial_share": 0.1}),
        (None, {"workspace_limit": " AUTO"}),
    ],
)
def test_a_program_on_a_gpu_is_tuned_unless_it_states_something_else(backend, options):
    assert tunes(backend, options)
    made = open_interceptor(backend, options)
    assert isinstance(made, AutoInterceptor)
    assert made.planned is None, "PyTorch's own kernels run first"


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("options", "variables", "measures"),
    [
        ({"workspace_limit": "8MiB"}, {}, False),
        ({"workspace_limit": 0}, {}, False),
        ({"total_workspace": "8MiB"}, {}, True),
        ({"policy": "all"}, {}, True),
        ({"strict": False}, {}, False),
        ({"effort": 1}, {}, True),
        ({"backend": "cpu"}, {}, True),
        ({}, {"UCUDNN_BACKEND": "cpu"}, True),
        ({}, {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": "8MiB"}, False),
        ({}, {"UCUDNN_TOTAL_WORKSPACE_SIZE": "8MiB"}, True),
        ({"database": "off"}, {"UCUDNN_STRICT": "1"}, False),
    ],
)
def test_whoever_states_what_belongs_to_a_limit_means_a_limit(options, variables, measures, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    backend = options.get("backend")
    options = {name: value for name, value in options.items() if name != "backend"}
    assert not tunes(backend, options)
    made = open_interceptor(backend, options)
    if measures:
        assert isinstance(made, Interceptor), "kernels are measured before their first run"
    else:
        assert isinstance(made, AutoInterceptor)
        assert made.planned is not None, "heuristic plans run within the limit"


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("limits", "limit_bytes"),
    [({"workspace_limit": "8MiB"}, 8 << 20), ({"memory_limit": "1GiB"}, 1 << 30), ({"strict": True}, 64 << 20)],
)
@pytest.mark.parametrize(("tune", "expected"), [("first", Interceptor), ("program", AutoInterceptor)])
def test_a_stated_limit_is_tuned_when_the_program_says(limits, limit_bytes, tune, expected):
    made = open_interceptor(None, {**limits, "tune": tune})
    assert isinstance(made, expected)
    planned = made.planned if isinstance(made, AutoInterceptor) else made
    if isinstance(made, AutoInterceptor):
        assert made.router._library is not None, "the gate looks at live bytes where they are limited"
    assert planned.fallbacks.strict is limits.get("strict", False)
    assert planned.fallbacks._limit_bytes == limit_bytes
