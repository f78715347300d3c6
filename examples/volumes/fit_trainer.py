"""A trainer for nnU-Net v2 that trains within a memory budget, to the bits of nnU-Net's own without torch.compile.

    nnUNet_extTrainer=examples/volumes UCUDNN_BUDGET=10GiB nnUNetv2_train DATASET 3d_fullres 0 -tr FitTrainer

`ucudnn memory fits nnUNetPlans.json --configuration 3d_fullres` says which patches a budget has room for.
"""

import os
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

import ucudnn.memory


class FitTrainer(nnUNetTrainer):  # type: ignore[misc]
    """Trains by a plan that keeps the budget of the variable UCUDNN_BUDGET; everything else is nnU-Net's."""

    fitted: Any = None

    def _do_i_compile(self) -> bool:
        return False

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take a step as nnU-Net does: forward under autocast, scaled backward, clipping, SGD."""
        data, *target = (each.to(self.device, non_blocking=True) for each in (batch["data"], *batch["target"]))
        scaler = self.grad_scaler or torch.amp.GradScaler(enabled=False)
        if self.fitted is None:
            with torch.autocast(self.device.type, enabled=self.grad_scaler is not None):
                given = {"loss": self.loss, "optimizer": self.optimizer, "budget": os.environ["UCUDNN_BUDGET"]}
                self.fitted = ucudnn.memory.fit(self.network, (data, target), **given)
            print(self.fitted.report())
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, enabled=self.grad_scaler is not None):
            loss = self.fitted(data, target)
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 12)
        scaler.step(self.optimizer)
        scaler.update()
        return {"loss": loss.detach().cpu().numpy()}
