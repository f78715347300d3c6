#!/usr/bin/env bash
# torchao's 8-bit optimizers keep float32 state for weights whose number of elements is no multiple of the block size.
#
# Seen: 32x32x3x3 (9216 elements): OptimState8bit; 33x31x3x3 (9207 elements): Tensor, of float32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM' 2>"$folder/told" || { cat "$folder/told"; exit 1; }
import torch
import torchao
from torchao.optim import AdamW8bit

found = []
for shape in ((32, 32, 3, 3), (33, 31, 3, 3)):
    weight = torch.nn.Parameter(torch.randn(shape))
    optimizer = AdamW8bit([weight])
    state = optimizer._new_buffer(weight, True)
    found.append(type(state).__name__)
    name = "x".join(map(str, shape))
    print(f"torchao {torchao.__version__}, {name} ({weight.numel()} elements): {found[-1]}")
assert found == ["OptimState8bit", "Tensor"]
PROGRAM
