"""Trials: policies train a model on this machine's device, each in a process of its own, and are compared."""
