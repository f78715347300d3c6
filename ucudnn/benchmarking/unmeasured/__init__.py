"""Configurations and times without a measurement: heuristic modes, nearby plans, assumed times."""
