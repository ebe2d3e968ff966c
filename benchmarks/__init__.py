"""Side-by-side benchmarks of every installed backend: `python -m benchmarks --help`."""
