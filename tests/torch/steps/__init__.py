"""Tests of the gate in front of PyTorch's operators."""
