"""Devices that are not at hand: what a step takes on them, from measurements or from published figures."""
