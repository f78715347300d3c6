"""The libcudnn of this process, which is loaded at its first use, with its version and its statuses."""

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
"""The exception of all functions of this package if cuDNN returns an error status."""


@cache
def library() -> "Library":
    """Return libcudnn: the file that UCUDNN_CUDNN_LIBRARY names, else the first one that is found.

    Raises:
        BackendUnavailableError: if there is no libcudnn, or it is too old.
    """
    from ucudnn.backends.cudnn.api.library import Library  # imported here because it loads ctypes

    return Library(Settings.load().cudnn_library)


def call(function: str, *arguments: int) -> Any:
    """Call a function of cuDNN whose inputs are integers of Python or NumPy, and return its outputs.

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
    """Return the same as `getVersion`, because this package is not compiled against a version of cuDNN."""
    return getVersion()


def check_status(status: int) -> None:
    """Check a status of cuDNN.

    Raises:
        CudnnError: if the status is not CUDNN_STATUS_SUCCESS; its name in this package is CuDNNError.
    """
    if not status:
        return
    try:
        error = library().error(status, "cuDNN")
    except BackendUnavailableError:  # a status may come from another library
        error = CudnnError(status)
    raise error
