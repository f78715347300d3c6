"""One call of a convolution in PyTorch: its problem, its kernel, and the form of its output."""
