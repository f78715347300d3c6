"""Parts that several benchmarks share, and the script that runs all of them."""
