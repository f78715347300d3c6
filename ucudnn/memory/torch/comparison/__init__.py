"""Policies compared on a device: one process for each."""
