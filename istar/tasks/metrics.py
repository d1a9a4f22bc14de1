"""Metrics as `evaluate.Metric`s that live here: no download, no files, float64, never nan.

Every value is a fraction: in [0, 1], or in [-1, 1] for the correlations. SQuAD's official script prints
`exact_match` and `f1` times 100.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np
import scipy.stats
import sklearn.metrics
from numpy.typing import NDArray

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Below this relative spread float64 holds rounding rather than a signal, and SciPy warns.
_CONSTANT = 1e-12


def normalize_answer(text: str) -> str:
    """SQuAD v1.1's normal form of an answer.

    In this order: lower case, no ASCII punctuation, no articles, single spaces.

    >>> normalize_answer("The  U.S. of an A!")
    'us of'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 where both answers have the same normal form, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def token_f1(prediction: str, gold: str) -> float:
    """F1 of the bags of words, 2 |P ∩ G| / (|P| + |G|), in [0, 1].

    0 where nothing is shared, as in the official v1.1 script: also where both normal forms are empty
    (`exact_match` is 1 there).
    """
    predicted, wanted = (Counter(normalize_answer(text).split()) for text in (prediction, gold))
    shared = (predicted & wanted).total()
    return 2 * shared / (predicted.total() + wanted.total()) if shared else 0.0


def _is_constant(values: NDArray[np.float64]) -> bool:
    return bool(np.ptp(values) <= _CONSTANT * np.abs(values).max())


def _correlation(function: Callable[..., Any], predictions: Sequence[float], references: Sequence[float]) -> float:
    pair = np.asarray([predictions, references], dtype=np.float64)
    if not np.isfinite(pair).all():
        raise ValueError("a correlation needs finite predictions and references")
    if any(_is_constant(values) for values in pair):
        return 0.0
    return float(function(*pair).statistic)


class _Metric(evaluate.Metric):
    """Keeps its data in memory unless told otherwise, so processes that run side by side share nothing.

    Subclasses set `value` (and `gold` where it differs) and their docstring is the metric's description.
    """

    value: ClassVar[Any] = datasets.Value("int64")
    gold: ClassVar[Any] = None

    def __init__(self, config_name: str | None = None, keep_in_memory: bool = True, **options: Any) -> None:
        super().__init__(config_name, keep_in_memory, **options)

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": self.value, "references": self.gold or self.value})
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "", citation="", inputs_description="", features=features
        )

    def _build_data_dir(self) -> str:
        # The parent makes a folder in the user's cache even for data that never leaves memory.
        return "" if self.keep_in_memory else str(super()._build_data_dir())


class Accuracy(_Metric):
    """Fraction of class ids that are right, in [0, 1]."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": float(sklearn.metrics.accuracy_score(references, predictions))}


class F1(_Metric):
    """Binary F1 of class 1, in [0, 1]; 0 where class 1 neither occurs nor is predicted."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"f1": float(sklearn.metrics.f1_score(references, predictions, pos_label=1, zero_division=0.0))}


class MatthewsCorrelation(_Metric):
    """Matthews' correlation of class ids, in [-1, 1]; 0 where either side has a single class."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        if min(len(set(predictions)), len(set(references))) < 2:
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": float(sklearn.metrics.matthews_corrcoef(references, predictions))}


class Pearson(_Metric):
    """Pearson's correlation, in [-1, 1]; 0 where either side is constant."""

    value = datasets.Value("float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"pearson": _correlation(scipy.stats.pearsonr, predictions, references)}


class Spearman(_Metric):
    """Spearman's rank correlation, in [-1, 1]; 0 where either side is constant."""

    value = datasets.Value("float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"spearman": _correlation(scipy.stats.spearmanr, predictions, references)}


class Squad(_Metric):
    """SQuAD v1.1's exact match and token F1, fractions in [0, 1], the best over each answer's golds.

    A prediction is a text, a reference the list of its gold texts.
    """

    value = datasets.Value("string")
    gold = datasets.List(datasets.Value("string"))

    def _compute(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        if not all(references):
            raise ValueError("SQuAD's metric needs at least one gold answer for each prediction")
        return {
            "exact_match": _mean_of_best(exact_match, predictions, references),
            "f1": _mean_of_best(token_f1, predictions, references),
        }


def _mean_of_best(
    score: Callable[[str, str], float], predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
    best = [max(score(text, gold) for gold in golds) for text, golds in zip(predictions, references, strict=True)]
    return float(np.mean(best))


METRICS: dict[str, type[evaluate.Metric]] = {
    "accuracy": Accuracy,
    "f1": F1,
    "matthews_correlation": MatthewsCorrelation,
    "pearson": Pearson,
    "spearman": Spearman,
    "squad": Squad,
}


def compute(names: Iterable[str], predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """The values of several metrics over a whole set, merged.

    Args:
        names: keys of `METRICS`.
        predictions: class ids, numbers or answer texts, as the metrics want them.
        references: class ids, numbers or lists of gold texts, in the same order.

    Raises:
        ValueError: for an unknown metric, an empty set, sets of different sizes, or numbers not finite.

    >>> compute(["accuracy", "f1"], predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
    {'accuracy': 0.75, 'f1': 0.8}
    """
    if not 0 < len(predictions) == len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    merged: dict[str, float] = {}
    for name in names:
        if name not in METRICS:
            raise ValueError(f"unknown metric {name!r}; known: {', '.join(METRICS)}")
        merged |= METRICS[name]().compute(predictions=predictions, references=references)
    return merged
