"""Parallel benchmarking: the GPUs of a machine, or the ranks of a program, measure together."""
