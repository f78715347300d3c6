#!/usr/bin/env bash
# Adafactor's state of a convolution is 2/3 of its weight, and of a 1x1x1 convolution twice its weight.
#
# Seen: 512x512: 0.0039 of the weight; 64x64x3x3x3: 0.6667; 64x64x1x1x1: 2.0002
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch

found = {}
for shape in ((512, 512), (64, 64, 3, 3, 3), (64, 64, 1, 1, 1)):
    weight = torch.nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn(shape)
    optimizer = torch.optim.Adafactor([weight])
    optimizer.step()
    numbers = sum(each.numel() for each in optimizer.state[weight].values() if torch.is_tensor(each))
    found[shape] = round(numbers / weight.numel(), 4)
    print(f"torch {torch.__version__}, {'x'.join(map(str, shape))}: {found[shape]} of the weight")
assert [*found.values()] == [0.0039, 0.6667, 2.0002]
PROGRAM
