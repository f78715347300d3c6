#!/usr/bin/env bash
# An activation in place saves a tensor behind batch normalization, and costs one behind instance normalization.
#
# Seen: most tensors of an activation's size at once: BatchNorm3d 5.1, in place 4.1; InstanceNorm3d 5.1, in place 6.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - 2>/dev/null <<'PROGRAM'
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

torch.set_num_threads(1)  # each thread has a buffer of its own for sums of convolutions
CHANNELS, SIDE, BATCH = 8, 24, 2


def most_tensors(norm, inplace):
    """Return the most bytes that forward and backward have at once, in activations of the largest size."""
    block = nn.Conv3d(4, CHANNELS, 3, padding=1), norm(CHANNELS, affine=True), nn.LeakyReLU(inplace=inplace)
    model, x = nn.Sequential(*block, nn.Conv3d(CHANNELS, 1, 1)), torch.randn(BATCH, 4, SIDE, SIDE, SIDE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        model(x).mean().backward()
    changes = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    level = most = 0
    for change in sorted(changes, key=lambda each: each.start_ns()):
        level += change.nbytes()
        most = max(most, level)
    return most / (4 * BATCH * CHANNELS * SIDE**3)


seen = {norm.__name__: [round(most_tensors(norm, inplace), 1) for inplace in (False, True)]
        for norm in (nn.BatchNorm3d, nn.InstanceNorm3d)}
told = "; ".join(f"{name} {plain}, in place {inplace}" for name, (plain, inplace) in seen.items())
print(f"torch {torch.__version__}: most tensors of an activation's size at once: {told}")
assert seen == {"BatchNorm3d": [5.1, 4.1], "InstanceNorm3d": [5.1, 6.0]}, seen
PROGRAM
