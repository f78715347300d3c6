"""Plans files of nnU-Net: what they say, the patches that poolings allow, and one line for each that makes no sense."""

import json
from itertools import pairwise
from math import prod

import pytest

from tests.support.nnunet import ARCHITECTURE, CONFIGURATION, write_plans
from ucudnn.errors import InvalidNetworkError
from ucudnn.memory.reports.nnunet_plans import are_plans, read_plans

WHERE = "configurations.3d_fullres"


def test_patches_grow_where_they_cover_least_and_keep_to_the_strides(tmp_path):
    plans = read_plans(write_plans(tmp_path), "3d_fullres")
    assert (plans.patch, plans.batch, plans.steps) == ((16, 32, 32), 2, (2, 4, 4))
    patches = plans.patches()
    assert plans.patch in patches
    for smaller, larger in pairwise(patches):
        (axis,) = (axis for axis in range(3) if smaller[axis] != larger[axis])
        assert larger[axis] - smaller[axis] == plans.steps[axis]
        covered = [edge / most for edge, most in zip(smaller, plans.median, strict=True)]
        if prod(smaller) >= prod(plans.patch):
            assert covered[axis] == min(covered)
        else:  # of those that may shrink, this one covered most
            shares = zip(larger, plans.median, plans.steps, strict=True)
            assert larger[axis] / plans.median[axis] == max(
                edge / most for edge, most, step in shares if edge >= 5 * step
            )
    assert all(edge >= 4 * step for edge, step in zip(patches[0], plans.steps, strict=True))
    assert all(edge >= most for edge, most in zip(patches[-1], plans.median, strict=True))


def test_a_written_configuration_inherits_and_nothing_else_changes(tmp_path):
    path = write_plans(tmp_path, batch_dice=True)
    plans = read_plans(path, "3d_fullres")
    path.write_bytes(plans.with_sizes((20, 40, 40), 3))
    written = json.loads(path.read_text())
    added = written["configurations"].pop("3d_fullres_fit")
    assert written == plans.content
    assert added == {"inherits_from": "3d_fullres", "patch_size": [20, 40, 40], "batch_size": 3}
    again = read_plans(path, "3d_fullres_fit")
    assert (again.patch, again.batch, again.batch_dice) == ((20, 40, 40), 3, True)
    assert again.architecture == plans.architecture
    assert b"3d_fullres_fit_fit" not in again.with_sizes((16, 32, 32), 2)


@pytest.mark.parametrize(
    ("labels", "cascade", "channels", "outputs", "regions", "ignores"),
    [
        ({"background": 0, "a": 1, "b": 2}, False, 2, 3, False, False),
        ({"background": 0, "a": 1, "b": 2, "ignore": 3}, True, 4, 3, False, True),
        ({"background": 0, "whole": [1, 2, 3], "core": [2, 3], "c": 3}, True, 5, 3, True, False),
    ],
)
def test_labels_and_channels_are_those_of_the_data_set(tmp_path, labels, cascade, channels, outputs, regions, ignores):
    more = {"previous_stage": "3d_lowres"} if cascade else {}
    plans = read_plans(write_plans(tmp_path, labels=labels, channels=2, **more), "3d_fullres")
    assert (plans.channels, plans.outputs, plans.regions, plans.ignores) == (channels, outputs, regions, ignores)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch_size": [16, 32, "x"]}, f"{WHERE}.patch_size 'x' is no whole number"),
        ({"patch_size": [16, 32, 30]}, f"{WHERE}.patch_size [16, 32, 30] is no multiple of the strides, [2, 4, 4]"),
        ({"patch_size": [16]}, f"{WHERE}.patch_size: number of edges 1"),
        ({"batch_size": 0}, f"{WHERE}.batch_size 0 is no whole number"),
        ({"median_image_size_in_voxels": [20, float("nan"), 40]}, f"{WHERE}.median_image_size_in_voxels nan"),
        ({"inherits_from": "3d_fullres"}, f"{WHERE}.inherits_from '3d_fullres' goes round in a circle"),
        ({"inherits_from": "none"}, "configurations has no key 'none'"),
        ({"inherits_from": [1]}, f"{WHERE}.inherits_from [1] is no text"),
        ({"architecture": 7}, f"{WHERE}.architecture 7 is no object"),
        ({"architecture": ARCHITECTURE | {"network_class_name": "os.system"}}, "network_class_name 'os.system'"),
        ({"architecture": ARCHITECTURE | {"arch_kwargs": {}}}, f"{WHERE}.architecture.arch_kwargs {{}} is no object"),
        ({"architecture": ARCHITECTURE | {"_kw_requires_import": ["none"]}}, "arch_kwargs has no key 'none'"),
        ({"architecture": ARCHITECTURE | {"_kw_requires_import": ["n_stages"]}}, "arch_kwargs.n_stages 3 is no text"),
        ({"labels": {}}, "labels {} is no object with entries"),
        ({"labels": {"a": {}}}, "labels.a {} is no whole number"),
    ],
)
def test_what_makes_no_sense_is_one_line_that_names_the_key(tmp_path, changes, said):
    path = write_plans(tmp_path, **changes)
    with pytest.raises(InvalidNetworkError) as caught:
        read_plans(path, "3d_fullres")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted({*CONFIGURATION} - {"batch_dice"}))
def test_a_missing_key_is_named(tmp_path, key):
    path = write_plans(tmp_path)
    content = json.loads(path.read_text())
    del content["configurations"]["3d_fullres"][key]
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidNetworkError, match=f"3d_fullres has no key '{key}'"):
        read_plans(path, "3d_fullres")


def test_other_files_are_no_plans(tmp_path):
    path = write_plans(tmp_path)
    assert are_plans(path)
    with pytest.raises(InvalidNetworkError, match="give --configuration 3d_fullres"):
        read_plans(path, None)
    with pytest.raises(InvalidNetworkError, match="configuration '2d' is not there: give --configuration 3d_fullres"):
        read_plans(path, "2d")
    path.with_name("dataset.json").unlink()
    with pytest.raises(
        InvalidNetworkError, match=r"dataset\.json is not there: put the data set's own beside the plans"
    ):
        read_plans(path, "3d_fullres")
    write_plans(tmp_path)
    for text in ("[]", "{}", "{", "7"):
        path.write_text(text)
        assert not are_plans(path)
        with pytest.raises(InvalidNetworkError, match=r"plans\.json"):
            read_plans(path, "3d_fullres")
