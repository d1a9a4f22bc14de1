"""Statistics for comparing methods over seeds and tasks, as pure functions of numbers.

This package depends on NumPy and SciPy only, and knows nothing about runs: whoever calls it reads the files. The public
names are those of its modules: `paired`, `power`, `tasks` and `conclusions`.
"""

TEST = "sign-flip"
"""Test of a comparison by default, in plans and in reports; a key of `istar.statistics.paired.TESTS`."""
ALPHA, POWER = 0.05, 0.8
"""Significance level, and probability of finding the smallest difference that a comparison names."""
