#!/usr/bin/env bash
# nnU-Net plans a patch by a count that sees neither normalization, nor activations in place, nor channels of the input.
#
# Seen: as planned: estimate 1769472, saved 26.1 MiB; without normalization: the same, 15.8; not in place: the same, 36.3;
# 64 channels: the same, 41.9; 100 classes: estimate 4947968, saved 26.1 MiB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" install --quiet --no-deps dynamic-network-architectures==0.4.4
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
from importlib.metadata import version

import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet
from torch import nn

PLAN = {
    "input_channels": 1, "n_stages": 3, "features_per_stage": [8, 16, 32], "conv_op": nn.Conv3d, "kernel_sizes": 3,
    "strides": [1, 2, 2], "n_conv_per_stage": 2, "num_classes": 3, "n_conv_per_stage_decoder": 2, "conv_bias": True,
    "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU,
    "nonlin_kwargs": {"inplace": True},
}
CHANGES = {
    "as planned": {},
    "without normalization": {"norm_op": None, "norm_op_kwargs": None},
    "not in place": {"nonlin_kwargs": {"inplace": False}},
    "64 channels": {"input_channels": 64},
    "100 classes": {"num_classes": 100},
}
found = {}
for name, changes in CHANGES.items():
    network, saved = PlainConvUNet(**PLAN | changes), {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(torch.zeros(2, network.encoder.stages[0][0].convs[0].conv.in_channels, 32, 32, 32))
    mib = round(sum(each.nbytes() for each in saved.values()) / 2**20, 1)
    found[name] = int(network.compute_conv_feature_map_size((32, 32, 32))), mib
    print(f"dynamic-network-architectures {version('dynamic-network-architectures')}, {name}:", end=" ")
    print(f"estimate {found[name][0]}, saved for backward {mib} MiB")
assert [*found.values()] == [(1769472, 26.1), (1769472, 15.8), (1769472, 36.3), (1769472, 41.9), (4947968, 26.1)]
PROGRAM
