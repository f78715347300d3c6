"""The patches for Caffe change little. Caffe itself is not installed here; caffe_patches/check.sh is run by hand."""

import subprocess

import pytest

from tests.support.paths import ROOT

PATCHES = ROOT / "caffe_patches"


@pytest.mark.parametrize(
    ("name", "added", "removed"),
    [("caffe-1.0/handle.patch", 3, 3), ("caffe-master/handle.patch", 5, 5), ("caffe-1.0/port.patch", 1, 7)],
)
def test_patches_change_few_lines_and_repeat_none(name, added, removed):
    lines = (PATCHES / name).read_text().splitlines()
    changes = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    assert [line[0] for line in changes].count("+") == added
    assert [line[0] for line in changes].count("-") == removed
    assert len(changes) == added + removed
    assert all(line.endswith("@@") for line in lines if line.startswith("@@"))  # and no text of Caffe follows


def test_the_handle_patch_only_names_the_type_and_the_header():
    for version in ("caffe-1.0", "caffe-master"):
        lines = (PATCHES / version / "handle.patch").read_text().splitlines()
        old = [line[1:] for line in lines if line.startswith("-") and not line.startswith("---")]
        new = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
        renamed = [line.replace("cudnnHandle_t", "UcudnnHandle_t").replace("<cudnn.h>", "<ucudnn.hpp>") for line in old]
        assert new == renamed


def test_the_script_is_a_script():
    subprocess.run(["bash", "-n", PATCHES / "check.sh"], check=True)
    assert (PATCHES / "check.sh").stat().st_mode & 0o111
