"""Parts that several benchmarks share, and the script that makes the tables of documents."""
