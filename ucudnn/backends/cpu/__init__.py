"""The CPU backend: NumPy convolutions with real workspaces, for tests and for machines without a GPU."""

from ucudnn.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
