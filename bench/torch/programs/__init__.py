"""Whole programs: several ranks on several GPUs, and plans that take the place of others in a running program."""
