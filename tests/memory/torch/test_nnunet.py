"""Steps of nnU-Net: recorded by its own network and loss, they are what its training allocates, and patches fit."""

import json
from math import prod

import pytest

pytest.importorskip("nnunetv2")

from tests.support.nnunet import ARCHITECTURE, write_plans
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.reports import fits
from ucudnn.memory.reports.fits import BOUNDS, CONTEXT_BYTES, chosen_patch, largest_patches
from ucudnn.memory.reports.nnunet_plans import read_plans
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.nnunet import record_plans

pytestmark = [pytest.mark.extra, pytest.mark.slow]
RESIDUAL = ARCHITECTURE | {
    "network_class_name": "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet",
    "arch_kwargs": {key: value for key, value in ARCHITECTURE["arch_kwargs"].items() if key != "n_conv_per_stage"}
    | {"n_blocks_per_stage": [1, 2, 2], "n_conv_per_stage_decoder": [1, 1]},
}
REGIONS = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "ignore": 4}


def costs_of(graph):
    return device_costs(load_device("rtx-3090"), graph)


def peak(graph):
    return measure_liveness(graph, costs_of(graph)).peak_bytes


@pytest.mark.parametrize("changes", [{}, {"architecture": RESIDUAL, "labels": REGIONS}])
def test_each_mini_batch_of_a_record_is_the_record_of_that_mini_batch(tmp_path, changes):
    plans = read_plans(write_plans(tmp_path, **changes), "3d_fullres")
    every, alone = record_plans(plans, plans.patch, [2, 4, 6]), record_plans(plans, plans.patch, [4])
    assert every.with_batch(4).sizes == alone.sizes
    voxels = 16 * 32 * 32
    held = {s.name: size // voxels for s, size in zip(every.storages, every.sizes, strict=True) if "output" in s.name}
    outputs = plans.outputs * 2 * 2  # of two samples, in 16 bits, at full resolution
    assert held["output0"] == outputs
    inputs = sum(size for s, size in zip(every.storages, every.sizes, strict=True) if s.role is Role.INPUT)
    label_bytes = (plans.outputs + 1) if plans.regions else 2
    assert inputs == 2 * voxels * 4 + round(2 * voxels * label_bytes * (1 + 1 / 4))
    assert {each.dtype for each in every.operations if each.kind == "aten.convolution"} == {"float16"}
    kinds = {each.kind: each.dtype for each in every.operations}
    assert kinds["aten.sigmoid" if plans.regions else "aten._softmax"] in ("float32", "float16")
    assert kinds.get("aten.avg_pool3d", "float16") == "float16"


def test_the_largest_patch_fits_and_the_next_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(fits, "segmented_bytes", lambda *_: 0)  # a small patch is less than one segment
    plans = read_plans(write_plans(tmp_path, batch_size=1), "3d_fullres")
    record = {}

    def recorded(patch, batches):
        key = (patch, len(batches))
        return record[key] if key in record else record.setdefault(key, record_plans(plans, patch, batches))

    budget = int(1.3 * peak(recorded(plans.patch, [1])))
    found = largest_patches(plans, recorded, costs_of, budget + CONTEXT_BYTES)
    planned, *rows = found.rows
    assert planned.peak_bytes == peak(recorded(plans.patch, [1]))
    assert [row.patch for row in rows[:4]] == [plans.patch] * 4
    plain, *fitted = rows[4:]
    patches = plans.patches()
    assert peak(recorded(plain.patch, [1])) == plain.peak_bytes <= budget
    assert peak(recorded(patches[patches.index(plain.patch) + 1], [1])) > budget
    assert patches.index(fitted[-1].patch) > patches.index(plain.patch)
    for row, bound in zip(fitted, BOUNDS, strict=False):
        assert row.peak_bytes <= budget
        assert row.sample_ms <= bound * planned.sample_ms
    assert chosen_patch(found) == fitted[1]
    headings, cells = found.table()
    assert [len(row) for row in cells] == [len(headings)] * 9
    assert cells[0][-1] == "1.00"


def test_the_command_writes_plans_and_says_what_a_network_lacks(call, tmp_path):
    path = write_plans(tmp_path, batch_size=1)
    arguments = ("memory", "fits", str(path), "--configuration", "3d_fullres", "--budget", "1034MiB")
    status, out, error = call(*arguments, "--write", str(tmp_path / "larger.json"), "--json")
    assert status == 0, error
    rows = json.loads(out)["rows"]
    written = json.loads((tmp_path / "larger.json").read_text())["configurations"]["3d_fullres_fit"]
    assert written["patch_size"] == rows[7]["patch"]
    broken = ARCHITECTURE | {"arch_kwargs": ARCHITECTURE["arch_kwargs"] | {"n_conv_per_stage": [2]}}
    write_plans(tmp_path, architecture=broken)
    status, _, error = call(*arguments)
    assert status == 2
    assert "configurations.3d_fullres.architecture makes no network that trains" in error
    assert len([line for line in error.splitlines() if line.startswith("error")]) == 1
    write_plans(tmp_path, labels={"background": 0, "a": 1, "ignore": 2})
    assert "labels.ignore lets nnU-Net's loss read values" in call(*arguments)[2]


def test_a_divided_step_takes_a_larger_mini_batch(call, tmp_path):
    path = str(write_plans(tmp_path))
    arguments = ("memory", "fits", path, "--configuration", "3d_fullres", "--budget", "1030MiB", "--divide", "--json")
    status, out, error = call(*arguments)
    assert status == 0, error
    found = json.loads(out)
    assert max(row["peak_bytes"] for row in found["rows"]) <= found["budget_bytes"] == 6 * 2**20
    ways = [f"with fit, {cost}" for cost in ("at most 1.1 of the time", "at most 1.5 of the time", "at any time")]
    ways = ["as it is", *ways, *(way.replace("fit", "fit, divided") for way in ways)]
    assert [row["way"] for row in found["rows"]] == ["as planned", *ways, *ways]
    sizes = [prod(row["patch"]) * row["batch"] for row in found["rows"]]
    assert sizes[7] > sizes[4]
    assert sizes[14] >= sizes[11] > sizes[8]
