"""Sharded steps: each rank holds a part of the parameters, and gathers them where the step's plan says so."""
