"""Builds Caffe's own convolution layer and its tests against UcudnnHandle_t, with the stand-in for cuDNN and CUDA.

Caffe's sources come from a checkout, at the commit of Caffe 1.0, and are patched as `caffe_patches/` says. Only the
files that the tests need are compiled. One line is not Caffe's: the launch of an empty kernel, which waits for all
streams of a group, becomes a call of the empty function.
"""

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from bench.tools.results import ROOT
from bench.tools.script import note
from ucudnn.errors import BackendUnavailableError
from ucudnn.native.build import INCLUDE, build, header_folders

COMMIT = "eeebdab16155d34ff8f5f42137da7df4d1c7eab0"
"""Caffe 1.0."""

SOURCES = (
    *(f"src/caffe/{name}.cpp" for name in ("blob", "common", "layer", "syncedmem")),
    *(f"src/caffe/util/{name}.cpp" for name in ("cudnn", "im2col", "math_functions")),
    *(f"src/caffe/layers/{name}.cpp" for name in ("base_conv_layer", "conv_layer", "cudnn_conv_layer")),
    *(f"src/caffe/test/{name}.cpp" for name in ("test_caffe_main", "test_convolution_layer")),
    "src/gtest/gtest-all.cpp",
)
"""Files of Caffe that its convolution tests need, besides cudnn_conv_layer.cu and caffe.proto."""

_PATCHES = tuple(ROOT / "caffe_patches" / "caffe-1.0" / f"{name}.patch" for name in ("handle", "port"))
_HOST = ROOT / "bench" / "caffe" / "host"
_STAND_IN = ROOT / "tests" / "native" / "stub_cudnn.cpp"
_FLAGS = ("-std=c++14", "-O1", "-w", "-DUSE_CUDNN", "-DNDEBUG", "-DGTEST_USE_OWN_TR1_TUPLE=1")
_LIBRARIES = ("protobuf", "glog", "gflags", "boost_system", "boost_thread", "openblas", "pthread")
_OPENBLAS = "/usr/include/{}-linux-gnu/openblas-pthread"


@dataclass(frozen=True, slots=True)
class TestProgram:
    """Caffe's tests, and what they run with.

    Attributes:
        program: the program of the tests.
        libraries: folder of libucudnn.so and of the stand-ins for cuDNN and for CUDA's driver.
    """

    program: Path
    libraries: Path


def build_tests(checkout: Path, folder: Path) -> TestProgram:
    """Build the tests in a folder. What is newer than its sources is not built again.

    Args:
        checkout: a Git repository of Caffe that has the commit of Caffe 1.0.
        folder: folder for sources and programs.

    Raises:
        BackendUnavailableError: if a tool or a header is missing, or something does not compile; the message has the
            last lines of the compiler.
    """
    for tool in ("git", "g++", "protoc"):
        if shutil.which(tool) is None:
            raise BackendUnavailableError(f"{tool} is missing: caffe_patches/README.md names the packages")
    folder.mkdir(parents=True, exist_ok=True)
    source = folder.resolve() / "source"
    if not source.exists():
        _take(checkout, source)
    libraries = folder.resolve() / "lib"
    headers = header_folders()
    build(libraries, headers)
    stand_in = libraries / "libcudnn.so.9"
    system = [f"-isystem{each}" for each in headers]
    _make(stand_in, [_STAND_IN], ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", *system])
    driver = libraries / "libcuda.so.1"
    if not driver.is_symlink():
        driver.symlink_to(stand_in)
    return TestProgram(_link(source, libraries, _objects(source, system)), libraries)


def _take(checkout: Path, source: Path) -> None:
    """Copy Caffe's sources from a repository, and patch them."""
    unfinished = source.with_name(f"{source.name}.{os.getpid()}")
    archive = subprocess.run(["git", "-C", checkout, "archive", COMMIT], capture_output=True, check=False)
    if archive.returncode:
        raise BackendUnavailableError(f"{checkout}: {archive.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as packed:
        packed.extractall(unfinished, filter="data")
    # Git must not take the folder for a part of this repository.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(unfinished.parent)}
    _run(["git", "apply", "--unidiff-zero", *map(str, _PATCHES)], cwd=unfinished, env=outside)
    kernel = (unfinished / "src/caffe/layers/cudnn_conv_layer.cu").read_text()
    called, count = re.subn(r"<<<1, 1>>>", "", kernel)
    if count != 2 or "<<<" in called:
        raise BackendUnavailableError(f"{checkout}: cudnn_conv_layer.cu is not that of Caffe 1.0")
    (unfinished / "src/caffe/layers/cudnn_conv_layer_gpu.cpp").write_text(called)
    generated = unfinished / "include" / "caffe" / "proto"
    generated.mkdir(parents=True, exist_ok=True)
    proto = unfinished / "src" / "caffe" / "proto"
    _run(["protoc", f"--proto_path={proto}", f"--cpp_out={generated}", str(proto / "caffe.proto")])
    unfinished.rename(source)


def _objects(source: Path, system: Sequence[str]) -> list[Path]:
    """Compile Caffe's files, and what stands in for the rest of the CUDA runtime."""
    blas = next((each for each in map(_OPENBLAS.format, ("x86_64", "aarch64")) if Path(each).exists()), "/usr/include")
    includes = [f"-I{each}" for each in (_HOST, source / "include", source / "src", INCLUDE, blas)]
    files = [source / name for name in SOURCES]
    files += [source / "src/caffe/layers/cudnn_conv_layer_gpu.cpp", source / "include/caffe/proto/caffe.pb.cc"]
    files.append(_HOST / "runtime.cpp")
    objects = []
    for file in files:
        objects.append(source.parent / "objects" / f"{file.stem}.o")
        _make(objects[-1], [file], [*_FLAGS, *includes, *system, "-c"], uses=[*_HOST.iterdir(), *INCLUDE.iterdir()])
    return objects


def _link(source: Path, libraries: Path, objects: Sequence[Path]) -> Path:
    """Link the tests. Functions of Caffe's GPU side that are missing end a test that calls them."""
    program = source.parent / "convolution_tests"
    own = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lucudnn", "-l:libcudnn.so.9"]
    options = [*own, *(f"-l{each}" for each in _LIBRARIES), "-no-pie", "-Wl,--unresolved-symbols=ignore-all"]
    _make(program, objects, options)
    return program


def _make(target: Path, sources: Sequence[Path], options: Sequence[str], uses: Sequence[Path] = ()) -> None:
    """Run the compiler unless the target is newer than its sources."""
    if target.exists() and all(each.stat().st_mtime < target.stat().st_mtime for each in (*sources, *uses)):
        return
    note(f"compiling {target.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    _run(["g++", *map(str, sources), "-o", str(target), *options])


def _run(command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise BackendUnavailableError(f"{' '.join(command[:2])} ... failed:\n{last}")
