"""The published numbers, written out here a second time from the paper's Table 1."""

from istar.reports import paper

TABLE_1 = """
model      task  metric                base       istar      cosreg
albert     sst2  accuracy              93.08 0.24 93.08 0.32 91.86 0.42
albert     qnli  accuracy              90.28 0.42 91.41 0.43 90.91 0.25
albert     rte   accuracy              71.34 0.81 72.56 1.29 65.99 1.81
albert     mrpc  accuracy              86.96 0.32 87.84 0.43 86.91 0.26
albert     qqp   accuracy              89.98 0.06 89.97 0.06 89.81 0.14
albert     cola  matthews_correlation  54.56 0.93 55.22 1.61 49.59 0.90
albert     stsb  pearson               89.07 0.20 88.91 0.23 87.98 0.46
albert     sst5  accuracy              54.23 0.30 55.02 0.46 54.76 0.11
albert     squad f1                    90.32 0.13 90.33 0.09 90.08 0.31
albert     squad exact_match           82.86 0.17 82.96 0.04 82.64 0.32
bert       sst2  accuracy              92.40 0.41 92.65 0.18 92.01 0.23
bert       qnli  accuracy              89.49 0.30 89.51 0.69 89.67 0.56
bert       rte   accuracy              62.24 0.48 62.53 0.70 61.52 1.41
bert       mrpc  accuracy              86.51 0.21 86.76 0.57 85.29 0.47
bert       qqp   accuracy              90.44 0.11 90.36 0.05 90.45 0.82
bert       cola  matthews_correlation  59.22 0.63 59.60 0.25 57.90 0.82
bert       stsb  pearson               86.15 0.20 86.44 0.16 86.30 0.28
bert       sst5  accuracy              50.00 0.28 50.64 0.34 49.44 0.18
bert       squad f1                    87.02 0.11 87.76 0.11 86.89 0.14
bert       squad exact_match           78.82 0.25 80.02 0.10 78.85 0.08
distilbert sst2  accuracy              91.36 0.15 91.42 0.11 90.94 0.38
distilbert qnli  accuracy              87.40 0.34 86.25 0.32 86.68 0.19
distilbert rte   accuracy              56.82 0.67 58.05 0.95 57.04 1.13
distilbert mrpc  accuracy              83.68 0.41 84.17 0.35 83.58 0.44
distilbert qqp   accuracy              89.57 0.74 89.67 0.08 89.55 0.08
distilbert cola  matthews_correlation  50.16 0.59 50.03 0.93 49.30 0.88
distilbert stsb  pearson               84.75 0.26 85.28 0.11 84.41 0.08
distilbert sst5  accuracy              49.48 0.28 50.13 0.23 48.65 0.25
distilbert squad f1                    83.23 0.18 83.69 0.36 83.47 0.34
distilbert squad exact_match           74.04 0.12 74.80 0.27 74.40 0.24
"""
"""Mean and standard deviation over five seeds, in percent."""


MODELS = {"albert": "albert-base-v2", "bert": "bert-base-cased", "distilbert": "distilbert-base-cased"}


def test_the_scores_are_those_of_table_1() -> None:
    _, *rows = TABLE_1.strip().splitlines()
    assert len(rows) == 3 * 10
    for row in rows:
        model, task, metric, *numbers = row.split()
        for family in ("base", "istar", "cosreg"):
            mean, std, *numbers = numbers
            expected = (float(mean), float(std))
            assert paper.look_up_score(MODELS[model], task, metric, family) == expected, (model, task, metric, family)
        assert numbers == []


def test_nothing_else_is_published() -> None:
    assert paper.look_up_score("bert-base-uncased", "rte", "accuracy", "base") is None
    assert paper.look_up_score("bert-base-cased", "wnli", "accuracy", "base") is None
    assert paper.look_up_tuned_penalty("bert-base-cased", "wnli") is None
