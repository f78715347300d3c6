"""From options to a switch: what is wrong with them is said at once, a device is opened when it is first used."""

import logging
from typing import Any

import torch

from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.api.library import LIBRARY_NAME
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.errors import BackendUnavailableError, SettingsError
from ucudnn.handle import Handle
from ucudnn.planning.concurrency import groups_under
from ucudnn.settings import Settings, parse_choice
from ucudnn.torch.gpu import TorchGpu
from ucudnn.torch.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides

_LOG = logging.getLogger(__name__)
_FIELDS = {
    "workspace_limit": "workspace_limit_bytes",
    "total_workspace": "total_workspace_bytes",
    "solver_time_limit": "solver_time_limit_seconds",
}
_NO_SETTINGS = ("groups", "effort", "listener")


def open_interceptor(backend: str | None, options: dict[str, Any]) -> Interceptor:
    """Return a switch whose handles have some options.

    Nothing of CUDA is touched: which GPU a process uses is for the program to say.

    Args:
        backend: 'auto', 'cudnn' or 'cudnn:CANDIDATES' for tensors on GPUs, 'cpu' for those of the CPU; None for what
            UCUDNN_BACKEND says.
        options: of `Handle`.

    Raises:
        SettingsError: if an option is not known, or has a value that it may not have.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU, or is too old.
    """
    settings = Settings.load(
        backend=backend,
        **{_FIELDS.get(name, name): value for name, value in options.items() if name not in _NO_SETTINGS},
    )
    groups_under(settings, options.get("groups"))
    kind, _, target = settings.backend.partition(":")
    if kind == "replay":
        raise SettingsError(f"backend={settings.backend!r} plans but cannot execute: PyTorch needs auto, cudnn or cpu")
    # PyTorch chooses from the graph API, and its programs expect no more rounding than that has.
    candidates = parse_choice(Candidates, target, "backend cudnn:") if target else Candidates.GRAPH
    on_cpu = kind == "cpu"
    stock = process_overrides.stock("cpu" if on_cpu else "cuda")
    if on_cpu:
        return Interceptor(lambda _: Handle(backend="cpu", **options), "cpu", stock)
    if settings.benchmark_devices not in (None, "ranks"):
        raise SettingsError(
            "benchmark_devices: GPUs of PyTorch measure alone, or together as 'ranks' of torch.distributed; unset"
            " UCUDNN_BENCHMARK_DEVICES, or give ranks"
        )
    if torch.version.cuda is None or not torch.cuda.device_count():
        raise BackendUnavailableError(
            f"PyTorch {torch.__version__} has no NVIDIA GPU: with backend='cpu', or UCUDNN_BACKEND=cpu, convolutions of"
            " CPU tensors are taken over instead, which is for tests"
        )

    def open_handle(ordinal: int) -> Handle:
        return Handle(backend=_open_gpu(ordinal, candidates, settings.cudnn_library), **options)

    return Interceptor(open_handle, "cuda", stock)


def _open_gpu(ordinal: int, candidates: Candidates, library_path: str | None) -> CudnnBackend:
    """Return cuDNN on a GPU of PyTorch's: the very library that PyTorch runs on, unless another is named."""
    gpu = TorchGpu(ordinal)
    own = torch.backends.cudnn.version()  # loads it
    try:
        # By its bare name, the loader finds the one that is in the process already.
        backend = CudnnBackend(candidates=candidates, library_path=library_path or LIBRARY_NAME, device=gpu)
    except BackendUnavailableError:
        if library_path:
            raise
        backend = CudnnBackend(candidates=candidates, device=gpu)
    if own != backend.library.version:
        _LOG.warning("PyTorch runs on cuDNN %s, ucudnn on %s: %s", own, backend.library.version, backend.library.path)
    return backend
