#!/usr/bin/env bash
# On a CPU, instance normalization of one image has wrong gradients where the incoming gradient is channels last.
#
# Seen: 1 image: error of the input's gradient 0.0 for a contiguous gradient, 1.7 for a channels last one; 2 images: 0.0, 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch


def by_hand(x, weight, incoming):
    """The same by elementary operators, whose gradient autograd derives."""
    mean = x.mean((2, 3), keepdim=True)
    variance = (x - mean).square().mean((2, 3), keepdim=True)
    y = (x - mean) / (variance + 1e-5).sqrt() * weight[:, None, None]
    return torch.autograd.grad(y, x, incoming)[0]


def errors(images):
    torch.manual_seed(1)
    norm = torch.nn.InstanceNorm2d(3, affine=True).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(images, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    incoming = torch.randn(images, 3, 6, 7, dtype=torch.float64)
    expected = by_hand(x, norm.weight, incoming)
    for layout in (torch.contiguous_format, torch.channels_last):
        (found,) = torch.autograd.grad(norm(x), x, incoming.contiguous(memory_format=layout))
        yield (found - expected).abs().max().item()


one, two = [*errors(1)], [*errors(2)]
print(f"torch {torch.__version__}: 1 image: error of the input's gradient {one[0]:.1f} for a contiguous gradient,", end=" ")
print(f"{one[1]:.1f} for a channels last one; 2 images: {two[0]:.1f}, {two[1]:.1f}")
assert max(one[0], *two) < 1e-9 and one[1] > 0.5
PROGRAM
