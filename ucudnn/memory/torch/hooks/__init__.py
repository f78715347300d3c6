"""Training within a budget without a plan of the step: saved tensors leave the device, or are computed again."""
