"""A training step: its graph, costs, lifetimes, layers, and its file."""
