"""Profiles: recorded measurements of a GPU, from which plans are made without it."""
