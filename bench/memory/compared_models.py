"""Networks that only comparisons and planning need, as functions without arguments."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from bench.memory.models import GPT, unet3d


def gpt2_medium(depth: int = 24) -> nn.Module:
    """Return GPT-2 medium (Radford et al., 2019) of 355 million parameters, or with another number of its blocks."""
    return GPT(depth, 1024, 16)


gpt2_medium_12, gpt2_medium_48, gpt2_medium_64 = (partial(gpt2_medium, depth) for depth in (12, 48, 64))
GPTS = ("gpt2_medium", "gpt2_medium_12", "gpt2_medium_48", "gpt2_medium_64")


def gpt_small() -> nn.Module:
    """Return a GPT to try scripts out with."""
    return GPT(3, 32, 2, 64, 100)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of logits (batch x vocabulary x length), as a matrix with a row for each token."""
    return F.cross_entropy(logits.transpose(1, 2).flatten(0, 1), tokens.flatten())


def unet3d_instance() -> nn.Module:
    """Return the 3-D U-Net with instance normalization, which leaves samples apart."""
    model = unet3d()
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm3d):
                setattr(module, name, nn.InstanceNorm3d(child.num_features, affine=True))
    return model


def efficientnet_v2_s() -> nn.Module:
    """Return torchvision's EfficientNetV2-S (Tan and Le, 2021), without dropout and without dropped paths."""
    from torchvision.models import efficientnet_v2_s as made

    return made(dropout=0.0, stochastic_depth_prob=0.0)


def vnet() -> nn.Module:
    """Return MONAI's V-Net (Milletari et al., 2016) of 2 classes, without dropout."""
    from monai.networks.nets import VNet

    model: nn.Module = VNet(out_channels=2, dropout_prob_down=None, dropout_prob_up=(None, 0.0))
    for child in model.children():
        if hasattr(child, "dropout2"):
            child.dropout2 = nn.Identity()
    return model
