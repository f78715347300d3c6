"""Tests of device profiles: every figure has a source, and published times are met that did not calibrate them."""

import json
from collections import defaultdict
from dataclasses import replace
from math import exp, log
from statistics import median

import pytest

from ucudnn.errors import ProfileError
from ucudnn.memory.devices.profile import load_device, shipped_devices
from ucudnn.memory.devices.roofline import convolution_front, device_costs
from ucudnn.memory.devices.specification import specified_device
from ucudnn.memory.step.graph import Affine
from ucudnn.memory.step.shipped import open_step
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation
from ucudnn.profiles.format import load_profile

FIGURES = {*("memory_bytes", "link", "flops_per_second", "bytes_per_second", "launch_ms", "matrix", "convolution")}
UNTESTED = ("a10g", "l4", "l40s", "rtx-3060")  # of which no published time of training was found
PUBLISHED = ("a10", "a100-40", "a100-80", "h100", "p100", "rtx-3090", "rtx-4090", "t4", "v100")
WITHIN = {
    "titan-x": 0.15,
    "gtx-970": 0.15,
    "h200": 0.3,
    **dict.fromkeys(PUBLISHED, 0.25),
}  # of published times of steps


def _varied(graph, layout="first", dtype="", math=""):
    """Return a step with convolutions of another layout, type or arithmetic; in 16 bits, all bytes are half as many."""
    changes = {"layout": Layout.NHWC} if layout == "last" else {}
    changes |= {"dtype": DataType(dtype)} if dtype else {}
    changes |= {"math": MathMode(math)} if math else {}
    operations = []
    for each in graph.operations:
        traffic = Affine(each.traffic.fixed // 2, each.traffic.per_sample // 2) if dtype else each.traffic
        problem = each.problem and replace(each.problem, **changes)
        operations.append(replace(each, problem=problem, traffic=traffic, dtype=dtype or each.dtype))
    return replace(graph, operations=tuple(operations))


def predicted_ms(profile, row):
    """Return what a profile says of a published time."""
    if "problem" in row:
        fields = {**row["problem"], "operation": Operation(row["problem"]["operation"])}
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return convolution_front(profile, ConvolutionProblem(**fields))[-1].time_ms
    graph = _varied(open_step(row["step"]).with_batch(row["batch"]), **row.get("variant", {}))
    times = device_costs(profile, graph, row["algorithms"]).time_ms
    pairs = zip(times, graph.operations, strict=True)
    return sum(time for time, operation in pairs if operation.phase.value in row["phases"])


def test_the_devices_of_the_papers_the_measured_one_and_common_ones_ship():
    assert {*shipped_devices()} == {"gtx-970", "h200", "m40", "titan-x", *PUBLISHED, *UNTESTED}


@pytest.mark.parametrize("name", shipped_devices())
@pytest.mark.parametrize("step", ["gpt2", "unet3d"])
def test_each_device_has_costs_for_steps_of_any_type(name, step):
    graph = open_step(step)
    times = [sum(device_costs(load_device(name), _varied(graph, dtype=kind)).time_ms) for kind in ("", "bfloat16")]
    assert 0 < times[1] <= times[0]


@pytest.mark.parametrize("name", shipped_devices())
def test_every_figure_has_its_source(name):
    profile = load_device(name)
    assert {*profile.sources} >= FIGURES
    assert all(profile.sources.values())
    assert all(row["source"] for row in profile.published)
    assert bool(profile.published) is (name not in UNTESTED)
    assert {"calibrates" in row for row in profile.published} in (set(), {True, False})


@pytest.mark.parametrize("name", [*WITHIN])
def test_steps_take_what_was_published(name):
    profile = load_device(name)
    ratios = [predicted_ms(profile, row) / row["time_ms"] for row in profile.published]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=WITHIN[name])


def test_convolutions_of_an_m40_take_what_was_published():
    profile = load_device("m40")
    tests = [row for row in profile.published if "calibrates" not in row]
    errors = [log(predicted_ms(profile, row) / row["time_ms"]) for row in tests]
    assert len(errors) > 20
    assert exp(sum(errors) / len(errors)) == pytest.approx(1.0, abs=0.15)
    assert max(map(abs, errors)) < log(2.5)


@pytest.mark.parametrize(
    ("name", "step", "batch", "published"),
    [("titan-x", "alexnet", 128, 231 / 80.96), ("gtx-970", "vgg16", 42, 1722 / 864), ("m40", "vgg16", 32, None)],
)
def test_algorithms_without_workspace_are_slower(name, step, batch, published):
    profile, graph = load_device(name), open_step(step).with_batch(batch)
    small, fast = (device_costs(profile, graph, choice) for choice in ("smallest", "fastest"))
    assert max(small.scratch_bytes) == 0
    assert max(fast.scratch_bytes) > 2**26
    ratio = sum(small.time_ms) / sum(fast.time_ms)
    assert ratio > 1.5
    if published:
        assert ratio == pytest.approx(published, rel=0.15)


def test_the_h200_takes_the_measured_algorithms():
    profile, graph = load_device("h200"), open_step("resnet50")
    names = {
        each.parts[0].algorithm for problem in graph.problems.values() for each in convolution_front(profile, problem)
    }
    assert "roofline" not in names
    unrecorded = next(iter(open_step("unet2d").problems.values()))
    slow, fast = convolution_front(profile, unrecorded)
    assert (slow.parts[0].algorithm, fast.parts[0].algorithm) == ("roofline", "copies")
    assert (slow.workspace_bytes, fast.workspace_bytes) == (0, unrecorded.x_bytes + unrecorded.y_bytes)
    assert slow.time_ms > fast.time_ms


@pytest.mark.parametrize(
    "change", [{"layout": Layout.NHWC}, {"kernel": (1, 1), "padding": (0, 0)}, {"math": MathMode.FMA}]
)
def test_only_tensor_cores_copy_and_only_where_channels_come_first_and_kernels_are_larger(change):
    problem = next(each for each in open_step("unet2d").problems.values() if each.stride == (1, 1))
    (only,) = convolution_front(load_device("rtx-3090"), replace(problem, **change))
    assert only.workspace_bytes == 0


def test_copies_of_x_and_y_are_what_the_fastest_measured_algorithms_take():
    measured = defaultdict(list)
    for recording in load_profile("h200").recordings.values():
        for problem, algorithms in recording.items():
            copied = problem.x_bytes + problem.y_bytes
            if copied > 2**26 and max(problem.kernel) > 1 and problem.math is MathMode.TF32 and problem.groups == 1:
                fastest = min(algorithms, key=lambda each: each.time_ms)
                key = problem.operation, problem.dtype, problem.layout.channels_last, len(problem.spatial)
                measured[key].append(fastest.algorithm.workspace_bytes / copied)
    assert len(measured) == 24
    for (_, _, last, _), shares in measured.items():
        assert median(shares) == pytest.approx(0 if last else 1, abs=0.09), shares


def test_products_of_float32_take_tf32_only_where_the_step_says_so():
    profile, graph = load_device("h200"), open_step("gpt2").with_batch(8)
    exact, fast = (
        device_costs(profile, replace(graph, conditions={**graph.conditions, "matmul": math})).time_ms
        for math in ("fma", "tf32")
    )
    slower = [operation for *times, operation in zip(exact, fast, graph.operations, strict=True) if times[0] > times[1]]
    assert {operation.kind for operation in slower} >= {"aten.mm", "aten.addmm"}
    assert all(operation.flops.at(8) for operation in slower)
    assert device_costs(profile, replace(graph, conditions={})).time_ms == exact


def test_a_mini_batch_between_measured_ones_takes_its_share():
    profile = load_device("h200")
    problem = next(iter(open_step("resnet50").problems.values()))
    half, more = (convolution_front(profile, problem.with_batch(batch))[-1] for batch in (128, 100))
    assert more.time_ms == pytest.approx(half.time_ms * 100 / 128)
    assert more.workspace_bytes == pytest.approx(half.workspace_bytes * 100 / 128, abs=1)


def test_an_unknown_device_is_answered_with_the_known_ones():
    with pytest.raises(
        ProfileError, match="device 'b200' is neither a file nor one that ships with ucudnn: a10, a100-40"
    ):
        load_device("b200")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has another format than 'ucudnn-device', version 1"),
        ({"link": {}}, "cannot be read: KeyError: 'to_host'"),
        ({"link": []}, "cannot be read: TypeError"),
        ({"name": 7}, "name 7 is no text"),
        ({"memory_bytes": "24 GiB"}, "memory_bytes '24 GiB' is no whole number from 0"),
        ({"granularity": 0}, "granularity 0 is no whole number from 1"),
        ({"bytes_per_second": 0}, "bytes_per_second 0 is no number from 1 to 1e"),
        ({"flops_per_second": float("inf")}, "flops_per_second inf is no number"),
        ({"launch_ms": -1}, "launch_ms -1 is no number from 0"),
        ({"link": {"to_host": "fast", "from_host": 1}}, "to_host 'fast' is no number"),
        ({"matrix": {"float32": 0}}, "matrix float32 0 is no number from 1e-09"),
        ({"matrix": {"float16": 1}}, "matrix has no float32"),
        ({"convolution": {"fft": {"Forward": None}}}, "fft Forward None is no number"),
        ({"recorded": ["h200"]}, r"recorded \['h200'\] is no text"),
        ({"sources": {"link": 1}}, "source of link 1 is no text"),
        ({"published": {}}, "published {} is no list"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(tmp_path, change, message):
    from importlib import resources

    content = json.loads((resources.files("ucudnn.memory.devices") / "m40.json").read_text())
    path = tmp_path / "device.json"
    path.write_text(json.dumps(content | change))
    with pytest.raises(ProfileError, match=message) as caught:
        load_device(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["link", "matrix", "launch_ms", "convolution"])
def test_a_key_that_is_missing_is_named_with_what_it_means(tmp_path, key):
    content = specified_device("mine", memory_bytes=2**30, tflops=1.0, bandwidth=100.0, link=10.0)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    assert load_device(str(path)).title == "mine", "title, sources and the like may be left out"
    load_device.cache_clear()
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=f"it has no {key}, which is .*(share|bytes|time)"):
        load_device(str(path))


SPECIFIED = {  # TFLOPS of float32, of 16 bits and of TF32, GB/s of the memory and of the link, as vendors publish them
    "a10": (31.2, 125, 62.5, 600, 25),
    "a100-40": (19.5, 312, 156, 1555, 25),
    "a100-80": (19.5, 312, 156, 2039, 25),
    "rtx-3090": (35.6, 71, 35.6, 936, 25),
    "h100": (66.9, 989, 494, 3350, 50),
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_figures_of_a_specification_predict_published_times(name, tmp_path):
    flops, tensor, tf32, bandwidth, link = SPECIFIED[name]
    figures = {"tflops": flops, "tensor_tflops": tensor, "tf32_tflops": tf32, "bandwidth": bandwidth, "link": link}
    path = tmp_path / "device.json"
    path.write_text(json.dumps(specified_device(name, memory_bytes=2**34, **figures)))
    ratios = [predicted_ms(load_device(str(path)), row) / row["time_ms"] for row in load_device(name).published]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.35)


@pytest.mark.parametrize("content", ["{}", "[]", "7", '{"format": "ucudnn-step"}'])
def test_what_is_no_profile_is_refused_by_its_format(tmp_path, content):
    path = tmp_path / "device.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match="has another format than 'ucudnn-device', version 1"):
        load_device(str(path))


def test_a_convolution_of_which_a_profile_says_nothing_is_named():
    profile = replace(load_device("h200"), recorded=None, convolution={"float32": {"first": 0.5}})
    problem = next(iter(open_step("alexnet").problems.values()))
    with pytest.raises(ProfileError, match="h200 has no share of the peak for convolutions of tf32, channels first"):
        convolution_front(profile, problem)
