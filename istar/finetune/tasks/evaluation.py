"""Predictions and metrics of a whole data set from the logits of its features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import scipy.special
from numpy.typing import NDArray

from istar.errors import NonFiniteError
from istar.files.writing import write_text
from istar.finetune.tasks import metrics, squad
from istar.finetune.tasks.loading import ROW_COLUMN
from istar.runs.tasks import Split, TaskSpec


@dataclass(frozen=True)
class Evaluation:
    """The predictions of a model for a data set, and their metrics."""

    metrics: dict[str, float]  # the task's metrics; empty for data without labels
    # One dict per example, in the order of the examples. `id` is the row number in the source, or for spans the id in
    # the data set; `prediction` and `label` (if known) are class names, numbers, or an answer text and the list of gold
    # texts. Classification adds `scores`, the probability of each class.
    predictions: list[dict[str, Any]]
    collapsed: bool  # whether the labels vary but the predictions do not; False without labels


@dataclass(frozen=True)
class Evaluator:
    """Turn the logits of a model for one split into predictions, and into metrics if the split has labels."""

    spec: TaskSpec
    examples: datasets.Dataset
    features: datasets.Dataset  # result of `featurize(..., training=False)` for the examples
    n_best: int = 20  # for spans, number of start positions and of end positions in each window that are combined
    max_answer_length: int = 30  # for spans, maximum length of an answer in tokens

    def __call__(self, outputs: Mapping[int, NDArray[Any]]) -> Evaluation:
        """Decode the logits into one prediction per example, and score the predictions if there are labels.

        `outputs` are logits by `feature_id`, in any order. The shape is (classes,) for classification, (1,) for
        regression and (2, tokens) for spans (start logits, then end logits, without padding).

        Raises:
            ValueError: if the ids differ from the features'.
            NonFiniteError: if logits are not finite.
        """
        logits = self._sort_logits_by_row(outputs)
        extra_fields: list[dict[str, Any]] = [{}] * len(self.examples)
        if self.spec.kind == "span":
            ids, predicted_values = self.examples["id"][:], self._decode_spans(logits)
        else:
            logit_vectors = np.stack(logits)
            is_sample = ROW_COLUMN in self.examples.column_names
            ids = self.examples[ROW_COLUMN][:] if is_sample else range(len(logit_vectors))
            if self.spec.kind == "regression":
                predicted_values = logit_vectors[:, 0].tolist()
            else:
                predicted_values = logit_vectors.argmax(axis=1).tolist()
                extra_fields = [{"scores": scores} for scores in scipy.special.softmax(logit_vectors, axis=1).tolist()]
        predictions = [
            {"id": id_, "prediction": self._to_readable(predicted_value), **fields}
            for id_, predicted_value, fields in zip(ids, predicted_values, extra_fields, strict=True)
        ]
        references = _read_references(self.spec, self.examples)
        if references is None:
            return Evaluation({}, predictions, collapsed=False)
        for prediction, reference in zip(predictions, references, strict=True):
            prediction["label"] = self._to_readable(reference)
        scores = metrics.compute(self.spec.metrics, predicted_values, references)
        return Evaluation(scores, predictions, _is_collapsed(self.spec, predicted_values, references))

    def _sort_logits_by_row(self, outputs: Mapping[int, NDArray[Any]]) -> list[NDArray[np.float64]]:
        ids = self.features["feature_id"][:]
        missing, unknown = set(ids) - set(outputs), set(outputs) - set(ids)
        if missing or unknown:
            raise ValueError(
                f"the outputs must belong to exactly the {len(ids)} features: "
                f"{len(missing)} missing, {len(unknown)} unknown"
            )
        logits = [np.asarray(outputs[id_], dtype=np.float64) for id_ in ids]
        bad_rows = [row_index for row_index, row_logits in enumerate(logits) if not np.isfinite(row_logits).all()]
        if bad_rows:
            raise NonFiniteError(
                f"task {self.spec.name}: the logits of {len(bad_rows)} of {len(logits)} features are not finite, "
                f"the first in row {bad_rows[0]}: the model has diverged, or overflows its data type"
            )
        return logits

    def _decode_spans(self, logits: list[NDArray[np.float64]]) -> list[str]:
        windows_by_example: list[list[Any]] = [[] for _ in range(len(self.examples))]
        for example_index, window_logits, offsets in zip(
            self.features["example_id"][:], logits, _read_offsets(self.features), strict=True
        ):
            windows_by_example[example_index].append((*window_logits, offsets))
        contexts = self.examples[self.spec.text_columns[1]]
        return [
            squad.best_answer(context, windows, self.n_best, self.max_answer_length)
            for context, windows in zip(contexts, windows_by_example, strict=True)
        ]

    def _to_readable(self, value: Any) -> Any:
        return self.spec.labels[value] if self.spec.kind == "classification" else value


def constant_baseline(spec: TaskSpec, train_examples: datasets.Dataset, examples: datasets.Dataset) -> dict[str, float]:
    """Return the metrics of a constant prediction on `examples`; empty for spans and if either set lacks labels.

    The constant is the majority class of the training labels (the lowest id in a tie), or their mean for regression.
    """
    references, train_labels = _read_references(spec, examples), _read_references(spec, train_examples)
    if spec.kind == "span" or not references or not train_labels:
        return {}
    is_regression = spec.kind == "regression"
    constant = float(np.mean(train_labels)) if is_regression else int(np.bincount(train_labels).argmax())
    return metrics.compute(spec.metrics, [constant] * len(references), references)


def write_submission(spec: TaskSpec, split: Split, predictions: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write the `predictions` of an `Evaluation` as a submission file for the GLUE benchmark, and return its path.

    The file has a header and one line `index<TAB>prediction` per example. A prediction is a class name or id, depending
    on `spec.submit_labels`, or a score clipped to [0, 5]. The folder is created if absent.
    """

    def format_prediction(prediction: Any) -> str:
        if spec.kind == "regression":
            return f"{np.clip(prediction, 0, 5):.3f}"  # STS-B, GLUE's only regression task, has scores from 0 to 5
        uses_names = spec.submit_labels or spec.kind == "span"
        return str(prediction if uses_names else spec.labels.index(prediction))

    path = folder / split.submission
    rows = (f"{row['id']}\t{format_prediction(row['prediction'])}\n" for row in predictions)
    write_text(path, "index\tprediction\n" + "".join(rows))
    return path


def _read_references(spec: TaskSpec, examples: datasets.Dataset) -> list[Any] | None:
    if spec.label_column not in examples.column_names:
        return None
    labels = examples[spec.label_column][:]
    if spec.kind == "span":
        return [list(answers["text"]) for answers in labels]
    return [float(label) if spec.kind == "regression" else int(label) for label in labels]


def _is_collapsed(spec: TaskSpec, values: Sequence[Any], references: Sequence[Any]) -> bool:
    """Return whether the predicted values are constant although the references vary.

    Numbers count as constant if their standard deviation is at most 1% of the references' standard deviation.
    """
    if spec.kind == "regression":
        reference_spread = float(np.std(references))
        return reference_spread > 0 and float(np.std(values)) <= 0.01 * reference_spread
    return len(set(values)) == 1 and any(reference != references[0] for reference in references)


def _read_offsets(features: datasets.Dataset) -> list[NDArray[np.int32]]:
    """Return the token offsets of each feature, (tokens, 2), converted from Arrow without slow Python lists."""
    table = features.select_columns(["offset_mapping"]).with_format("arrow")[:].combine_chunks()
    column = table["offset_mapping"].chunk(0)
    offsets = column.flatten().flatten().to_numpy().reshape(-1, 2)
    return np.split(offsets, np.cumsum(column.value_lengths().to_numpy())[:-1])
