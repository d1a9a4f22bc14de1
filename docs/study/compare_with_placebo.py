"""Compare the methods of a task with the random direction, which the report compares with Base only.

    python docs/study/compare_with_placebo.py study/minilm mrpc

prints the mean difference in percentage points over the seeds that both have, its 95% interval, and the p-value of the
paired t-test with Holm's correction over the methods of the task.
"""

import sys
from pathlib import Path

import numpy as np

from istar.reports import cells
from istar.reports.method_comparisons import compare_methods
from istar.reports.run_frame import load_runs
from istar.statistics import multiple, paired

root, task = sys.argv[1:]
all_runs = cells.add_selection_columns(load_runs(Path(root), keep_records=True))
methods = [method for method in compare_methods(all_runs).methods if method.task == task]
placebo = next(method for method in methods if method.name.startswith("random direction"))
compared = [method for method in methods if method is not placebo and not method.is_base]
differences_by_method = {
    method.name: np.array([
        method.score_by_seed[seed] - placebo.score_by_seed[seed]
        for seed in sorted(method.score_by_seed.keys() & placebo.score_by_seed.keys())
    ])
    for method in compared
}  # fmt: skip
p_values = multiple.holm([paired.t_test(differences) for differences in differences_by_method.values()]).adjusted
for (name, differences), p_value in zip(differences_by_method.items(), p_values, strict=True):
    low, high = paired.t_interval(differences)
    print(f"{name}: {differences.mean():+.2f} ({low:+.2f} to {high:+.2f}), p = {p_value:.2g}")
