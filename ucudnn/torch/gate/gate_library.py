"""Builds the library of the gate in the background, once for each version of PyTorch on a machine."""

import fcntl
import logging
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import final

import torch

from ucudnn.benchmarking.storage.store import default_path
from ucudnn.torch.gate.call_gate import CallGate

_LOG = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "src" / "call_gate.cpp"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_MOST_SECONDS = 600.0  # it takes some seconds of one processor, of which a busy host has little to spare
_MOST_AWAITED_SECONDS = 60.0


def default_folder() -> Path:
    """Return the folder that keeps the library, in the user's cache folder."""
    return default_path().parent / "gate"


@final
class GateLibrary:
    """Builds the gate where there is a C++ compiler, and loads it.

    Args:
        folder: keeps the library for later processes; None for the user's cache folder.
        find: returns the path of a program; None if it is not there.
    """

    def __init__(self, folder: Path | None = None, find: Callable[[str], str | None] = shutil.which) -> None:
        self._folder = folder
        self._find = find
        self._thread: Thread | None = None
        self._begun = 0.0
        self._is_built: bool | None = None  # None: not known yet
        self._gate: CallGate | None = None

    def is_built(self) -> bool:
        """Return whether an earlier process has built the library, so that to begin takes no time of a processor."""
        if self._is_built is None:
            try:
                self._is_built = self._path().exists()
            except (OSError, RuntimeError):
                self._is_built = False
        return self._is_built

    def begin(self) -> None:
        """Begin to build the library in a thread, unless that has begun; it waits for another process that builds."""
        if self._thread is None:
            self._begun = perf_counter()
            self._thread = Thread(target=self._run, name="ucudnn-gate", daemon=True)
            self._thread.start()

    @property
    def is_pending(self) -> bool:
        """Whether the library is being built."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_awaited(self) -> bool:
        """Whether it is being built and is worth waiting for: a busy host may have no processor for it."""
        return self.is_pending and perf_counter() - self._begun < _MOST_AWAITED_SECONDS

    @property
    def gate(self) -> CallGate | None:
        """The gate; None if it is not built yet, or cannot be."""
        return None if self.is_pending else self._gate

    def join(self, seconds: float) -> None:
        """Wait until it is built, but no longer than some seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._gate = CallGate(self._built())
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            _LOG.info("calls that are passed on make a detour through Python: %s", error)

    def _built(self) -> Path:
        """Return the path of the library, which is built if it is not there.

        Raises:
            OSError: if the folder or the compiler cannot be used.
            SubprocessError: if the library cannot be built.
            RuntimeError: if the user has no cache folder.
        """
        library = self._path()
        if library.exists():
            return library
        compiler = next(filter(None, map(self._find, _COMPILERS)), None)
        if compiler is None:
            raise FileNotFoundError(f"no C++ compiler was found, none of {', '.join(_COMPILERS)}")
        folder = library.parent
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{library.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks begin at the same time
            if not library.exists():
                unfinished = library.with_suffix(".unfinished")
                command = [*self._polite(), compiler, *_flags(), str(_SOURCE), "-o", str(unfinished), *_links()]
                subprocess.run(command, capture_output=True, timeout=_MOST_SECONDS, check=True)
                unfinished.replace(library)
        return library

    def _path(self) -> Path:
        """Return the path of the library, which names all that it depends on.

        Raises:
            OSError: if a file cannot be read.
            RuntimeError: if the user has no cache folder.
        """
        texts = [each.read_text() for each in sorted(_SOURCE.parent.iterdir())]
        state = sha256("\0".join([*_flags(), torch.__version__, *texts]).encode()).hexdigest()[:16]
        return (default_folder() if self._folder is None else self._folder) / f"call_gate-{state}.so"

    def _polite(self) -> list[str]:
        """Return what makes a command leave the processors to the program."""
        nice = self._find("nice")
        return [] if nice is None else [nice, "-n", "10"]


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    context = (include / "ATen" / "Context.h").read_text()
    numbers = ["-DUCUDNN_PRECISION_HAS_NUMBERS"] if "enum class TORCH_API Float32Backend" in context else []
    return [*_FLAGS, abi, *numbers, *(f"-isystem{each}" for each in folders)]


def _links() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch_cpu", "-lc10"]
