"""The cost of UcudnnHandle_t on the CPU for a C++ program: answers from its cache, dispatch, and cuDNN's share in them.

    python -m bench.native.cache

Caffe asks for six algorithms and workspace sizes of each convolution in every iteration. No GPU is needed, because a
stand-in for cuDNN (tests/native) returns at once. The larger part of an answer is the time in which cuDNN reads four
descriptors; the script measures it alone if the real cuDNN is installed.
"""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.tools.results import ROOT, cpu_conditions, json_text, save
from bench.tools.script import command_line, out_of, run_main
from ucudnn.native import build

HERE = Path(__file__).parent
STUB = ROOT / "tests" / "native"


def compiled(headers: list[Path], source: Path, output: Path, *flags: str) -> Path:
    """Compile a program or a library."""
    includes = [f"-I{build.INCLUDE}", f"-I{build.SOURCES}", *(f"-isystem{each}" for each in headers)]
    subprocess.run(["c++", "-std=c++17", "-O2", *includes, source, "-o", output, *flags], check=True)
    return output


def printed(program: Path, **environment: str) -> dict[str, float]:
    """Run a program and return the JSON that it prints."""
    done = subprocess.run([program], env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Compile the programs, run them and write the results."""
    arguments = command_line(__doc__, __spec__.name, "native/cache.json").parse_args()
    headers = build.header_folders()
    with TemporaryDirectory() as name:
        folder = Path(name)
        stub = folder / "libcudnn.so.9"
        compiled(headers, STUB / "stub_cudnn.cpp", stub, "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9")
        (folder / "libcuda.so.1").symlink_to(stub)  # the stand-in also replaces the driver
        build.build(folder, headers)
        links = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lucudnn", "-l:libcudnn.so.9"]
        program = compiled(headers, HERE / "cache.cpp", folder / "cache", *links)
        path = f"{ROOT}:{STUB / 'stand_in'}"
        found: dict[str, object] = {
            "conditions": cpu_conditions(),
            "handle, microseconds": printed(program, PYTHONPATH=path, LD_LIBRARY_PATH=name, UCUDNN_DATABASE="off"),
        }
        spec = find_spec("nvidia.cudnn")
        for root in (spec.submodule_search_locations or ()) if spec else ():
            libraries = Path(root) / "lib"
            links = [str(build.SOURCES / "question.cpp"), f"-L{libraries}", "-l:libcudnn.so.9"]
            program = compiled(headers, HERE / "question.cpp", folder / "question", *links)
            wheels = ":".join(str(each) for each in sorted(Path(root).parent.glob("*/lib")))
            found["cuDNN's descriptors, microseconds"] = printed(program, LD_LIBRARY_PATH=wheels)
    save(out_of(arguments), found)
    print(json_text(found))


if __name__ == "__main__":
    run_main(main)
