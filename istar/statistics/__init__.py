"""Statistics for comparing methods over seeds and tasks, as pure functions of numbers.

This package depends on NumPy and SciPy only, and knows nothing about runs: whoever calls it reads the files. The public
names are those of its modules: `paired`, `power`, `multiple`, `tasks` and `conclusions`.
"""
