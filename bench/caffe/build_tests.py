"""Builds Caffe's own convolution layer and its tests against UcudnnHandle_t, for the host or for a GPU.

    python -m bench.caffe.build_tests --caffe CHECKOUT [--folder build/caffe] [--cuda /usr/local/cuda] [--wheels DIR]

Caffe's sources come from a checkout, at the commit of Caffe 1.0, and are patched as `caffe_patches/` says. Only the
files that the tests need are compiled.

The command builds the program for GPUs, with nvcc, and prints its path. It needs no library of Caffe's where it runs,
only those of CUDA, cuBLAS, cuRAND and cuDNN. DIR has an unpacked wheel of cuBLAS and of cuRAND, if the toolkit lacks
them. For the host (`build_tests`), there is the stand-in for cuDNN and CUDA, and one line is not Caffe's: the launch of
an empty kernel, which waits for all streams of a group, becomes a call of the empty function.
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
from bench.tools.script import command_line, note, run_main
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
"""Files of Caffe that its convolution tests need, besides caffe.proto and what runs on a GPU."""

GPU_SOURCES = (
    *(f"src/caffe/layers/{name}.cu" for name in ("conv_layer", "cudnn_conv_layer")),
    *(f"src/caffe/util/{name}.cu" for name in ("im2col", "math_functions")),
)
"""Files of Caffe that nvcc compiles."""

_PROTO = "include/caffe/proto/caffe.pb.cc"
_PATCHES = tuple(ROOT / "caffe_patches" / "caffe-1.0" / f"{name}.patch" for name in ("handle", "port"))
_HOST = ROOT / "bench" / "caffe" / "host"
_STAND_IN = ROOT / "tests" / "native" / "stub_cudnn.cpp"
_FLAGS = ("-O1", "-w", "-DUSE_CUDNN", "-DNDEBUG", "-DGTEST_USE_OWN_TR1_TUPLE=1")
_CUDA_FLAGS = ("-std=c++17", "-arch=sm_90")
_STATIC = ("glog", "gflags", "protobuf", "boost_thread", "boost_system", "openblas", "unwind", "lzma")
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
    source = _sources(checkout, folder)
    libraries = folder.resolve() / "lib"
    headers = header_folders()
    build(libraries, headers)
    stand_in = libraries / "libcudnn.so.9"
    system = [f"-isystem{each}" for each in headers]
    _make(stand_in, [_STAND_IN], ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", *system])
    driver = libraries / "libcuda.so.1"
    if not driver.is_symlink():
        driver.symlink_to(stand_in)
    files = [source / name for name in SOURCES]
    files += [source / "src/caffe/layers/cudnn_conv_layer_gpu.cpp", source / _PROTO, _HOST / "runtime.cpp"]
    objects = _objects(source, files, "objects", [f"-I{_HOST}", *system])
    return TestProgram(_link(source, libraries, objects), libraries)


def build_for_gpu(checkout: Path, folder: Path, cuda: Path, wheels: Path | None) -> Path:
    """Build the program of the tests for GPUs; return it.

    Args:
        checkout: a Git repository of Caffe that has the commit of Caffe 1.0.
        folder: folder for sources and programs.
        cuda: folder of the CUDA toolkit.
        wheels: folder with include/ and lib/ of cuBLAS and cuRAND; None if the toolkit has them.

    Raises:
        BackendUnavailableError: as build_tests.
    """
    source = _sources(checkout, folder)
    cudnn = next((each for each in header_folders() if (each / "cudnn.h").exists()), None)
    own = [wheels / "include"] if wheels else []
    includes = [cuda / "include", cuda / "include" / "cccl", *own, *([cudnn] if cudnn else [])]
    system = [f"-I{each}" for each in includes]
    files = [source / name for name in (*SOURCES, *GPU_SOURCES, _PROTO)]
    objects = _objects(source, files, "gpu_objects", system)
    # No other libcudnn may lie beside the library that is linked.
    libraries = folder.resolve() / "link"
    build(libraries)
    program = source.parent / "convolution_tests_gpu"
    folders = [cuda / "lib64", *([wheels / "lib"] if wheels else [])]
    linked = [f"-L{each}" for each in (libraries, *folders)] + [f"-Wl,-rpath-link,{each}" for each in folders]
    linked += [f"-L{cudnn.parent / 'lib'}"] if cudnn else []
    shared = ["-lucudnn", "-l:libcudnn.so.9", "-lcudart", "-l:libcublas.so.13", "-l:libcurand.so.10"]
    static = [f"-l:lib{each}.a" for each in _STATIC]
    options = [*linked, *shared, "-Wl,--allow-shlib-undefined", *static, "-lz", "-lpthread", "-ldl", "-no-pie", "-s"]
    _make(program, objects, options)
    return program


def _sources(checkout: Path, folder: Path) -> Path:
    """Return the folder of Caffe's patched sources."""
    for tool in ("git", "g++", "protoc"):
        if shutil.which(tool) is None:
            raise BackendUnavailableError(f"{tool} is missing: caffe_patches/README.md names the packages")
    folder.mkdir(parents=True, exist_ok=True)
    source = folder.resolve() / "source"
    if not source.exists():
        _take(checkout, source)
    return source


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


def _objects(source: Path, files: Sequence[Path], folder: str, first: Sequence[str]) -> list[Path]:
    """Compile files into a folder beside the sources; `first` are the first folders of headers."""
    blas = next((each for each in map(_OPENBLAS.format, ("x86_64", "aarch64")) if Path(each).exists()), "/usr/include")
    includes = [*first, *(f"-I{each}" for each in (source / "include", source / "src", INCLUDE, blas))]
    objects = []
    for file in files:
        objects.append(source.parent / folder / f"{file.name}.o")
        is_cuda = file.suffix == ".cu"
        options = [*_FLAGS, *(_CUDA_FLAGS if is_cuda else ("-std=c++14",)), *includes, "-c"]
        used = [*_HOST.iterdir(), *INCLUDE.iterdir()]
        _make(objects[-1], [file], options, uses=used, compiler="nvcc" if is_cuda else "g++")
    return objects


def _link(source: Path, libraries: Path, objects: Sequence[Path]) -> Path:
    """Link the tests. Functions of Caffe's GPU side that are missing end a test that calls them."""
    program = source.parent / "convolution_tests"
    own = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lucudnn", "-l:libcudnn.so.9"]
    options = [*own, *(f"-l{each}" for each in _LIBRARIES), "-no-pie", "-Wl,--unresolved-symbols=ignore-all"]
    _make(program, objects, options)
    return program


def _make(
    target: Path, sources: Sequence[Path], options: Sequence[str], uses: Sequence[Path] = (), compiler: str = "g++"
) -> None:
    """Run the compiler unless the target is newer than its sources."""
    if target.exists() and all(each.stat().st_mtime < target.stat().st_mtime for each in (*sources, *uses)):
        return
    note(f"compiling {target.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    _run([compiler, *map(str, sources), "-o", str(target), *options])


def _run(command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    except FileNotFoundError as error:
        raise BackendUnavailableError(f"{command[0]} is missing") from error
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise BackendUnavailableError(f"{' '.join(command[:2])} ... failed:\n{last}")


def main() -> None:
    """Build the program for GPUs, and print its path."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("--caffe", type=Path, required=True, help="a Git repository of Caffe")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "caffe", help="folder for what is built")
    parser.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda"), help="the CUDA toolkit (%(default)s)")
    parser.add_argument("--wheels", type=Path, help="folder with include/ and lib/ of cuBLAS and cuRAND")
    options = parser.parse_args()
    print(build_for_gpu(options.caffe, options.folder, options.cuda, options.wheels))


if __name__ == "__main__":
    run_main(main)
