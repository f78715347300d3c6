"""Plans that nnU-Net's own planners make of public data sets, and what is predicted of them on a CPU. Not a script.

A data set is known by its median shape and spacing, channels and labels. No image is read.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.tools.script import note
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.reports.fits import CONTEXT_BYTES, largest_patches
from ucudnn.memory.reports.nnunet_plans import NnunetPlans, Patch, read_plans
from ucudnn.memory.simulation.simulator import simulate

MORE = 1.5  # voxels of a patch with fit, in multiples of those of plain training's largest patch
PLAIN, NEXT, FIT, LARGEST = "plain", "plain, next larger", "fit", "fit, largest"
_DEVICE = "h200"
_PLANNERS = "nnunetv2.experiment_planning.experiment_planners"
_RESIDUAL = f"{_PLANNERS}.residual_unets.residual_encoder_unet_planners:nnUNetPlannerResEnc"
_KEPT = ("patch_size", "batch_size", "median_image_size_in_voxels", "spacing", "architecture", "batch_dice")


@dataclass(frozen=True)
class DataSet:
    """What a planner knows of a data set: the median image after resampling, and how many there are."""

    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    images: int
    channels: tuple[str, ...]
    labels: dict[str, Any]


DATA_SETS = {
    "liver": DataSet((482, 512, 512), (1.0, 0.7676, 0.7676), 131, ("CT",), {"background": 0, "liver": 1, "tumor": 2}),
    "brain": DataSet(
        (138, 169, 138),
        (1.0, 1.0, 1.0),
        484,
        ("FLAIR", "T1w", "T1gd", "T2w"),
        {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3},
    ),
    "pancreas": DataSet(
        (93, 512, 512), (2.5, 0.8027, 0.8027), 281, ("CT",), {"background": 0, "pancreas": 1, "tumor": 2}
    ),
}
"""Three of the Medical Segmentation Decathlon; the brain's labels are regions, as in BraTS."""
PLANNERS = {
    "plain": f"{_PLANNERS}.default_experiment_planner:ExperimentPlanner",
    "M": f"{_RESIDUAL}M",
    "L": f"{_RESIDUAL}L",
}
_EACH = (("plain", "3d_fullres"), ("L", "3d_fullres"), ("M", "3d_fullres"), ("plain", "2d"))
PLANS = (*((name, *each) for name in ("liver", "brain") for each in _EACH), ("pancreas", "plain", "3d_fullres"))
FITTED = ("liver plain 3d_fullres", "pancreas plain 3d_fullres")
"""Plans whose largest patches are looked for; those of the brain grow no larger than the image."""


def planned(name: str, kind: str, configuration: str, *, small: bool) -> dict[str, Any]:
    """Return a plan that nnU-Net makes, its data set's file, and its own estimate of the plan's memory in bytes."""
    data, number = DATA_SETS[name], f"Dataset001_{name}"
    shape = [*(min(each, 16) for each in data.shape)] if small else [*data.shape]
    content: dict[str, Any] = {
        "channel_names": {str(index): channel for index, channel in enumerate(data.channels)},
        "labels": data.labels,
        "numTraining": 2 if small else data.images,
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "SimpleITKIO",
        "dataset": {"0": {"images": ["0.nii.gz"], "label": "0.nii.gz"}},  # named, not read
    }
    found = {"shapes_after_crop": [shape], "spacings": [data.spacing], "median_relative_size_after_cropping": 1.0}
    found["foreground_intensity_properties_per_channel"] = {}
    module, _, attribute = PLANNERS[kind].partition(":")
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        for place in ("nnUNet_raw", "nnUNet_preprocessed"):
            os.environ[place] = f"{folder}/{place}"
            Path(folder, place, number).mkdir(parents=True)
        Path(folder, "nnUNet_raw", number, "dataset.json").write_text(json.dumps(content))
        Path(folder, "nnUNet_preprocessed", number, "dataset_fingerprint.json").write_text(json.dumps(found))
        planner = getattr(import_module(module), attribute)(number)
        planner.plan_experiment()
        made = json.loads(Path(folder, "nnUNet_preprocessed", number, f"{planner.plans_identifier}.json").read_text())
        own = {key: made["configurations"][configuration][key] for key in _KEPT}
        estimate = _estimate(planner, own, len(data.channels), len(data.labels))
    if small:
        own["median_image_size_in_voxels"] = [4 * each for each in own["patch_size"]]  # so that patches can grow
    known = {key: content[key] for key in ("channel_names", "labels")}
    return {"plans": {"configurations": {configuration: own}}, "dataset": known, "nnunet_bytes": estimate}


def _estimate(planner: Any, own: dict[str, Any], channels: int, labels: int) -> int:
    """Return what nnU-Net's planner takes a plan's memory for: its features beside those of a network of known use."""
    architecture, flat = own["architecture"], len(own["patch_size"]) == 2
    keys = ("network_class_name", "arch_kwargs", "_kw_requires_import")
    features = planner.static_estimate_VRAM_usage(own["patch_size"], channels, labels, *(architecture[k] for k in keys))
    known = planner.UNet_reference_val_2d if flat else planner.UNet_reference_val_3d
    batch = planner.UNet_reference_val_corresp_bs_2d if flat else planner.UNet_reference_val_corresp_bs_3d
    return int(features / known * own["batch_size"] / batch * planner.UNet_reference_val_corresp_GB * 2**30)


def opened(case: Mapping[str, Any]) -> NnunetPlans:
    """Return the plan of a case, as commands read it."""
    with TemporaryDirectory() as folder:
        for name in ("plans", "dataset"):
            Path(folder, f"{name}.json").write_text(json.dumps(case[name]))
        return read_plans(Path(folder, "plans.json"), next(iter(case["plans"]["configurations"])))


def predicted(plans: NnunetPlans) -> dict[str, Any]:
    """Return what `ucudnn memory fits` says of a plan as nnU-Net trains it."""
    from ucudnn.memory.torch.nnunet import record_plans  # which needs nnU-Net

    graph = record_plans(plans, plans.patch, [plans.batch])
    costs = device_costs(load_device(_DEVICE), graph)
    done = simulate(make_plan(graph, costs, None, "stock"), costs)
    found = {"peak_bytes": done.peak_bytes, "step_ms": done.step_ms, "scratch_bytes": max(costs.scratch_bytes)}
    return {**found, "operations": len(graph.operations)}


def fits(plans: NnunetPlans, budget: int) -> list[dict[str, Any]]:
    """Return patches to train within a budget, with their peaks, and times of a voxel in multiples of the plan's own.

    They are the largest plain one that `ucudnn memory fits` names, the next one, the smallest one with at least `MORE`
    times the voxels, and the largest one with `fit` within the shorter bound of time.
    """
    from ucudnn.memory.torch.nnunet import plans_program, record_plans

    costs_of = partial(device_costs, load_device(_DEVICE))
    rows = largest_patches(plans, partial(record_plans, plans), costs_of, budget, note).rows
    plain, bounded, *_ = rows[(len(rows) + 1) // 2 :]
    patches = plans.patches()
    beyond = patches[patches.index(plain.patch) + 1]
    larger = next(each for each in patches if prod(each) >= MORE * prod(plain.patch))

    def row(way: str, patch: Patch, peak: int, ms: float) -> dict[str, Any]:
        relative = ms / plans.batch / prod(patch) / rows[0].sample_ms
        return {"way": way, "patch": patch, "peak_bytes": peak, "time": round(relative, 4)}

    graph = record_plans(plans, beyond, [plans.batch])
    after = simulate(make_plan(graph, costs_of(graph), None, "stock"), costs_of(graph))
    fitted = plans_program(plans, larger, plans.batch).graph
    done = simulate(make_plan(fitted, costs_of(fitted), budget - CONTEXT_BYTES, "auto"), costs_of(fitted))
    return [
        row(PLAIN, plain.patch, plain.peak_bytes, plain.time_ms),
        row(NEXT, beyond, after.peak_bytes, after.step_ms),
        row(FIT, larger, done.peak_bytes, done.step_ms),
        row(LARGEST, bounded.patch, bounded.peak_bytes, bounded.time_ms),
    ]
