"""Checks outputs of candidates against those of PyTorch's own kernels, in memory that is free."""
