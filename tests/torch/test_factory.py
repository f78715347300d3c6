"""Options that cannot be obeyed are refused before anything is turned on."""

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch  # noqa: E402
from tests.support.torch_cases import enable_on_cpu  # noqa: E402
from ucudnn.errors import BackendUnavailableError, SettingsError  # noqa: E402

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
