"""CUDA graphs of C++ programs on a GPU: the program that tests/native/test_captures.py runs on the stand-in."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import NATIVE, ROOT
from tests.support.toolchain import open_toolchain
from ucudnn.native import build

RUNTIME = "libcudart.so"
WD = {"UCUDNN_TOTAL_WORKSPACE_SIZE": "64KiB"}


def runtime():
    """Return the library of CUDA's runtime beside the headers that are used."""
    for headers in build.header_folders():
        for folder in (headers.parent / "lib", headers.parent / "lib64"):
            for library in sorted(folder.glob(f"{RUNTIME}*")):
                return library
    for library in sorted(Path("/usr/local/cuda/lib64").glob(f"{RUNTIME}*")):
        return library
    return pytest.skip(f"no {RUNTIME}")


@pytest.fixture(scope="module")
def captured(cupy, tmp_path_factory):
    """Return a function that runs the program on the GPU, and returns what it says on stderr."""
    folder = tmp_path_factory.mktemp("native")
    toolchain = open_toolchain(folder)
    build.build(folder, toolchain.headers)
    cudart = runtime()
    flags = [*build.link_flags(folder), f"-L{folder}", "-l:libcudnn.so", str(cudart), f"-Wl,-rpath,{cudart.parent}"]
    program = toolchain.compile(NATIVE / "captures.cpp", folder / "captures", "-DON_GPU", *flags)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UCUDNN_")}
    paths = {"PYTHONPATH": str(ROOT), "UCUDNN_DATABASE": str(folder / "measurements.db")}

    def go(what, env):
        done = subprocess.run(
            [program, what], env=clean | paths | env, capture_output=True, text=True, check=False, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr
        return done.stderr

    return go


@pytest.mark.parametrize("env", [{}, WD], ids=["WR", "WD"])
@pytest.mark.parametrize(
    "what", ["many scalings", "another limit", "another stream", "another stream in the capture", "another division"]
)
def test_a_graph_and_other_calls_do_no_harm_to_each_other(captured, what, env):
    assert "plain" not in captured(what, env)


@pytest.mark.parametrize("env", [{}, WD], ids=["WR", "WD"])
def test_nothing_is_planned_in_a_capture(captured, env):
    assert captured("unplanned", env).count("is captured in a CUDA graph before it was planned") == 1
