"""Benchmarking: which micro-configurations are measured, and what is remembered of them."""
