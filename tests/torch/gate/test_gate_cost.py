"""The bench of the gate's cost runs on any machine with a C++ compiler."""

import sys

import torch

from bench.tools.results import load
from bench.torch import gate_cost, measuring
from ucudnn.torch.overrides import process_overrides

WAYS = {"pytorch", "gate, passed", "gate, replaced"}


def test_each_way_of_a_call_is_measured(tmp_path, monkeypatch, capsys, gate_library):
    monkeypatch.setattr(measuring, "GateLibrary", lambda: gate_library)
    out = tmp_path / "gate_cost.json"
    monkeypatch.setattr(sys, "argv", ["gate_cost", "--backend", "cpu", "--samples", "3", "--out", str(out)])
    threads = torch.get_num_threads()
    try:
        gate_cost.main()
    finally:
        torch.set_num_threads(threads)
    (found,) = load(out)["runs"]
    assert {name: {*ways} for name, ways in found["calls_us"].items()} == dict.fromkeys(("forward", "backward"), WAYS)
    assert all(each["us"] > 0 for ways in found["calls_us"].values() for each in ways.values())
    assert len(found["required"]) == 4
    assert not process_overrides.is_gated("cpu"), "PyTorch computes by itself again"
    assert "gate, passed" in capsys.readouterr().out
