"""Options that cannot be obeyed are refused before anything is turned on."""

import re

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch  # noqa: E402
from tests.support.torch_cases import enable_on_cpu  # noqa: E402
from ucudnn.errors import BackendUnavailableError, SettingsError  # noqa: E402
from ucudnn.torch.calls.interceptor import Interceptor  # noqa: E402
from ucudnn.torch.factory import open_interceptor, tunes  # noqa: E402
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor  # noqa: E402

F = torch.nn.functional


def test_wrong_options_are_refused_at_once(monkeypatch):
    with pytest.raises(SettingsError, match="workspace_limit: size 'much' cannot be read"):
        enable_on_cpu(workspace_limit="much")
    with pytest.raises(SettingsError, match="backend='gpu'"):
        ucudnn.torch.enable(backend="gpu")
    with pytest.raises(SettingsError, match="unknown settings"):
        enable_on_cpu(limit="1MiB")
    with pytest.raises(SettingsError, match="groups say how a total is divided"):
        enable_on_cpu(groups=[["a", "b"]])
    with pytest.raises(SettingsError, match="plans but cannot execute"):
        ucudnn.torch.enable(backend="replay:h200")
    with pytest.raises(SettingsError, match="or together as 'ranks'"):
        ucudnn.torch.enable(benchmark_devices="0,1")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailableError, match="has no NVIDIA GPU"):
            ucudnn.torch.enable()
    with pytest.raises(SettingsError, match=r"chooses kernels in the program: it takes no effort, policy$"):
        ucudnn.torch.enable(workspace_limit="auto", policy="all", database="off", effort=1, total_workspace=None)
    with pytest.raises(SettingsError, match="needs an NVIDIA GPU, and backend='cpu' has none"):
        ucudnn.torch.enable(backend="cpu", workspace_limit="auto")
    with pytest.raises(SettingsError, match="trial_share=2 is no part of the time"):
        ucudnn.torch.enable(workspace_limit=" Auto", trial_share=2)
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailableError, match="has no NVIDIA GPU"):
            ucudnn.torch.enable(workspace_limit="auto")
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(BackendUnavailableError, match=r"2\.10 is the first that will do"):
        enable_on_cpu()
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    F.conv2d(x, w)
    assert ucudnn.torch.report().calls == 0


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
def test_a_program_on_a_gpu_is_tuned_unless_it_states_something_else(backend, options, monkeypatch):
    monkeypatch.setattr("ucudnn.torch.factory._refuse_without_gpu", lambda: None)
    assert tunes(backend, options)
    made = open_interceptor(backend, options)
    assert isinstance(made, AutoInterceptor)
    assert made.planned is None, "PyTorch's own kernels run first"


@pytest.mark.parametrize(
    ("backend", "options", "variables"),
    [
        (None, {"workspace_limit": "8MiB"}, {}),
        (None, {"workspace_limit": 0}, {}),
        (None, {"total_workspace": "8MiB"}, {}),
        (None, {"policy": "all"}, {}),
        (None, {"strict": False}, {}),
        (None, {"effort": 1}, {}),
        ("cpu", {}, {}),
        (None, {}, {"UCUDNN_BACKEND": "cpu"}),
        (None, {}, {"UCUDNN_DEFAULT_WORKSPACE_LIMIT": "8MiB"}),
        (None, {}, {"UCUDNN_TOTAL_WORKSPACE_SIZE": "8MiB"}),
        (None, {"database": "off"}, {"UCUDNN_STRICT": "1"}),
    ],
)
def test_whoever_states_what_belongs_to_a_limit_means_a_limit(backend, options, variables, monkeypatch):
    monkeypatch.setattr("ucudnn.torch.factory._refuse_without_gpu", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not tunes(backend, options)
    made = open_interceptor(backend, options)
    measures = {"total_workspace", "policy", "effort"} & set(options) or "UCUDNN_TOTAL_WORKSPACE_SIZE" in variables
    if measures or "cpu" in (backend, *variables.values()):
        assert isinstance(made, Interceptor), "kernels are measured before their first run"
    else:
        assert isinstance(made, AutoInterceptor)
        assert made.planned is not None, "heuristic plans run within the limit"


@pytest.mark.parametrize("limits", [{"workspace_limit": "8MiB"}, {"memory_limit": "1GiB"}, {"strict": True}])
@pytest.mark.parametrize(("tune", "expected"), [("first", Interceptor), ("program", AutoInterceptor)])
def test_a_stated_limit_is_tuned_when_the_program_says(limits, tune, expected, monkeypatch):
    monkeypatch.setattr("ucudnn.torch.factory._refuse_without_gpu", lambda: None)
    made = open_interceptor(None, {**limits, "tune": tune})
    assert isinstance(made, expected)
    planned = made.planned if isinstance(made, AutoInterceptor) else made
    if isinstance(made, AutoInterceptor):
        assert made.opener._library is not None, "the gate looks at live bytes where they are limited"
    assert planned.fallbacks.strict is limits.get("strict", False)
    limit_bytes = planned.fallbacks._limit_bytes
    assert limit_bytes == (
        8 << 20 if "workspace_limit" in limits else 1 << 30 if "memory_limit" in limits else 64 << 20
    )


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        (None, {"tune": "soon"}, "tune='soon' is not known: give one of first, program"),
        (None, {"tune": "program", "policy": "all", "effort": 1}, "it takes no effort, policy"),
        (None, {"tune": "program", "total_workspace": "8MiB"}, "it takes no total_workspace"),
        ("cpu", {"tune": "program"}, "it needs an NVIDIA GPU, not backend='cpu'"),
        ("cpu", {"memory_limit": "8MiB"}, "memory_limit needs an NVIDIA GPU"),
        (None, {"memory_limit": "8 apples"}, "memory_limit: "),
        (None, {"workspace_limit": "8MiB", "trial_share": 2}, "trial_share=2 is no part of the time"),
        (None, {"workspace_limit": "auto", "memory_limit": "8MiB"}, "it takes no memory_limit"),
        (None, {"workspace_limit": "auto", "tune": "first"}, "it takes no tune"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(backend, options, message, monkeypatch):
    monkeypatch.setattr("ucudnn.torch.factory._refuse_without_gpu", lambda: None)
    with pytest.raises(SettingsError, match=re.escape(message)):
        open_interceptor(backend, options)
