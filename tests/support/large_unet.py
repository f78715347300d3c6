"""A 2-D U-Net whose tensors are so large that its plans near a budget let storages move; it is traced, never run."""

from dataclasses import replace

import torch
from torch.nn import functional

from bench.memory.models import unet2d
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program

RECIPE = TrainingRecipe(model="bench.memory.models:unet2d", batch=2, shape=(3, 512, 512))


def large_unet():
    """Return the step graph, its costs by a profile of an H200, and the bytes of PyTorch's own step at its peak."""
    with torch.device("meta"):  # initial values take longer than all else
        model = unet2d()
    model = model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sample = torch.empty(RECIPE.batch, *RECIPE.shape), torch.empty(RECIPE.batch, *RECIPE.shape[1:], dtype=torch.int64)
    graph = trace_program(step_subject(model, sample, functional.cross_entropy, optimizer), "U-Net", RECIPE.batch).graph
    costs = replace(step_costs(graph, torch.device("cpu")), granularity=512)
    return graph, costs, measure_liveness(graph, costs).peak_bytes
