"""The handbook's lines for a C++ build compile and link its example, on a stand-in for cuDNN."""

import os
import subprocess

import pytest

from tests.support.documents import HANDBOOK, Reader, at, fenced

(EXAMPLE,) = (block.text for block in fenced("cpp-caffe", HANDBOOK["cpp-caffe"]) if block.kind == "cpp")


@pytest.mark.parametrize("page", at("native"))
def test_the_commands_of_a_page_build_its_example(page, libraries, toolchain, tmp_path):
    (tmp_path / "program.cpp").write_text(
        EXAMPLE + "int main() { return cudnnCreate(&handle) || cudnnDestroy(handle); }\n"
    )
    found = tmp_path / "libraries"  # as a machine with CUDA has them
    found.mkdir()
    (found / "libcudnn.so").symlink_to(libraries / "libcudnn.so.9")
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    subprocess.run([toolchain.compiler, "-shared", empty, "-o", found / "libcudart.so"], check=True)
    headers = os.pathsep.join(map(str, toolchain.headers))
    reader = Reader(tmp_path, LIBRARY_PATH=str(found), CPATH=headers, XDG_CACHE_HOME=str(tmp_path))
    for command in at("native")[page]:
        reader.types(command.runs)
    assert os.access(tmp_path / "program", os.X_OK)
