"""Pools: where the storages of a step lie in one block of memory, and what fragmentation costs."""
