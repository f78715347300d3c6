"""Runs of operations between heavy ones as regions that PyTorch's Inductor compiles."""
