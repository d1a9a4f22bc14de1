"""Metrics of whole prediction sets, computed locally in float64; they are never NaN.

Every value is a fraction: in [0, 1], or in [-1, 1] for the correlations. SQuAD's official script reports
`exact_match` and `f1` times 100.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import scipy.stats
import sklearn.metrics

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return SQuAD v1.1's normal form of an answer: lower case, without punctuation, articles or extra white space.

    >>> normalize_answer("The  U.S. of an A!")
    'us of'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if both answers have the same normal form, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(reference))


def token_f1(prediction: str, reference: str) -> float:
    """Return the F1 score of the bags of words P of the prediction and R of the reference, in [0, 1].

    It is 2 |P ∩ R| / (|P| + |R|). As in SQuAD's official v1.1 script, it is 0 if no word is shared, even if both
    answers are empty and `exact_match` is 1.
    """
    predicted_words, reference_words = (Counter(normalize_answer(text).split()) for text in (prediction, reference))
    num_shared_words = (predicted_words & reference_words).total()
    return 2 * num_shared_words / (predicted_words.total() + reference_words.total()) if num_shared_words else 0.0


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Return the fraction of correct class ids, in [0, 1]."""
    return {"accuracy": float(sklearn.metrics.accuracy_score(references, predictions))}


def f1(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Return the binary F1 score of class 1, in [0, 1]; 0 if class 1 neither occurs nor is predicted."""
    return {"f1": float(sklearn.metrics.f1_score(references, predictions, pos_label=1, zero_division=0.0))}


def matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Return Matthews' correlation coefficient, in [-1, 1]; 0 if either side has a single class."""
    if min(len(set(predictions)), len(set(references))) < 2:
        return {"matthews_correlation": 0.0}
    return {"matthews_correlation": float(sklearn.metrics.matthews_corrcoef(references, predictions))}


def pearson(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Return Pearson's correlation coefficient, in [-1, 1]; 0 if either side is constant."""
    return {"pearson": _compute_correlation(scipy.stats.pearsonr, predictions, references)}


def spearman(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Return Spearman's rank correlation coefficient, in [-1, 1]; 0 if either side is constant."""
    return {"spearman": _compute_correlation(scipy.stats.spearmanr, predictions, references)}


def _compute_correlation(
    correlation_function: Callable[..., Any], predictions: Sequence[float], references: Sequence[float]
) -> float:
    samples = np.asarray([predictions, references], dtype=np.float64)
    # Values with a relative range below 1e-12 differ by float64 rounding only.
    if (np.ptp(samples, axis=1) <= 1e-12 * np.abs(samples).max(axis=1)).any():
        return 0.0
    return float(correlation_function(*samples).statistic)


def squad(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return SQuAD v1.1's mean exact match and mean token F1, fractions in [0, 1].

    `references` has the gold texts of each question; the one that scores highest counts.
    """
    pairs = list(zip(predictions, references, strict=True))
    return {
        "exact_match": float(np.mean([max(exact_match(text, gold) for gold in golds) for text, golds in pairs])),
        "f1": float(np.mean([max(token_f1(text, gold) for gold in golds) for text, golds in pairs])),
    }


METRICS: dict[str, Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]] = {
    metric.__name__: metric for metric in (accuracy, f1, matthews_correlation, pearson, spearman, squad)
}
"""Metric functions by name. Each returns one or more values by name, given predictions and references."""


def compute(names: Iterable[str], predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Compute several metrics, keys of `METRICS`, over a whole prediction set and return their values by name.

    Predictions are class ids, numbers or answer texts, depending on the metrics. References, in the same order, are
    class ids, numbers or lists of gold texts.

    >>> compute(["accuracy", "f1"], predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
    {'accuracy': 0.75, 'f1': 0.8}
    """
    values: dict[str, float] = {}
    for name in names:
        values |= METRICS[name](predictions, references)
    return values
