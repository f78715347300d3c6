"""A network that trains on one mini-batch, as tests of tuned programs on GPUs need it."""

import torch


class TrainedProgram:
    """Training steps of a model.

    Args:
        model: the model.
        x: its mini-batch.
    """

    def __init__(self, model, x):
        self.model, self.x = model, x
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
