"""Tests of the script that records the shipped steps: it records what is shipped."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from bench.memory.record_steps import RECIPES
from ucudnn.memory.step.shipped import open_step, shipped_steps
from ucudnn.memory.torch.record import record


def test_every_shipped_step_has_its_recipe():
    assert sorted(RECIPES) == [*shipped_steps()]


@pytest.mark.parametrize("name", ["alexnet", "unet3d"])
def test_recording_gives_what_ships(name):
    shipped = open_step(name)
    recorded = replace(record(RECIPES[name]), name=name)
    lines = {each.source.rpartition(":")[0] for each in recorded.operations}  # their numbers differ among PyTorch's
    assert {each.source.rpartition(":")[0] for each in shipped.operations} == lines
    here, there = ([replace(each, source="") for each in graph.operations] for graph in (recorded, shipped))
    assert here == there
    assert recorded.storages == shipped.storages
    assert recorded.batch == shipped.batch
