"""Makes interceptors: wrong options are refused at once, and a device is opened when it is first used."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.api.library import LIBRARY_NAME
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.measurer import ProgressListener
from ucudnn.errors import BackendUnavailableError, SettingsError
from ucudnn.handle import Handle
from ucudnn.planning.concurrency import groups_under
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings, parse_choice
from ucudnn.torch.gpu import TorchGpu
from ucudnn.torch.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides

_LOG = logging.getLogger(__name__)
_NO_SETTINGS = ("groups", "effort", "listener")


def open_interceptor(backend: str | None, options: Mapping[str, Any]) -> Interceptor:
    """Return an interceptor whose handles have the given options.

    Args:
        backend: 'auto', 'cudnn' or 'cudnn:CANDIDATES' for tensors on GPUs, 'cpu' for tensors on the CPU; None for the
            value of UCUDNN_BACKEND.
        options: other arguments of `Handle`.

    Raises:
        SettingsError: if an option is not known, or has an invalid value.
        BackendUnavailableError: as `interceptor_of`.
    """
    settings = Settings.load(
        backend=backend, **{name: value for name, value in options.items() if name not in _NO_SETTINGS}
    )
    return interceptor_of(settings, **{name: options[name] for name in _NO_SETTINGS if name in options})


def interceptor_of(
    settings: Settings,
    *,
    groups: Sequence[Sequence[str | Sequence[str]]] | None = None,
    effort: Effort | None = None,
    listener: ProgressListener | None = None,
) -> Interceptor:
    """Return an interceptor whose handles have the given settings.

    Nothing of CUDA is touched, because the program says which GPU a process uses.

    Args:
        settings: the settings; every field counts.
        groups: as for `Handle`, as are the effort and the listener.
        effort: how much time one measurement may take.
        listener: receives the progress of the benchmarks.

    Raises:
        SettingsError: if the backend does not execute, or a setting does not go with PyTorch.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU, or is too old.
    """
    groups_under(settings, groups)
    kind, _, target = settings.backend.partition(":")
    if kind == "replay":
        raise SettingsError(f"backend={settings.backend!r} plans but cannot execute: PyTorch needs auto, cudnn or cpu")
    # PyTorch chooses from the graph API, and its programs expect no more rounding than that has.
    candidates = parse_choice(Candidates, target, "backend cudnn:") if target else Candidates.GRAPH
    on_cpu = kind == "cpu"
    aten = process_overrides.aten_kernels("cpu" if on_cpu else "cuda")
    open_with = partial(Handle.from_settings, settings, groups=groups, effort=effort, listener=listener)
    if on_cpu:
        return Interceptor(lambda _: open_with(), "cpu", aten)
    if settings.benchmark_devices not in (None, "ranks"):
        raise SettingsError(
            f"{settings.called('benchmark_devices')}: GPUs of PyTorch measure alone, or together as 'ranks' of"
            " torch.distributed: leave it out, or give ranks"
        )
    if torch.version.cuda is None or not torch.cuda.device_count():
        raise BackendUnavailableError(
            f"PyTorch {torch.__version__} has no NVIDIA GPU: with backend='cpu', or UCUDNN_BACKEND=cpu, convolutions of"
            " CPU tensors are taken over instead, which is for tests"
        )

    def open_handle(ordinal: int) -> Handle:
        return open_with(backend=_open_gpu(ordinal, candidates, settings.cudnn_library))

    return Interceptor(open_handle, "cuda", aten)


def _open_gpu(ordinal: int, candidates: Candidates, library_path: str | None) -> CudnnBackend:
    """Return cuDNN on a GPU of PyTorch: the library that PyTorch itself uses, unless the settings name another."""
    gpu = TorchGpu(ordinal)
    own = torch.backends.cudnn.version()  # PyTorch loads its library to answer this
    try:
        # Given the bare name, the loader returns the library that the process has loaded already.
        backend = CudnnBackend(candidates=candidates, library_path=library_path or LIBRARY_NAME, device=gpu)
    except BackendUnavailableError:
        if library_path:
            raise
        backend = CudnnBackend(candidates=candidates, device=gpu)
    if own != backend.library.version:
        _LOG.warning("PyTorch runs on cuDNN %s, ucudnn on %s: %s", own, backend.library.version, backend.library.path)
    return backend
