"""Writes profiles and steps to files, compressed where the name ends in .gz."""

from ucudnn.memory.step.file import encode_step
from ucudnn.profiles.format import encode_profile


def save_profile(profile, path):
    path.write_bytes(encode_profile(profile, compress=path.suffix == ".gz"))


def save_step(graph, path, measured=None):
    path.write_bytes(encode_step(graph, measured, compress=path.suffix == ".gz"))
