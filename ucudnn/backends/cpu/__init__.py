"""NumPy convolutions with real workspaces, for machines without a GPU and for tests."""

from ucudnn.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
