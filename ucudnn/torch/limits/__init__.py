"""Limits that a user states: of the workspace of each kernel, and of live bytes and workspace together."""
