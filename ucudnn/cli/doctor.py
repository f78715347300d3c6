"""`ucudnn doctor`: what this machine has for ucudnn, what is missing, and the line that installs it."""

import importlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import typer

from ucudnn.backends import open_backend
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.benchmarking.storage.store import OFF, default_path, open_database
from ucudnn.cli.help_text import CommandLine
from ucudnn.cli.options import BackendOption, DatabaseOption, JsonOption, settings_of
from ucudnn.errors import DatabaseError, UcudnnError
from ucudnn.native.build import find_compiler, header_folders
from ucudnn.reporting.report import text_table
from ucudnn.reporting.terminal import print_json, print_text
from ucudnn.settings import Settings, variables_set
from ucudnn.units import format_bytes, shortened

commands = CommandLine()


class PartState(Enum):
    """How a part is: there, not there and not needed for what is there, without a place to write, or broken."""

    OK = "ok"
    MISSING = "missing"
    SEALED = "not writable"
    BROKEN = "broken"


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found of one part."""

    part: str
    state: PartState
    text: str
    remedy: str = ""


@commands.command(short_help="Show what this machine has, and what is missing.")
def doctor(
    context: typer.Context, backend: BackendOption = None, database: DatabaseOption = None, as_json: JsonOption = False
) -> None:
    """Show what this machine has for ucudnn, what is missing, and the line that installs it.

    The exit status is 1 where a part is there and broken. A part that is missing is no error, nor is a database that
    cannot be written.
    """
    findings = examine(lambda: settings_of(context))
    if as_json:
        print_json({each.part: {**asdict(each), "state": each.state.value} for each in findings})
    else:
        print_text(as_text(findings))
    if any(each.state is PartState.BROKEN for each in findings):
        raise typer.Exit(1)


def examine(read: Callable[[], Settings]) -> list[Diagnosis]:
    """Return what there is of every part that ucudnn can use, in the order in which they build on each other.

    The settings say which backend, database and libcudnn are looked for. If they cannot be read, that is a finding, and
    the defaults count.
    """
    findings = [
        Diagnosis("Python", PartState.OK, f"{platform.python_version()} in {sys.executable}, {platform.platform()}"),
        Diagnosis("ucudnn", PartState.OK, f"{version('ucudnn')} in {Path(__file__).parent.parent}"),
    ]
    try:
        settings = read()
    except UcudnnError as error:
        findings.append(Diagnosis("settings", PartState.BROKEN, str(error), "correct this value, or leave it out"))
        settings = Settings()
    else:
        given = ", ".join(f"{variable}={value}" for variable, value in variables_set().items())
        findings += [Diagnosis("settings", PartState.OK, given)] if given else []
    findings += [
        _cudnn(settings.cudnn_library),
        _module("CuPy", "cupy", "Handle and the command line need it for GPUs", "cuda13", _cupy),
        _module("PyTorch", "torch", "`ucudnn.torch` and `ucudnn memory record` need it", "torch", _pytorch),
        _backend(settings),
        _module("HiGHS", "highspy", "workspace division needs it", "", _version),
        _module("matplotlib", "matplotlib", "pictures need it", "plot", _version),
        _compiler(),
        _database(settings.database),
    ]
    return findings


def as_text(findings: list[Diagnosis]) -> str:
    """Return findings as lines for people: state, part, what was found; a remedy has a line of its own."""
    rows = []
    for each in findings:
        rows.append((each.state.value, each.part, each.text))
        if each.remedy:
            rows.append(("", "", f"to do: {each.remedy}"))
    return "\n".join(text_table(rows))


def _cudnn(path: str | None) -> Diagnosis:
    try:
        library = Library(path)
    except UcudnnError as error:
        state = PartState.BROKEN if path else PartState.MISSING
        return Diagnosis("cuDNN", state, str(error), "" if path else "pip install 'ucudnn[cuda13]', or cuda12")
    return Diagnosis("cuDNN", PartState.OK, f"{library.version_text} in {library.path}")


def _module(part: str, name: str, use: str, extra: str, describe: Callable[[Any], str]) -> Diagnosis:
    """Import a package and describe it. A package that is there and cannot be imported is broken."""
    remedy = f"pip install 'ucudnn[{extra}]'" if extra else f"pip install {name}"
    try:
        return Diagnosis(part, PartState.OK, describe(importlib.import_module(name)))
    except ModuleNotFoundError as error:
        if error.name == name:
            return Diagnosis(part, PartState.MISSING, f"not installed; {use}", remedy)
        return Diagnosis(part, PartState.BROKEN, str(error), remedy)
    except Exception as error:  # noqa: BLE001 - a broken package raises anything, and the other parts still count
        return Diagnosis(part, PartState.BROKEN, f"{type(error).__name__}: {error}", remedy)


def _version(package: Any) -> str:
    try:
        return version(package.__name__)
    except PackageNotFoundError:  # a copy without metadata, as some distributions make them
        return "of an unknown version"


def _cupy(cupy: Any) -> str:
    return f"{cupy.__version__} for CUDA {cupy.cuda.get_local_runtime_version() / 1000:.1f}"


def _pytorch(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"{torch.__version__}, without CUDA"
    text = f"{torch.__version__} for CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    if not torch.cuda.is_available():
        return f"{text}, sees no GPU"
    free, total = torch.cuda.mem_get_info()
    return (
        f"{text}, {torch.cuda.get_device_name()} with {format_bytes(free)} of {format_bytes(total)} free,"
        f" {torch.cuda.device_count()} in all"
    )


def _backend(settings: Settings) -> Diagnosis:
    """Open the backend that commands and handles take, and say what it computes on."""
    try:
        backend = open_backend(settings.backend, cudnn_library=settings.cudnn_library)
    except UcudnnError as error:
        return Diagnosis(
            "backend", PartState.BROKEN, f"{settings.backend}: {error}", "choose another with UCUDNN_BACKEND"
        )
    conditions = ", ".join(f"{key} {value}" for key, value in backend.machine().items())
    return Diagnosis("backend", PartState.OK, f"{backend.name} ({conditions})" if conditions else backend.name)


def _compiler() -> Diagnosis:
    try:
        compiler = find_compiler(None)
        headers = ", ".join(map(str, header_folders()))
    except UcudnnError as error:
        return Diagnosis("C++", PartState.MISSING, f"{error}; only C++ programs need it")
    return Diagnosis("C++", PartState.OK, f"{compiler}, headers in {headers}")


def _database(path: str | None) -> Diagnosis:
    if path == OFF:
        return Diagnosis("database", PartState.OK, "off: measurements are not kept")
    try:
        file = default_path() if path is None else Path(path)
        file.stat()
        database = open_database(path, read_only=True)
        wrong = database.check()
        count = sum(each.measurements for each in database.machines())
    except DatabaseError as error:
        return Diagnosis("database", PartState.BROKEN, str(error))
    except FileNotFoundError:
        there = next(folder for folder in file.absolute().parents if folder.exists())
        if _is_writable(there):
            return Diagnosis("database", PartState.OK, f"{file} is not there yet; the first measurement makes it")
        return _sealed(
            f"{shortened(str(file))} cannot be made, because nothing can be written into {shortened(str(there))}"
        )
    except (OSError, ValueError) as error:  # a name that is too long, or one with a null character
        why = getattr(error, "strerror", None) or str(error)
        return Diagnosis("database", PartState.BROKEN, f"{shortened(str(file))} cannot be opened: {why}")
    if wrong:
        return Diagnosis("database", PartState.BROKEN, f"{file}: {wrong[0]}", "ucudnn cache check lists all damage")
    if not _is_writable(file) or not _is_writable(file.parent):
        return _sealed(f"{file} cannot be changed")
    return Diagnosis("database", PartState.OK, f"{file}, {format_bytes(file.stat().st_size)}, {count} measurements")


def _sealed(why: str) -> Diagnosis:
    text = f"{why}; programs go on, and measure again what it does not have"
    return Diagnosis("database", PartState.SEALED, text, "UCUDNN_DATABASE names another file, or off")


def _is_writable(path: Path) -> bool:
    mode = os.W_OK | (os.X_OK if path.is_dir() else 0)
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)
