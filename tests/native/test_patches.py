"""The patches for Caffe change little. Caffe itself is not installed here; caffe_patches/check.sh is run by hand."""

import subprocess

import pytest

from tests.support.paths import ROOT

PATCHES = ROOT / "caffe_patches"


@pytest.mark.parametrize(
    ("name", "added", "removed"),
    [("caffe-1.0/handle.patch", 3, 3), ("caffe-master/handle.patch", 5, 5), ("caffe-1.0/port.patch", 1, 7)],
)
def test_patches_change_few_lines_and_the_handle_ones_name_only_the_type_and_the_header(name, added, removed):
    lines = (PATCHES / name).read_text().splitlines()
    changes = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    new, old = ([line[1:] for line in changes if line[0] == sign] for sign in "+-")
    assert (len(new), len(old), len(changes)) == (added, removed, added + removed)
    assert all(line.endswith("@@") for line in lines if line.startswith("@@"))  # and no text of Caffe follows
    if "handle" in name:
        text = "\n".join(old).replace("cudnnHandle_t", "UcudnnHandle_t").replace("<cudnn.h>", "<ucudnn.hpp>")
        assert new == text.split("\n")


def test_the_script_is_a_script():
    subprocess.run(["bash", "-n", PATCHES / "check.sh"], check=True)
    assert (PATCHES / "check.sh").stat().st_mode & 0o111
