"""Algorithms: how cuDNN computes a problem, by engine configurations or by its legacy API."""
