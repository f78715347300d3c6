"""Tests of ucudnn.memory.torch.execution.tracing."""
