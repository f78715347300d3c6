#!/usr/bin/env bash
# once_differentiable lets create_graph=True return a gradient without a graph.
#
# Seen: the gradient 12.0 needs a gradient: False; of its square the model gets 0.0, and the derivative is 288.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch
from torch.autograd.function import once_differentiable


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


x = torch.tensor(2.0, requires_grad=True)
(slope,) = torch.autograd.grad(Cube.apply(x), x, create_graph=True)
(slope**2 + 0 * x).backward()  # a penalty on the slope, as of a WGAN-GP
print(f"torch {torch.__version__}: the gradient {slope.item()} needs a gradient: {slope.requires_grad};", end=" ")
print(f"of its square the model gets {x.grad.item()}, and the derivative is {2 * 12.0 * 12.0}")
assert not slope.requires_grad and x.grad.item() == 0.0
PROGRAM
