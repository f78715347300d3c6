"""Builds for C++: the flags, and the library, which is compiled from `src/` at its first request."""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from ucudnn.backends.cudnn.api.library import wheel_folders
from ucudnn.benchmarking.storage.file_lock import distrust
from ucudnn.errors import BackendUnavailableError

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
SOURCES = HERE / "src"
LIBRARY = "libucudnn.so"

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
_CUDNN = (("cudnn.h",), "cudnn", ("/usr/include", "/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu"))
_CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")  # the first includes the second, which has its own wheel
_CUDA = (_CUDA_HEADERS, "cu13", ("/usr/local/cuda/include", "/usr/include"))
_OLDER_CUDA = (_CUDA_HEADERS, "cuda_runtime", ())
_MARK = b"ucudnn build "  # in each library of this package, before the hash of what it was built from


def default_folder() -> Path:
    """Return the default folder of the library, among the libraries of this Python environment."""
    return Path(sys.prefix) / "lib" / "ucudnn"


def libpython() -> Path | None:
    """Return the shared library of this Python, which programs load; None if it has none."""
    get = sysconfig.get_config_var
    folders = [str(get("LIBDIR")), str(get("LIBPL")), f"{sys.base_prefix}/lib", f"{get('LIBDIR')}/{get('MULTIARCH')}"]
    for folder in folders:
        for name in (str(get("INSTSONAME")), str(get("LDLIBRARY"))):
            file = Path(folder) / name
            if ".so" in name and file.exists():
                return file
    return None


def header_folders(given: Sequence[Path] = ()) -> list[Path]:
    """Return the folders of cuDNN's and CUDA's headers: the given ones, else those of nvidia wheels or of the system.

    Raises:
        BackendUnavailableError: if headers are missing.
    """
    found = [*given]
    for choices in ((_CUDNN,), (_CUDA, _OLDER_CUDA)):
        names = choices[0][0]
        if all(any((folder / name).exists() for folder in given) for name in names):
            continue
        candidates = [*given]
        for _, package, folders in choices:
            candidates += [*wheel_folders(package, "include"), *map(Path, folders), *sorted(_toolkits())]
        partial = ""
        for folder in candidates:
            missing = [name for name in names if not (folder / name).exists()]
            if not missing:
                if folder not in found:
                    found.append(folder)
                break
            if len(missing) < len(names):
                there = ", ".join(name for name in names if name not in missing)
                partial = partial or f"{folder} has {there}, but not {', '.join(missing)}"
        else:
            what = partial or f"{names[0]} was not found"
            raise BackendUnavailableError(
                f"{what}: give its folder with --include, or install NVIDIA's cuDNN and CUDA packages"
            )
    return found


def compile_flags(headers: Sequence[Path] = ()) -> list[str]:
    """Return the compiler flags for `ucudnn.hpp` and, if they are in wheels, for cuDNN's headers."""
    wheel = [f"-I{folder}" for folder in wheel_folders("cudnn", "include") if not headers]
    return [f"-I{INCLUDE}", *(f"-I{folder}" for folder in headers), *wheel]


def link_flags(folder: Path) -> list[str]:
    """Return the linker flags for the library, and for cuDNN if it is in a wheel, under the name that -lcudnn finds.

    Raises:
        BackendUnavailableError: if the folder cannot be written.
    """
    flags = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lucudnn"]
    for libraries in wheel_folders("cudnn", "lib"):
        if (libraries / "libcudnn.so.9").exists():
            _link(folder / "libcudnn.so", libraries / "libcudnn.so.9")
        flags += [f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}"]
    return flags


def _link(link: Path, target: Path) -> None:
    """Make a link, or change one to an earlier wheel. Another libcudnn.so is the user's, and -lcudnn finds that one."""
    before = link.readlink() if link.is_symlink() else None
    if before == target or (before is None and link.exists()) or (before and before.parts[-3:] != target.parts[-3:]):
        return
    made = link.with_name(f".{token_hex(8)}.so")
    try:
        made.symlink_to(target)
        made.replace(link)  # another process may do the same
    except OSError as error:
        raise BackendUnavailableError(f"{error}: give --folder with a writable one") from error


def build(folder: Path, headers: Sequence[Path] = (), compiler: str | None = None) -> Path:
    """Return the library in a folder; it is compiled, unless it is there and has the same sources, Python and headers.

    A library that another user than root could have written is not taken, but compiled again.

    Folders of headers and the compiler of C++17 are searched for, unless they are given.

    Raises:
        BackendUnavailableError: if a compiler or headers are missing, if it cannot be compiled, if others can change
            what is in the folder, or if it has another library of this name.
    """
    library = folder / LIBRARY
    used = header_folders(headers)
    python = libpython()
    flags = [*_FLAGS, f"-I{INCLUDE}", *(f"-isystem{each}" for each in used)]
    flags += [f'-DUCUDNN_PYTHON="{sys.executable}"', f'-DUCUDNN_LIBPYTHON="{python or ""}"']
    digest = hashlib.sha256("\n".join(flags).encode())
    for file in sorted([*SOURCES.iterdir(), *INCLUDE.iterdir()]):
        digest.update(file.read_bytes())
    state = digest.hexdigest()
    if _is_built(library, state):
        return library
    chosen = find_compiler(compiler)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # programs of all users load a library of the system
        why = distrust(folder, folder)
        if why is not None:
            raise BackendUnavailableError(f"{why}; or give --folder with another one")
        with TemporaryDirectory(prefix="unfinished-", dir=folder, ignore_cleanup_errors=True) as alone:
            made = Path(alone) / LIBRARY  # so that no process loads an incomplete file
            _compile([chosen, *flags, f'-DUCUDNN_BUILD="{state}"'], made)
            made.chmod(made.stat().st_mode & 0o755)
            made.replace(library)
    except OSError as error:
        raise BackendUnavailableError(f"{error}: give --folder with a writable one") from error
    return library


def _is_built(library: Path, state: str) -> bool:
    """Whether a library was built from the same, by nobody whose code must not run here.

    Raises:
        BackendUnavailableError: if it is the library of something else.
    """
    try:
        content = library.read_bytes()
        is_trusted = distrust(library, library.parent) is None
    except FileNotFoundError:
        return False
    except OSError as error:
        raise BackendUnavailableError(f"{error}: give --folder with another one") from error
    if content and _MARK not in content:
        raise BackendUnavailableError(f"{library} is another library, and stays: give --folder with another one")
    return is_trusted and _MARK + state.encode() in content


def _compile(command: Sequence[str], made: Path) -> None:
    sources = [str(file) for file in sorted(SOURCES.glob("*.cpp"))]
    whole = [*command, *sources, "-o", str(made), "-ldl", "-pthread"]
    try:
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BackendUnavailableError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BackendUnavailableError(f"{' '.join(whole)} failed:\n{done.stderr}")


def find_compiler(given: str | None = None) -> str:
    """Return the C++ compiler: the given one, or the first one on the path.

    Raises:
        BackendUnavailableError: if there is none.
    """
    chosen = given or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if chosen is None:
        raise BackendUnavailableError(f"no C++ compiler: install one of {', '.join(_COMPILERS)}, or give --compiler")
    return chosen


def _toolkits() -> Iterable[Path]:
    return Path("/usr/local").glob("cuda-*/include")
