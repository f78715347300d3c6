"""Candidates of a call, tried beside PyTorch's own kernel."""
