"""Tests of plans as snapshots: PyTorch's own tools read them, and no two pieces share a byte at a time."""

import base64
import pickle
import re

import pytest
from hypothesis import given

from tests.support.memory_plans import random_plans
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.reports.snapshot import encode_snapshot, plan_snapshot
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.shipped import open_step


def live_bytes_of(snapshot):
    """Walk the trace, check that pieces lie apart in their segments, and return the most bytes that exist at a time."""
    segments = [range(each["address"], each["address"] + each["total_size"]) for each in snapshot["segments"]]
    alive, made = {}, {}
    trace = snapshot["device_traces"][0]
    for entry in trace:
        if entry["action"] == "alloc":
            made[entry["addr"]] = entry["size"]
    before = sum(
        block["size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["address"] not in made
    )
    most = now = before
    for entry in trace:
        address, size = entry["addr"], entry["size"]
        if entry["action"] == "alloc":
            assert any(address in each and address + size - 1 in each for each in segments)
            assert all(address + size <= other or other + alive[other] <= address for other in alive)
            alive[address] = size
            now += size
        elif entry["action"] == "free_completed":
            assert alive.pop(address) == size
            now -= size
        most = max(most, now)
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(times)
    return most


@given(random_plans())
def test_pieces_lie_apart_and_their_peak_is_the_plans(drawn):
    plan, costs = drawn
    graph = plan.graph
    # What the step makes and leaves comes at the event of the next piece that is taken, so perhaps a little late.
    late = sum(
        costs.rounded(size)
        for size, before, after in zip(graph.sizes, graph.exists_before, graph.exists_after, strict=True)
        if after and not before
    )
    assert abs(live_bytes_of(plan_snapshot(plan, costs)) - simulate(plan, costs).peak_bytes) <= late


@pytest.fixture(scope="module")
def resnet():
    graph = open_step("resnet50").with_batch(8)
    costs = device_costs(load_device("h200"), graph)
    return find_policy("checkpoint").plan(graph, costs, None), costs


def test_a_shipped_steps_plan_has_its_peak_and_its_lines(resnet):
    snapshot = plan_snapshot(*resnet)
    assert live_bytes_of(snapshot) == simulate(*resnet).peak_bytes
    frames = [frame for entry in snapshot["device_traces"][0] for frame in entry["frames"]]
    assert any(frame["filename"] == "bench/memory/models.py" and frame["line"] > 0 for frame in frames)
    assert any(frame["name"].startswith("recompute ") for frame in frames)
    assert any(frame["name"] == "scratch" for frame in frames)


def test_pytorchs_own_tools_read_the_file(resnet):
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz

    snapshot = pickle.loads(encode_snapshot(*resnet))
    text = _memory_viz.trace(snapshot)
    assert "Device 0" in text
    assert len(re.findall(r" = b\[", text)) > 300  # pieces of the pool
    assert "total" in _memory_viz.segsum(snapshot)
    for page in (_memory_viz.segments, _memory_viz.memory):  # the text of which a script draws a picture
        assert "active_allocated" in page(snapshot, format_flamegraph=str)
    assert "only_before" in _memory_viz.compare(snapshot["segments"], [], format_flamegraph=str)
    for page in (
        _memory_viz.trace_plot(snapshot),
        _memory_viz.trace_plot(snapshot, plot_segments=True),
        _memory_viz.segment_plot(snapshot),
    ):
        data = base64.b64decode(re.search(r'"base64": "([^"]+)"', page)[1])
        assert pickle.loads(data)["device_traces"] == snapshot["device_traces"]
