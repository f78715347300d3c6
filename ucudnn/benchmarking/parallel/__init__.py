"""Parallel benchmarking: several GPUs of a machine, or the ranks of a program, measure together."""
