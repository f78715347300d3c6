"""Builds the library of the gate in the background, once for each version of PyTorch on a machine."""

import logging
import shutil
import subprocess
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import perf_counter
from typing import final

import torch

from ucudnn.benchmarking.storage.file_lock import distrust, exclusive, make_private, state_of
from ucudnn.benchmarking.storage.store import default_path
from ucudnn.errors import BackendUnavailableError, UcudnnError
from ucudnn.torch.gate.call_gate import CallGate

_LOG = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "src" / "call_gate.cpp"
_COMPILERS = ("c++", "g++", "clang++")
# The headers of PyTorch 2.14 are C++20. Compilers that came before that standard had a name know it by this one only.
_FLAGS = ("-std=c++2a", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_DETOUR = "calls that are passed on make a detour through Python"
_MOST_SECONDS = 600.0  # it takes some seconds of one processor, of which a busy host has little to spare
_MOST_AWAITED_SECONDS = 60.0


@final
class GateLibrary:
    """Builds the gate where there is a C++ compiler, and loads it.

    What another user than root could have written is not loaded: it would run as this user.

    Args:
        folder: keeps the library for later processes; None for the user's cache folder.
        find: returns the path of a program; None if it is not there.
    """

    def __init__(self, folder: Path | None = None, find: Callable[[str], str | None] = shutil.which) -> None:
        self._folder = folder
        self._find = find
        self._thread: Thread | None = None
        self._begun = 0.0
        self._gate: CallGate | None = None

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
            self._gate = self._loaded()
        except BackendUnavailableError as error:
            _warn_once(f"{_DETOUR}: {error}")
        except (OSError, subprocess.SubprocessError, UcudnnError) as error:
            _LOG.info("%s: %s", _DETOUR, error)

    def _loaded(self) -> CallGate:
        """Return the gate, whose library is built if there is none that can be trusted and loaded."""
        texts = [each.read_text() for each in sorted(_SOURCE.parent.iterdir())]
        state = sha256("\0".join([*_flags(), torch.__version__, *texts]).encode()).hexdigest()[:16]
        folder = default_path().parent / "gate" if self._folder is None else self._folder
        library = folder / f"call_gate-{state}.so"  # its name has all that it depends on
        before, gate = state_of(library), self._kept(library)
        if gate is not None:
            return gate
        compiler = next(filter(None, map(self._find, _COMPILERS)), None)
        if compiler is None:
            raise FileNotFoundError(f"no C++ compiler was found, none of {', '.join(_COMPILERS)}")
        make_private(library.parent)
        _refuse_shared(library.parent)
        with exclusive(library, _MOST_SECONDS):  # ranks begin at the same time
            gate = None if state_of(library) == before else self._kept(library)
            return self._built(library, compiler) if gate is None else gate

    def _kept(self, library: Path) -> CallGate | None:
        """Return the gate that an earlier process has built; None if there is none, or none to load."""
        if not library.exists():
            return None
        _refuse_shared(library.parent)
        why = distrust(library, library)
        if why is None:
            try:
                return CallGate(library)
            except OSError as error:  # of a disk that was full, or of another program
                why = str(error)
        _warn_once(f"the library of the gate is built again: {why}")
        return None

    def _built(self, library: Path, compiler: str) -> CallGate:
        """Build the library in a folder of its own, so that nothing that is not whole gets its name."""
        with TemporaryDirectory(prefix="unfinished-", dir=library.parent, ignore_cleanup_errors=True) as folder:
            made = Path(folder) / library.name
            nice = self._find("nice")  # leaves the processors to the program
            polite = [] if nice is None else [nice, "-n", "10"]
            command = [*polite, compiler, *_flags(), str(_SOURCE), "-o", str(made), *_links()]
            subprocess.run(command, capture_output=True, timeout=_MOST_SECONDS, check=True)
            made.chmod(0o700)
            gate = CallGate(made)  # from here, because a path that was loaded before gives what was there then
            made.replace(library)
        return gate


def _refuse_shared(folder: Path) -> None:
    why = distrust(folder, folder.parent.parent)  # the user's cache folder holds the package's, and that holds this
    if why is not None:
        raise BackendUnavailableError(f"no library is loaded from {folder}, because {why}; or set XDG_CACHE_HOME")


@lru_cache(maxsize=16)
def _warn_once(text: str) -> None:
    _LOG.warning(text)  # however often a program begins to compute by plans


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
