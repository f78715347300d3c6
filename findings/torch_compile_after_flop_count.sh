#!/usr/bin/env bash
# One count of a compiled module's operations leaves every module of the process uncompiled, those made later, too.
#
# Seen: graphs that ran: 0 within FlopCounterMode, 0 of another module after it, 1 after torch.compiler.reset()
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ran = 0


def counting(graph, _):
    def run(*given):
        global ran
        ran += 1
        return graph(*given)

    return run


def compiled(*layers):
    return torch.compile(nn.Sequential(*layers), backend=counting)


x = torch.ones(2, 3)
with FlopCounterMode(display=False):
    compiled(nn.Linear(3, 3))(x)
within = ran
other = compiled(nn.ReLU(), nn.Linear(3, 5))
other(x)
after = ran
torch.compiler.reset()
other(x)
print(f"torch {torch.__version__}: graphs that ran: {within} within FlopCounterMode,", end=" ")
print(f"{after} of another module after it, {ran} after torch.compiler.reset()")
assert (within, after, ran) == (0, 0, 1)
PROGRAM
