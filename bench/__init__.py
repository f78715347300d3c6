"""Benchmarks: each is run as `python -m bench.FOLDER.NAME` and writes to bench/results/FOLDER."""
