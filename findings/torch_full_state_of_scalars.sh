#!/usr/bin/env bash
# A full state dictionary of an optimizer does not come back into DTensors without dimensions.
#
# Seen: the moment of a scalar is a Tensor, and the next update raises AssertionError; of one element it is a DTensor
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
cat >"$folder/program.py" <<'PROGRAM'
import os

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


class Scaled(nn.Module):
    def __init__(self, shape):
        super().__init__()
        for name, value in {"weight": torch.ones(4), "scale": torch.ones(shape)}.items():
            self.register_parameter(name, nn.Parameter(distribute_tensor(value, mesh, [Replicate()])))

    def forward(self):
        return (self.weight * self.scale).square().sum()


def resumed(shape, *, full):
    model = Scaled(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    model().backward()
    optimizer.step()
    options = checkpoint.StateDictOptions(full_state_dict=full)
    state = checkpoint.get_optimizer_state_dict(model, optimizer, options=options)
    checkpoint.set_optimizer_state_dict(model, optimizer, state, options=options)
    model().backward()
    try:
        optimizer.step()
    except AssertionError:
        return type(optimizer.state[model.scale]["exp_avg"]).__name__, "AssertionError"
    return type(optimizer.state[model.scale]["exp_avg"]).__name__, "trains"


found = {(shape, full): resumed(shape, full=full) for shape in ((1,), ()) for full in (False, True)}
print(f"torch {torch.__version__}: {found}")
assert found.pop(((), True)) == ("Tensor", "AssertionError")
assert set(found.values()) == {("DTensor", "trains")}
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/program.py"
