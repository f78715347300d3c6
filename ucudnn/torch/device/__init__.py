"""The device of a program: its memory, limits, and times."""
