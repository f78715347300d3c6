"""Timing cuDNN's calls and checking their outputs."""
