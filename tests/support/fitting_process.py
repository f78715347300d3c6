"""A process that fits a small network on the CPU and measures its operations: POLICY BUDGET; it prints JSON."""

import json
import sys

import torch
from torch import nn

from ucudnn.memory.torch.running.fit import FitOptions, fit_subject
from ucudnn.memory.torch.subject.step_program import step_subject


def fitted(policy="checkpoint", budget=1_200_000):
    """Return a fitted step of a small network, and what was told meanwhile."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model, inputs = nn.Sequential(*layers), (torch.randn(512, 64), torch.randn(512, 64))
    subject = step_subject(model, inputs, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    told = []
    options = FitOptions(budget=budget, policy=policy, measured=True, progress=told.append)
    return fit_subject(subject, options), told


if __name__ == "__main__":
    step, told = fitted(sys.argv[1], int(sys.argv[2]))
    found = {"told": told, "plan": step.plan.policy, "actions": [each.target for each in step.plan.actions]}
    sys.stdout.write(json.dumps({**found, "times": step.costs.time_ms, "report": step.report()}))
