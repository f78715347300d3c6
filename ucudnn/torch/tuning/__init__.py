"""Choosing kernels in the running program: PyTorch's own run first, and others are tried and timed beside them."""
