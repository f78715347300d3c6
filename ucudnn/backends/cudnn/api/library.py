"""ctypes on libcudnn 9: finds the library, declares its functions, and turns statuses into exceptions.

In the backend only this module and `driver`, for libcuda, use ctypes. Addresses of descriptors, buffers and host
scalars are integers. Whatever calls cuDNN raises CudnnError where cuDNN reports an error.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from ucudnn.backends.cudnn.api.declarations import DECLARATIONS
from ucudnn.errors import BackendUnavailableError, CudnnError

LIBRARY_NAME = "libcudnn.so.9"
OLDEST_VERSION = 90200  # earlier versions do not tell a configuration's workspace before its plan is built

_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "z": ctypes.c_size_t,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
_EXPLANATIONS = {
    1001: "cuDNN could not be initialized: is there an NVIDIA GPU, and a driver new enough for this CUDA?",
    1002: "parts of cuDNN of different versions were loaded: keep one nvidia-cudnn package",
    1008: "a part of cuDNN could not be loaded: is cuBLAS of the same CUDA version installed?",
    2000: "an argument does not fit the others",
    2002: "a pointer is null",
    2003: "a pointer is not aligned as the algorithm needs it",
    2006: "the workspace is too small",
    3000: "no kernel of cuDNN computes this",
    4000: "cuDNN failed inside",
    4003: "host memory ran out",
    4004: "GPU memory ran out",
    5000: "the GPU could not execute a kernel: an earlier error may be its cause",
}


@final
class Library:
    """A loaded libcudnn.

    Args:
        path: file to load; None tries the nvidia-cudnn wheels, then the loader's path.

    Raises:
        BackendUnavailableError: if no library is found, or its version is not 9.2 to 9.x.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path, self._library = _load(path)
        # Each function with the type of each output among its arguments, None for an input; () if it has no outputs.
        self._functions: dict[str, tuple[Callable[..., int], tuple[Any, ...]]] = {}
        try:
            get_version = self._library.cudnnGetVersion
        except AttributeError as error:
            raise BackendUnavailableError(f"{self.path} is not cuDNN: give the path of libcudnn.so.9") from error
        get_version.restype = ctypes.c_size_t
        self.version: int = get_version()
        """The version as cudnnGetVersion returns it: 91901 is 9.19.1."""
        if not OLDEST_VERSION <= self.version < 100000:
            raise BackendUnavailableError(
                f"{self.path} is cuDNN {self.version_text}: ucudnn needs 9.2 or a later 9.x, as in"
                " `pip install 'ucudnn[cuda13]'`"
            )
        self._error_string = self._library.cudnnGetErrorString
        self._error_string.restype = ctypes.c_char_p

    @property
    def version_text(self) -> str:
        """The version as text, such as '9.19.1'."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def call(self, name: str, *arguments: float) -> Any:
        """Call a function of DECLARATIONS with its inputs; return its outputs: None, one value, or a tuple."""
        function, types = self._functions.get(name) or self._declare(name)
        if not types:  # as most calls, which build descriptors
            status = function(*arguments)
            if status:
                raise self.error(status, name)
            return None
        outputs = [None if each is None else each() for each in types]
        inputs = iter(arguments)
        status = function(*(next(inputs) if each is None else ctypes.byref(each) for each in outputs))
        if status:
            raise self.error(status, name)
        values = [output.value or 0 for output in outputs if output is not None]
        return values[0] if len(values) == 1 else tuple(values)

    def function(self, name: str) -> Callable[..., int]:
        """Return a function without outputs; it takes addresses and returns its status."""
        return (self._functions.get(name) or self._declare(name))[0]

    def check(self, status: int, name: str) -> None:
        """Check the status that a function returned."""
        if status:
            raise self.error(status, name)

    def error(self, status: int, name: str) -> CudnnError:
        """Return the exception for a status, with its name, an explanation and cuDNN's last error text."""
        explanation = _EXPLANATIONS.get(status) or _EXPLANATIONS.get(status // 1000 * 1000, "")
        details = "; ".join(text for text in (explanation, self._last_error()) if text)
        what = (self._error_string(status) or b"").decode(errors="replace")  # such as CUDNN_STATUS_BAD_PARAM
        return CudnnError(status, f"{what} from {name} (cuDNN {self.version_text}): {details}")

    def _last_error(self) -> str:
        text = ctypes.create_string_buffer(1024)
        with suppress(AttributeError):
            self._library.cudnnGetLastErrorString(text, ctypes.c_size_t(len(text)))
        return " ".join(text.value.decode(errors="replace").split())

    def _declare(self, name: str) -> tuple[Callable[..., int], tuple[Any, ...]]:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise BackendUnavailableError(f"cuDNN {self.version_text} has no function {name}") from error
        letters = DECLARATIONS[name]
        function.argtypes = [ctypes.c_void_p if each.isupper() else _TYPES[each] for each in letters]
        function.restype = ctypes.c_int
        outputs = (
            () if letters.islower() else tuple(_TYPES[each.lower()] if each.isupper() else None for each in letters)
        )
        self._functions[name] = function, outputs
        return function, outputs


@final
class OwnedHandle:
    """A cudnnHandle_t that is destroyed with this object."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.address: int = library.call("cudnnCreate")

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process cuDNN may be unloaded before the handle is deleted.
        if hasattr(self, "address") and not finalizing():
            self._library.function("cudnnDestroy")(self.address)


@final
class HostScalar:
    """A number that C functions read by its address, such as alpha and beta of `cudnnConvolution*`."""

    def __init__(self, value: float, *, double: bool) -> None:
        self._value = (ctypes.c_double if double else ctypes.c_float)(value)
        self.address = ctypes.addressof(self._value)


def read_scalar(address: int, *, double: bool) -> float:
    """Return the float or double at an address of host memory."""
    return float((ctypes.c_double if double else ctypes.c_float).from_address(address).value)


def _load(path: str | None) -> tuple[str, ctypes.CDLL]:
    tried = []
    for candidate in [path] if path else _candidates():
        try:
            return candidate, ctypes.CDLL(candidate)
        except OSError as error:
            tried.append(f"{candidate}: {error}")
    raise BackendUnavailableError(
        "cuDNN 9 was not found: `pip install 'ucudnn[cuda13]'` (or cuda12) installs it, UCUDNN_CUDNN_LIBRARY names"
        f" a file; tried {'; '.join(tried)}"
    )


def _candidates() -> Iterable[str]:
    """Yield places of libcudnn: in a wheel of nvidia-cudnn-cu12 or -cu13, else on the loader's path."""
    files = (folder / LIBRARY_NAME for folder in wheel_folders("cudnn", "lib"))
    return [*(str(file) for file in files if file.exists()), LIBRARY_NAME]


def wheel_folders(package: str, kind: str) -> Iterable[Path]:
    """Yield the folders of headers ('include') or libraries ('lib') in a wheel of NVIDIA."""
    with suppress(ModuleNotFoundError):
        spec = find_spec(f"nvidia.{package}")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(folder) / kind).is_dir():
                yield Path(folder) / kind
