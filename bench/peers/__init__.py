"""cuDNN alone, PyTorch, the original method and ucudnn on the same tensors."""
