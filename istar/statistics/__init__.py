"""Statistics for comparing methods over seeds and tasks, as pure functions of numbers.

This package depends on NumPy and SciPy only, and knows nothing about runs: callers read the files. The public names are
in its modules `paired`, `power`, `over_tasks` and `conclusions`.
"""

ALPHA, POWER = 0.05, 0.8
"""Significance level, and probability of finding the smallest difference that a comparison names."""
