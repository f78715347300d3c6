"""From a model to a step graph: operators that PyTorch dispatches, written down."""
