"""Training within a memory budget: the whole step is planned, of which the workspace of convolutions is a small part.

The core knows neither PyTorch nor a GPU. It plans from a recorded step:

    graph (`graph`, `step_file`) and costs (`costs`)
      -> peak, floor and who owns the peak                 `liveness`
      -> a policy makes a plan within a budget             `policies`, `actions`
      -> the plan is simulated: peak, time, stalls         `simulator`
      -> its storages get addresses in one block           `pools`

PyTorch's side, `torch` and `attention`, is imported only by its name; `fit`, which runs plans there, and `budget`,
which needs none, when they are used.
"""

from importlib import import_module
from typing import Any

__all__ = ["budget", "fit"]
_PLACES = {"budget": "ucudnn.memory.torch.hooks.budget_block", "fit": "ucudnn.memory.torch.running.fit"}


def __getattr__(name: str) -> Any:
    """Return `fit` or `budget`, with which PyTorch is imported only now."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
