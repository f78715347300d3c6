"""The network of a MONAI bundle, for `ucudnn memory`, which makes models by module:callable.

    cd examples/volumes && BUNDLE=~/bundle ucudnn memory fits monai_bundle:network --shape 1x96x96x96 --batch 2
        --gpu rtx-3090

The loss is cross-entropy: MONAI's Dice losses read values of labels, which a step without data does not have.
"""

import os
from pathlib import Path

from monai.bundle import ConfigParser
from torch import nn


def network() -> nn.Module:
    """Return what the bundle's training names `network_def`."""
    configs = Path(os.environ["BUNDLE"]).expanduser() / "configs"
    parser = ConfigParser(ConfigParser.load_config_file(next(configs.glob("train.*"))))
    made: nn.Module = parser.get_parsed_content("network_def")
    return made
