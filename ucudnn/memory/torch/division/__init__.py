"""Divided segments: runs of operations that are computed for a part of the mini-batch at a time."""
