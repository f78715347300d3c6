"""A Lightning module for `ucudnn memory`, which makes models by module:callable and calls forward and the loss.

    cd examples/volumes && ucudnn memory fits lightning_module:Segmentation --shape 1x64x64x64 --batch 2
        --loss lightning_module:loss --optimizer adamw --autocast bfloat16 --gpu rtx-3090

`training_step` of a module that computes more than this becomes the loss: it gets the output and the labels.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional


def loss(output: Tensor, labels: Tensor) -> Tensor:
    """Return what `training_step` computes of forward's output."""
    return functional.cross_entropy(output, labels)


class Segmentation(lightning.LightningModule):  # type: ignore[misc]
    """A small network for volumes, as your own module."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv3d(channels, 32, 3, padding=1) for channels in (1, 32, 32)]
        self.layers = nn.Sequential(*(part for each in layers for part in (each, nn.LeakyReLU())), nn.Conv3d(32, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each voxel and class."""
        scores: Tensor = self.layers(x)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a mini-batch, which Lightning differentiates."""
        return loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
