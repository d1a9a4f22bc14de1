"""From logits to predictions and metrics: once, from a whole set, in the order of the examples."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray

from istar.errors import UserError
from istar.files import write_text
from istar.tasks import metrics, squad
from istar.tasks.specs import Kind, Split, TaskSpec

_COLLAPSED_SPREAD = 0.01  # of the references' standard deviation
_SIMILARITY_RANGE = (0.0, 5.0)  # STS-B's, GLUE's only regression
_Logits = list[NDArray[np.float64]]


@dataclass(frozen=True)
class Evaluation:
    """What a model said about a set and how good that was.

    Attributes:
        metrics: the task's metrics; empty for a set without labels.
        predictions: one dict an example, in the examples' order: `id` (spans: the data set's own, else the
            example's row), `prediction` and, where known, `label` (class names; numbers; answer text and the
            list of gold texts), for classification also `scores`, the probability of each class.
        collapsed: whether the predictions are all the same (regression: spread over less than a hundredth of
            the labels' deviation) although the labels are not; False without labels.
    """

    metrics: dict[str, float]
    predictions: list[dict[str, Any]]
    collapsed: bool


@dataclass(frozen=True)
class Evaluator:
    """Turns the logits of a set's features into an `Evaluation`.

    Attributes:
        spec: the task.
        examples: the split, labelled or not.
        features: what `featurize(..., training=False)` made of it.
        n_best: starts and ends of a window that are paired, spans only.
        max_answer_length: in tokens, spans only.
    """

    spec: TaskSpec
    examples: datasets.Dataset
    features: datasets.Dataset
    n_best: int = 20
    max_answer_length: int = 30

    def __call__(self, outputs: Mapping[int, NDArray[Any]]) -> Evaluation:
        """Evaluate a whole set.

        Args:
            outputs: the logits of each feature by `feature_id`, in any order: (classes,), (1,) for
                regression, (2, tokens) for spans, start above end, padded or not.

        Raises:
            ValueError: where the ids are not exactly those of the features, where logits have another shape
                or are not finite, or where the features are not of these examples.
        """
        rules = _RULES[self.spec.kind]
        values, extras = rules.decode(self, self._logits(outputs))
        golds = _golds(self.spec, self.examples)
        show = partial(rules.show, self.spec)
        predictions = [
            {"id": name, "prediction": show(value), **extra}
            for name, value, extra in zip(rules.names(self.examples), values, extras, strict=True)
        ]
        if golds is None:
            return Evaluation({}, predictions, collapsed=False)
        for prediction, gold in zip(predictions, golds, strict=True):
            prediction["label"] = show(gold)
        scores = metrics.compute(self.spec.metrics, values, golds)
        return Evaluation(scores, predictions, rules.collapsed(values, golds))

    def _logits(self, outputs: Mapping[int, NDArray[Any]]) -> _Logits:
        """The logits in the features' order, in float64."""
        wanted = self.features["feature_id"][:]
        missing, unknown = set(wanted) - set(outputs), set(outputs) - set(wanted)
        if missing or unknown:
            raise ValueError(
                f"the outputs must be of exactly the {len(wanted)} features: "
                f"{len(missing)} missing, {len(unknown)} unknown"
            )
        return [np.asarray(outputs[name], dtype=np.float64) for name in wanted]

    def _by_example(self) -> list[list[int]]:
        """The rows of the features of each example, in order."""
        rows: list[list[int]] = [[] for _ in range(len(self.examples))]
        for row, example in enumerate(self.features["example_id"][:]):
            if example >= len(rows):
                raise ValueError(f"a feature is of example {example}, but there are {len(rows)} examples")
            rows[example].append(row)
        if not all(rows):
            raise ValueError(f"{sum(not own for own in rows)} of {len(rows)} examples have no feature")
        return rows


def constant_baseline(spec: TaskSpec, train_examples: datasets.Dataset, examples: datasets.Dataset) -> dict[str, float]:
    """What one fixed prediction earns: the training labels' majority (of equals the lowest id), or mean.

    Returns:
        The task's metrics on `examples`; empty for spans and where either set has no labels.
    """
    golds, seen = _golds(spec, examples), _golds(spec, train_examples)
    constant = _RULES[spec.kind].constant
    if constant is None or not golds or not seen:
        return {}
    return metrics.compute(spec.metrics, [constant(seen)] * len(golds), golds)


def write_submission(spec: TaskSpec, split: Split, predictions: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write a test set's predictions under the name and in the format that the GLUE benchmark wants.

    Args:
        spec: the task; `spec.submit_labels` decides between class names and ids.
        split: the test set.
        predictions: an `Evaluation`'s.
        folder: where the file goes; made if absent.

    Returns:
        The file: a line `index<TAB>prediction`, then one an example; regression clipped to [0, 5].

    Raises:
        UserError: for a set that has no submission file.
    """
    if not split.submission:
        raise UserError(f"task {spec.name}: {split.name} is no test set of the GLUE benchmark")
    submit = _RULES[spec.kind].submit
    path = folder / split.submission
    rows = (f"{row['id']}\t{submit(spec, row['prediction'])}\n" for row in predictions)
    write_text(path, "index\tprediction\n" + "".join(rows))
    return path


def _golds(spec: TaskSpec, examples: datasets.Dataset) -> list[Any] | None:
    """The labels as the metrics want them, or None for an unlabelled set."""
    if spec.label_column not in examples.column_names:
        return None
    return [_RULES[spec.kind].gold(label) for label in examples[spec.label_column][:]]


# --- what differs between the kinds of tasks ----------------------------------------------------------------

_Decoded = tuple[list[Any], list[dict[str, Any]]]


def _stacked(evaluator: Evaluator, logits: _Logits, width: int) -> NDArray[np.float64]:
    """One row of finite logits an example, (examples, width)."""
    own = evaluator._by_example()
    shapes = {values.shape for values in logits}
    if shapes != {(width,)}:
        raise ValueError(f"task {evaluator.spec.name} wants logits of shape ({width},), not {sorted(shapes)}")
    _refuse_non_finite(logits)
    return np.stack([logits[rows[0]] for rows in own])


def _refuse_non_finite(logits: _Logits) -> None:
    broken = [row for row, values in enumerate(logits) if not np.isfinite(values).all()]
    if broken:
        raise ValueError(
            f"the logits of {len(broken)} of {len(logits)} features are not finite, "
            f"first those of row {broken[0]}: the model has diverged"
        )


def _decode_classes(evaluator: Evaluator, logits: _Logits) -> _Decoded:
    stacked = _stacked(evaluator, logits, len(evaluator.spec.labels))
    powers = np.exp(stacked - stacked.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    return stacked.argmax(axis=1).tolist(), [{"scores": row} for row in probabilities.tolist()]


def _decode_numbers(evaluator: Evaluator, logits: _Logits) -> _Decoded:
    values: list[float] = _stacked(evaluator, logits, 1)[:, 0].tolist()
    return values, [{}] * len(values)


def _decode_spans(evaluator: Evaluator, logits: _Logits) -> _Decoded:
    own = evaluator._by_example()
    offsets = _offsets(evaluator.features)
    left_padded = evaluator.features["left_padded"][:]
    cut = [
        _unpadded(values, len(tokens), left) for values, tokens, left in zip(logits, offsets, left_padded, strict=True)
    ]
    _refuse_non_finite(cut)
    contexts = evaluator.examples[evaluator.spec.text_columns[1]]
    answers = [
        squad.best_answer(
            context,
            ((*cut[row], offsets[row]) for row in rows),
            evaluator.n_best,
            evaluator.max_answer_length,
        )
        for context, rows in zip(contexts, own, strict=True)
    ]
    return answers, [{}] * len(answers)


def _offsets(features: datasets.Dataset) -> list[NDArray[np.int32]]:
    """Each feature's offsets, (tokens, 2), read from the arrow data without a detour over lists."""
    column = features.select_columns(["offset_mapping"]).with_format("arrow")[:]["offset_mapping"]
    found: list[NDArray[np.int32]] = []
    for chunk in column.chunks:
        pairs = chunk.flatten().flatten().to_numpy().reshape(-1, 2)
        borders = np.cumsum(chunk.value_lengths().to_numpy())[:-1]
        found += np.split(pairs, borders)
    return found


def _unpadded(values: NDArray[np.float64], tokens: int, left: bool) -> NDArray[np.float64]:
    if values.ndim != 2 or len(values) != 2 or values.shape[1] < tokens:
        raise ValueError(f"a feature of {tokens} tokens wants logits of shape (2, {tokens}), not {values.shape}")
    return values[:, values.shape[1] - tokens :] if left else values[:, :tokens]


def _majority(labels: Sequence[int]) -> int:
    return int(np.bincount(labels).argmax())


def _all_same(values: Sequence[Hashable], golds: Sequence[Any]) -> bool:
    return len(set(values)) == 1 and any(gold != golds[0] for gold in golds)


def _no_spread(values: Sequence[float], golds: Sequence[float]) -> bool:
    spread = float(np.std(golds))
    return spread > 0 and float(np.std(values)) <= _COLLAPSED_SPREAD * spread


def _submitted_class(spec: TaskSpec, name: str) -> str:
    return name if spec.submit_labels else str(spec.labels.index(name))


def _submitted_number(spec: TaskSpec, value: float) -> str:
    return f"{np.clip(value, *_SIMILARITY_RANGE):.3f}"


@dataclass(frozen=True)
class _Rules:
    """How a kind of task reads logits and labels, and shows and sums them up."""

    decode: Callable[[Evaluator, _Logits], _Decoded]
    gold: Callable[[Any], Any]
    show: Callable[[TaskSpec, Any], Any]
    collapsed: Callable[[Sequence[Any], Sequence[Any]], bool]
    submit: Callable[[TaskSpec, Any], str]
    constant: Callable[[Sequence[Any]], Any] | None
    names: Callable[[datasets.Dataset], Sequence[Any]] = lambda examples: range(len(examples))


_RULES: dict[Kind, _Rules] = {
    "classification": _Rules(
        decode=_decode_classes,
        gold=int,
        show=lambda spec, value: spec.labels[value],
        collapsed=_all_same,
        submit=_submitted_class,
        constant=_majority,
    ),
    "regression": _Rules(
        decode=_decode_numbers,
        gold=float,
        show=lambda spec, value: value,
        collapsed=_no_spread,
        submit=_submitted_number,
        constant=lambda labels: float(np.mean(labels)),
    ),
    "span": _Rules(
        decode=_decode_spans,
        gold=lambda answers: list(answers["text"]),
        show=lambda spec, value: value,
        collapsed=_all_same,
        submit=lambda spec, value: str(value),
        constant=None,
        names=lambda examples: examples["id"][:],
    ),
}
