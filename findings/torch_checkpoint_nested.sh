#!/usr/bin/env bash
# What saves memory in PyTorch raises an internal error for nested tensors, which pass for plain ones of strided layout.
#
# Seen: a strided nested tensor is a plain Tensor of torch.strided; plain: 4 gradients; checkpoint: internal error;
# checkpoint without its check: equal bits; save_on_cpu: equal bits; save_on_cpu of pinned memory: internal error
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
parts = [torch.randn(length, 8) for length in (3, 5)]


def gradients(run, block):
    model.zero_grad()
    with block:
        y = run(torch.nested.nested_tensor(parts, layout=torch.strided))
        loss = torch.nested.to_padded_tensor(y, 0.0).square().sum()
    loss.backward()
    return [each.grad.clone() for each in model.parameters()]


def seen(run, block):
    try:
        found = gradients(run, block)
    except RuntimeError as error:
        return "internal error" if "Internal error: NestedTensorImpl" in str(error) else str(error)
    return "equal bits" if all(map(torch.equal, found, plain)) else "other bits"


x = torch.nested.nested_tensor(parts, layout=torch.strided)
assert type(x) is torch.Tensor and x.layout is torch.strided
plain = gradients(model, nullcontext())
ways = {
    "checkpoint": seen(lambda x: checkpoint(model, x, use_reentrant=False), nullcontext()),
    "checkpoint without its check": seen(
        lambda x: checkpoint(model, x, use_reentrant=False, determinism_check="none"), nullcontext()
    ),
    "save_on_cpu": seen(model, save_on_cpu()),
    "save_on_cpu of pinned memory": seen(model, save_on_cpu(pin_memory=True)),
}
print(f"torch {torch.__version__}: a strided nested tensor is a plain Tensor of {x.layout}; plain: {len(plain)} gradients;")
print("; ".join(f"{way}: {what}" for way, what in ways.items()))
assert [*ways.values()] == ["internal error", "equal bits", "equal bits", "internal error"]
PROGRAM
