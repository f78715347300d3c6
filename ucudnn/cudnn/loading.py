"""The libcudnn of this process, loaded at its first use; its version and its statuses."""

from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any

from ucudnn.errors import BackendUnavailableError, CudnnError
from ucudnn.settings import Settings

__all__ = [
    "CuDNNError",
    "check_status",
    "getVersion",
    "get_build_version",
]


if TYPE_CHECKING:
    from ucudnn.backends.cudnn.api.library import Library

CuDNNError = CudnnError
"""What every function of this package raises where cuDNN answers with an error status."""


@cache
def library() -> "Library":
    """Return libcudnn: the one that UCUDNN_CUDNN_LIBRARY names, else the one that is found.

    Raises:
        BackendUnavailableError: if there is none, or none that is new enough.
    """
    from ucudnn.backends.cudnn.api.library import Library  # loads ctypes: not before cuDNN is called

    return Library(Settings.load().cudnn_library)


def call(function: str, *arguments: int) -> Any:
    """Call a function of cuDNN whose inputs are integers, Python's or NumPy's, and return what it puts out.

    Raises:
        CudnnError: if its status is not success.
        BackendUnavailableError: if cuDNN is not installed.
    """
    return library().call(function, *map(index, arguments))


def getVersion() -> int:  # noqa: N802  # CuPy's name
    """Return the version of cuDNN, 91901 for 9.19.1 (cudnnGetVersion).

    Raises:
        BackendUnavailableError: if cuDNN is not installed.
    """
    return library().version


def get_build_version() -> int:
    """Return the same as `getVersion`: nothing here is compiled against cuDNN."""
    return getVersion()


def check_status(status: int) -> None:
    """Raise what a status of cuDNN means, if it is not CUDNN_STATUS_SUCCESS.

    Raises:
        CudnnError: likewise; known here as CuDNNError.
    """
    if not status:
        return
    try:
        error = library().error(status, "cuDNN")
    except BackendUnavailableError:  # a status may come from elsewhere
        error = CudnnError(status)
    raise error
