"""Backends by name; each is imported when it is first opened."""

import logging
from importlib.util import find_spec

from ucudnn.backends.base import Backend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.replay import ReplayBackend
from ucudnn.errors import BackendUnavailableError
from ucudnn.profiles.format import load_profile

COMPUTING = ("cpu", "cudnn")
"""Names of the backends that can compute."""

_LOG = logging.getLogger(__name__)


def open_backend(
    name: str,
    *,
    candidates: Candidates = Candidates.BEST,
    network: str | None = None,
    cudnn_library: str | None = None,
    device: int | None = None,
) -> Backend:
    """Return a backend by the name that UCUDNN_BACKEND takes.

    Args:
        name: 'auto' for the fastest available one, 'cpu', 'cudnn', 'cudnn:CANDIDATES' (such as cudnn:legacy), or
            'replay:NAME-or-path' for a recorded profile.
        candidates: the algorithms of cuDNN to offer, live or recorded, unless the name states them.
        network: the recording that replay prefers if several have the same shape.
        cudnn_library: libcudnn to load; None searches for it.
        device: number of the GPU; None for the current one. The CPU has number 0.

    Raises:
        BackendUnavailableError: if the backend is not known or not installed.
        ProfileError: if the profile cannot be read.
        CudnnError: if cuDNN cannot be initialized.
    """
    kind, colon, target = name.partition(":")
    if kind == "replay" and target:
        return ReplayBackend(load_profile(target), candidates=candidates, network=network)
    if name == "auto":
        if find_spec("cupy") is not None:
            try:
                return _open_cudnn(candidates, cudnn_library, device)
            except BackendUnavailableError as error:
                _LOG.warning("computing on the CPU: %s", error)
        name = "cpu"
    if kind == "cudnn" and bool(colon) == bool(target):
        return _open_cudnn(candidates_of(name, candidates), cudnn_library, device)
    if name == "cpu":
        from ucudnn.backends.cpu.backend import CpuBackend

        return CpuBackend()
    raise BackendUnavailableError(
        f"backend {name!r} is not known: give auto, {', '.join(COMPUTING)}, cudnn:CANDIDATES or replay:NAME-or-path"
    )


def candidates_of(name: str, otherwise: Candidates) -> Candidates:
    """Return the candidates that a name such as 'cudnn:legacy' states, or the given ones for the name 'cudnn'.

    Raises:
        BackendUnavailableError: if there are no candidates of that name.
    """
    _, colon, target = name.partition(":")
    known = {each.value: each for each in Candidates}
    if colon and target not in known:
        raise BackendUnavailableError(f"backend {name!r}: cudnn has candidates {', '.join(known)}")
    return known[target] if colon else otherwise


def _open_cudnn(candidates: Candidates, cudnn_library: str | None, device: int | None) -> Backend:
    from ucudnn.backends.cudnn.backend import CudnnBackend

    return CudnnBackend(candidates=candidates, library_path=cudnn_library, device=device)
