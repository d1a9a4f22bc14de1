"""Figures that anyone can print again: `python -m benchmarks.<name>`."""
