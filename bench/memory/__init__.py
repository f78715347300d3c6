"""Training within a memory budget: networks, shipped steps, and PyTorch's peaks beside the simulated ones."""
