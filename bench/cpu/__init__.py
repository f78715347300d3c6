"""Scripts that measure the CPU backend."""
