"""Backends by name, each imported when it is first asked for."""

from importlib import import_module

from ucudnn.backends.base import Backend
from ucudnn.backends.replay import Candidates, ReplayBackend
from ucudnn.errors import BackendUnavailableError
from ucudnn.profile import load_profile

BACKENDS: dict[str, str] = {"cpu": "ucudnn.backends.cpu.backend:CpuBackend"}
"""Backends that compute, as 'module:Class'."""


def open_backend(name: str, *, candidates: Candidates = Candidates.GRAPH, network: str | None = None) -> Backend:
    """Return a backend by the name that UCUDNN_BACKEND takes.

    Args:
        name: 'auto' for the fastest there is, 'cpu', 'cudnn', or 'replay:NAME-or-path' for a recorded profile.
        candidates: which recorded algorithms replay offers.
        network: the recording that replay prefers where several hold the same shape.

    Raises:
        BackendUnavailableError: if the backend is not known or not part of this installation.
        ProfileError: if the profile cannot be read.
    """
    kind, _, target = name.partition(":")
    if kind == "replay" and target:
        return ReplayBackend(load_profile(target), candidates=candidates, network=network)
    kind = "cpu" if kind == "auto" else kind
    if kind not in BACKENDS:
        raise BackendUnavailableError(
            f"backend {name!r} is not part of this version: give auto, {', '.join(BACKENDS)} or replay:NAME-or-path"
        )
    module, _, class_name = BACKENDS[kind].partition(":")
    backend = getattr(import_module(module), class_name)()
    if not isinstance(backend, Backend):
        raise TypeError(f"{BACKENDS[kind]} is no Backend")
    return backend
