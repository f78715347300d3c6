"""Bound the memory of a whole training step: who owns its peak, what policies make of it, and training by a plan.

    python3 -m venv .venv && .venv/bin/pip install --quiet '.[torch]' && .venv/bin/python examples/bound_step.py

No GPU is needed: the step is recorded with tensors that have shapes but no bytes, and its plans are simulated for an
H200. Then a small mini-batch is trained here, within a budget.
"""

import torch

import ucudnn.memory
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.reports.comparison import compare_policies
from ucudnn.memory.reports.explanation import explain
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
from ucudnn.memory.torch.record import record
from ucudnn.reporting.terminal import print_table
from ucudnn.units import format_bytes


def model() -> torch.nn.Module:
    """Return a small network for images of 3 x 64 x 64, as your own module would."""
    layers: list[torch.nn.Module] = []
    for channels, filters in ((3, 64), *[(64, 64)] * 8):
        layers += [torch.nn.Conv2d(channels, filters, 3, padding=1), torch.nn.BatchNorm2d(filters), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))


def main() -> None:
    """Record the step, say who owns its peak, plan it within half of that, and train within a budget."""
    graph = record(TrainingRecipe(model="bound_step:model", batch=256, shape=(3, 64, 64), optimizer="adam"))
    h200 = load_device("h200")
    found = explain(graph, lambda step: device_costs(h200, step), None)
    peak = found.liveness.peak_bytes
    print(f"peak {format_bytes(peak)}, floor {format_bytes(found.liveness.floor_bytes)}; the largest owners:")
    for group in found.groups("operation")[:3]:
        print(f"  {group.name}: {format_bytes(group.size)}, {group.size / peak:.0%}")
    print()
    policies = ("stock", "checkpoint", "vdnn-ext-all-p", "dymem")
    plans = compare_policies(graph, device_costs(h200, graph), peak // 2, policies)
    print_table(plans.title(), plans.headings(), plans.cells(), plans.lines(), text=("policy",))

    net, x, y = model(), torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    optimizer = torch.optim.Adam(net.parameters())
    step = ucudnn.memory.fit(net, (x, y), loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer, budget="100MiB")
    for _ in range(3):
        optimizer.zero_grad()
        step(x, y).backward()
        optimizer.step()
    predicted = format_bytes(step.simulation.peak_bytes)
    print(f"\ntrained 3 steps of mini-batch 8 within 100 MiB; predicted peak {predicted}")


if __name__ == "__main__":
    main()
