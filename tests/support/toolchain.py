"""A C++ compiler with cuDNN's headers, and the environment of what it compiles."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import pytest

from tests.support.paths import NATIVE, ROOT, alone_in
from ucudnn.errors import BackendUnavailableError
from ucudnn.native import build

STAND_IN = NATIVE / "stand_in"


@dataclass
class Toolchain:
    """A compiler, headers, and what was compiled."""

    compiler: str
    headers: list
    folder: Path

    def compile(self, source, output, *flags):
        includes = [f"-I{build.INCLUDE}", *(f"-isystem{each}" for each in self.headers)]
        command = [self.compiler, "-std=c++17", "-O1", *includes, str(source), "-o", str(output), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return output

    def compile_once(self, source, name, *flags):
        """Compile a file in the folder, unless a process of this run has done so."""
        output = self.folder / name
        with alone_in(self.folder):
            return output if output.exists() else self.compile(source, output, *flags)


def open_toolchain(folder):
    """Return a compiler with cuDNN's headers, or skip where there is none."""
    if which("g++") is None:
        pytest.skip("no C++ compiler: install g++")
    try:
        headers = build.header_folders()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return Toolchain(which("g++"), headers, folder)


def environment(libraries):
    """Return variables with which a program finds the package, and stand-ins for CuPy and CUDA's driver."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("UCUDNN_", "PYTHON"))}
    paths = {"PYTHONPATH": f"{ROOT}:{STAND_IN}", "LD_LIBRARY_PATH": str(libraries)}
    return clean | paths | {"UCUDNN_DATABASE": "off"}
