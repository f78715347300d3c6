"""The gate in front of PyTorch's operators: calls that are passed on to PyTorch never come to Python."""
