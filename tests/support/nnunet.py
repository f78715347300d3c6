"""A small plans file of nnU-Net v2, with its data set's file beside it."""

import json

ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 3,
        "features_per_stage": [4, 8, 16],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "n_conv_per_stage": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1],
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}
CONFIGURATION = {
    "patch_size": [16, 32, 32],
    "batch_size": 2,
    "median_image_size_in_voxels": [19.5, 40, 38.0],
    "architecture": ARCHITECTURE,
    "batch_dice": False,
}
LABELS = {"background": 0, "first": 1, "second": 2}


def write_plans(folder, *, labels=LABELS, channels=1, **changes):
    """Write plans with one configuration, 3d_fullres; return the file."""
    path = folder / "plans.json"
    path.write_text(json.dumps({"plans_name": "plans", "configurations": {"3d_fullres": CONFIGURATION | changes}}))
    names = {str(index): "CT" for index in range(channels)}
    path.with_name("dataset.json").write_text(json.dumps({"channel_names": names, "labels": labels}))
    return path
