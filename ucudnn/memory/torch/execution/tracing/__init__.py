"""Tracing: a model, its arguments, its loss and its optimizers become the program of a training step."""
