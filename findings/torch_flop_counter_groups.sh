#!/usr/bin/env bash
# PyTorch's counter multiplies the operations of a grouped convolution's filter gradient by the groups.
#
# Seen: 1 group: backward has 2.0 times the operations of forward; 8 groups: 9.0 times
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch
from torch.utils.flop_counter import FlopCounterMode

found = {}
for groups in (1, 8):
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    w = torch.randn(16, 16 // groups, 3, 3, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = torch.conv2d(x, w, padding=1, groups=groups)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    found[groups] = backward.get_total_flops() / forward.get_total_flops()
    print(f"torch {torch.__version__}, {groups} groups: backward has {found[groups]} times the operations of forward")
assert found == {1: 2.0, 8: 9.0}
PROGRAM
