"""PyTorch's side of `ucudnn.memory`: records the training step of a model as a step graph.

What is recorded is planned, simulated and explained by `ucudnn.memory`, which does not know PyTorch.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    needed = "ucudnn.memory.torch needs PyTorch 2.10 or newer: pip install 'ucudnn[torch]'"
    raise ImportError(f"{needed} ({error})", name=__name__) from error
