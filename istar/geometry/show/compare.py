"""Models or clouds that are compared: their names, their measures, and their differences with 95% intervals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from istar.drawing.page_folder import read_page_texts
from istar.geometry.collect.measures_file import Measurements, t_quantile
from istar.measures.catalogue import MEASURES, MEASURES_WITH_ERROR
from istar.measures.jackknife import jackknife_error
from istar.models.saved_checkpoints import ModelArgument, check_distinct_labels
from istar.runs.labels import shorten_model_name
from istar.runs.names import FINAL_NORM

TEXTS = read_page_texts("istar.geometry.show")
"""Titles, captions and explanations of the pages; see `texts.toml`."""
SUMMARY_MEASURES = tuple(measure.name for measure in MEASURES if measure.summary)
"""Measures of the last layer that the table of all models shows."""
_TOKEN_SETTINGS = ("limit", "documents", "special_tokens", "shuffle_buffer")
"""Settings of `istar measure` that decide which tokens are measured."""
SETTING_NAMES = {"intra": "intra_sim"}
"""Names on pages of settings with other names in `measures.json`."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model of a comparison, with its measures."""

    label: str  # name on the page, distinct among the compared models
    measurements: Measurements

    @property
    def is_ordered(self) -> bool:
        """Whether the states have an order, from the input to the output; clouds have none."""
        return self.measurements.kind != "points"

    @property
    def words(self) -> dict[str, str]:
        """Words for this kind of measurement, by the names in braces in texts and in the table of measures."""
        return {**TEXTS["words"][self.measurements.kind]}

    @cached_property
    def layers(self) -> dict[str, dict[str, float]]:
        """Measures of the embeddings and of each layer, before a final normalization, over all texts together."""
        return {tap: measures for tap, measures in self.measurements.all_texts.items() if tap != FINAL_NORM}

    @property
    def last_layer(self) -> str:
        """Name of the last layer, before a final normalization."""
        return list(self.layers)[-1]

    @property
    def last_layer_measures(self) -> dict[str, float]:
        """Measures of the last layer."""
        return self.layers[self.last_layer]

    @property
    def num_points(self) -> int:
        """Number of points of all clouds together, or of each state; 0 if the states have different numbers."""
        counts = [int(measures["points"]) for measures in self.layers.values()]
        return sum(counts) if not self.is_ordered else counts[0] if len(set(counts)) == 1 else 0

    @property
    def width(self) -> int:
        """Number of dimensions of each state; 0 if the states have different numbers."""
        widths = set(map(self.measurements.width_of, self.measurements.all_texts))
        return widths.pop() if len(widths) == 1 else 0

    @property
    def has_errors(self) -> bool:
        """Whether the measures have standard errors from groups of documents."""
        return any(
            math.isfinite(measures.get(f"{name}_error", math.nan))
            for measures in self.layers.values()
            for name in MEASURES_WITH_ERROR
        )

    def get_replicates(self, layer: str) -> Mapping[str, list[float]]:
        """Return a layer's values without each group of documents, by measure; empty if they are not stored."""
        return self.measurements.replicates.get(self.measurements.combined_key, {}).get(layer, {})

    @property
    def num_groups(self) -> int:
        """Number of groups of documents for standard errors; 0 for none."""
        return int(self.measurements.settings.get("groups") or 0)


def describe_points(measured: Measurements) -> list[str]:
    """Return sentences on which rows count: special places, and the groups of rows that standard errors leave out."""
    texts, words, sentences = TEXTS["reading"], TEXTS["words"][measured.kind], []
    if choice := measured.settings.get("special_tokens"):
        positions = measured.by_position.get(measured.combined_key, {}).values()
        if measured.kind == "tokens" or any(len(bins["first"]) > 1 for bins in positions):
            sentences.append(texts[f"{measured.kind}_{choice}"])
    if measured.groups:
        points = {state: measures["points"] for state, measures in measured.all_texts.items()}
        is_single = all(points[state] == number for state, number in measured.groups.items())
        numbers = list_names(sorted({f"{number:,}" for number in measured.groups.values()}))
        sentences.append(texts["single" if is_single else "grouped"].format(**words, groups=numbers))
    return sentences


def choose_labels(arguments: Sequence[ModelArgument], names: Sequence[str], noun: str = "models") -> list[str]:
    """Return distinct labels of the models on the command line, or raise a `UserError`.

    A model without a label is labelled by its name. If several models have the same name, the folder's name is added.
    """
    labels = []
    for argument, name in zip(arguments, names, strict=True):
        default_label = name if names.count(name) == 1 else f"{name} ({shorten_model_name(argument.name)})"
        labels.append(argument.label or default_label)
    check_distinct_labels(labels, noun)
    return labels


def name_model(model: Mapping[str, Any]) -> str:
    """Return the short name of `Measurements.model`, with its revision if it has one."""
    return shorten_model_name(model["name"]) + (f" at {model['revision']}" if model.get("revision") else "")


def name_measured(measured: Measurements) -> str:
    """Return the short name of a model or of a file of vectors, or the names of several clouds."""
    if measured.kind == "points" and len(measured.all_texts) > 1:
        return join_names(list(measured.all_texts))
    return name_model(measured.model)


def have_same_texts(first: MeasuredModel, other: MeasuredModel) -> bool:
    """Return whether two models were measured over texts of the same content, whatever the files are called.

    Of places and points, the hashes are those of the ids that the user gave; without ids, the result is False.
    """
    if not (first.measurements.text_hashes or _are_of_texts(first, other)):
        return False
    hashes = [sorted(model.measurements.text_hashes.values()) for model in (first, other)]
    return hashes[0] == hashes[1]


def _are_of_texts(*models: MeasuredModel) -> bool:
    return all(model.measurements.kind == "tokens" for model in models)


def describe_other_settings(models: Sequence[MeasuredModel]) -> list[str]:
    """Return sentences on the models with other texts or settings than the first; their values cannot be compared.

    Models that differ in the same way share a sentence.
    """
    labels_by_difference: dict[str, list[str]] = {}
    first = models[0]
    for other in models[1:]:
        first_settings, settings = first.measurements.settings, other.measurements.settings
        # The texts are compared by their content, the source is what is compared, and batches change no measure.
        names = sorted((first_settings.keys() | settings.keys()) - {"texts", "source", "batch_tokens"})
        changes = "; ".join(
            f"{SETTING_NAMES.get(name, name)} {settings.get(name)} instead of {first_settings.get(name)}"
            for name in names
            if first_settings.get(name) != settings.get(name)
        )
        if _are_of_texts(first, other) and not have_same_texts(first, other):
            difference = f"measured over other texts than {first.label}"
            labels_by_difference.setdefault(difference, []).append(other.label)
        if changes:
            difference = f"measured with other settings than {first.label}: {changes}"
            labels_by_difference.setdefault(difference, []).append(other.label)
    return [
        f"{list_names(labels)} {'was' if len(labels) == 1 else 'were'} {difference}."
        for difference, labels in labels_by_difference.items()
    ]


def list_names(names: Sequence[str]) -> str:
    """Join names as in a sentence: `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def join_names(names: Sequence[str]) -> str:
    """Join names as in a title: all of up to three names, otherwise the first two and the number of the others."""
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} others"
    return list_names(names)


def make_layer_rows(models: Sequence[MeasuredModel]) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer of each model, with all measures and its relative depth: NaN for a final norm."""
    for model in models:
        depths = {layer: index / max(1, len(model.layers) - 1) for index, layer in enumerate(model.layers)}
        for tap, measures in model.measurements.all_texts.items():
            depth = depths.get(tap, math.nan)
            yield {"model": model.label, "layer": tap, "relative_depth": depth, **measures}


def have_same_tokens(first: MeasuredModel, other: MeasuredModel) -> bool:
    """Return whether two models were measured over the same tokens of the same texts; True unless both read texts."""
    if not _are_of_texts(first, other):
        return True
    return have_same_texts(first, other) and not _find_changed_token_settings(first, other)


def _find_changed_token_settings(first: MeasuredModel, other: MeasuredModel) -> list[str]:
    first_settings, other_settings = (model.measurements.settings for model in (first, other))
    return [name for name in _TOKEN_SETTINGS if first_settings.get(name) != other_settings.get(name)]


def explain_no_differences(first: MeasuredModel, other: MeasuredModel) -> str:
    """Return a sentence on why no differences with intervals exist for two models, or an empty string if they exist."""
    sentence_start = f"Differences of {other.label} from {first.label} are not computed: "
    if not pair_layers(first, other):
        return f"{sentence_start}they have no {first.words['state']} of the same name."
    if _are_of_texts(first, other) and not have_same_texts(first, other):
        return f"{sentence_start}they were measured over different texts."
    if changed_settings := _find_changed_token_settings(first, other):
        return f"{sentence_start}they were measured over different tokens of the texts ({', '.join(changed_settings)})."
    for model in (first, other):
        if not model.has_errors:
            return (
                f"{sentence_start}{model.label} has no standard errors; measure it with groups, over at least as many "
                f"{model.words['examples']} as groups."
            )
    return ""


def choose_error_method(first: MeasuredModel, other: MeasuredModel) -> Literal["paired", "independent"]:
    """Return `paired` if both models have the same documents in the same groups and stored values without each group.

    Models of texts must have been measured over the same ones; places and points are paired if their ids are equal.
    Packed documents are grouped by their blocks, which depend on the tokenizer. With a limit of tokens, the tokenizer
    decides how many documents are read; documents are taken to be the same only if each group has the same number of
    tokens. The seed decides the order of shuffled documents.
    """
    settings = first.measurements.settings
    if not have_same_texts(first, other):
        return "independent"
    if settings.get("shuffle_buffer") and settings.get("seed") != other.measurements.settings.get("seed"):
        return "independent"
    is_packed = _are_of_texts(first, other) and settings.get("documents") != "separate"
    if first.num_groups != other.num_groups or is_packed:
        return "independent"
    # Numbers of points without each group.
    first_points, other_points = (
        model.get_replicates(layer).get("points", [])
        for model, layer in zip((first, other), pair_layers(first, other)[0], strict=True)
    )
    has_replicates = bool(first_points and other_points)
    is_cut = settings.get("limit") is not None or not _are_of_texts(first, other)
    if not has_replicates or (is_cut and first_points != other_points):
        return "independent"
    return "paired"


def pair_layers(first: MeasuredModel, other: MeasuredModel) -> list[tuple[str, str]]:
    """Return the pairs of states of two models that are compared.

    Clouds are paired by name, or if each model has a single one. Models with the same number of layers are paired layer
    by layer, and at the final normalization if both have one; other models at their last layers.
    """
    states, other_states = first.measurements.all_texts, other.measurements.all_texts
    if not first.is_ordered and len(states) + len(other_states) > 2:
        return [(state, state) for state in states if state in other_states]
    if len(first.layers) == len(other.layers):
        return list(zip(states, other_states, strict=False))  # the final normalization follows the layers
    return [(first.last_layer, other.last_layer)]


def compute_differences(first: MeasuredModel, other: MeasuredModel) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer and measure, with the difference `other - first` and its 95% interval.

    The `paired` error is the jackknife error of the differences without each group. A text that raises the measure
    equally in both models does not affect it. The `independent` error is the square root of the sum of the two squared
    errors. For models over the same texts it is usually too large, because their errors are usually positively
    correlated.

    Models that cannot be compared yield nothing; see `explain_no_differences`. The layers are those of `pair_layers`.
    """
    if explain_no_differences(first, other):
        return
    error_method = choose_error_method(first, other)
    quantile = t_quantile(min(first.num_groups, other.num_groups) - 1)
    for first_layer, other_layer in pair_layers(first, other):
        first_measures, measures = first.measurements.all_texts[first_layer], other.measurements.all_texts[other_layer]
        first_replicates, replicates = first.get_replicates(first_layer), other.get_replicates(other_layer)
        for name in MEASURES_WITH_ERROR:
            before, after = first_measures.get(name, math.nan), measures.get(name, math.nan)
            if error_method == "independent":
                error = math.hypot(*(values.get(f"{name}_error", math.nan) for values in (first_measures, measures)))
            elif first_replicates.get(name) and replicates.get(name):
                pairs = zip(first_replicates[name], replicates[name], strict=True)
                error = jackknife_error([other_value - first_value for first_value, other_value in pairs])
            else:
                continue
            difference, half_width = after - before, quantile * error
            if math.isfinite(difference) and math.isfinite(half_width):
                yield {
                    "model": other.label,
                    "first": first.label,
                    "layer": other_layer,
                    "is_last": other_layer == other.last_layer or not other.is_ordered,
                    "measure": name,
                    "value": after,
                    "value_of_first": before,
                    "difference": difference,
                    "error": error,
                    "low": difference - half_width,
                    "high": difference + half_width,
                    "method": error_method,
                }


def find_last_difference(first: MeasuredModel, other: MeasuredModel, measure: str) -> dict[str, Any] | None:
    """Return a measure's row of `compute_differences` for the last layers; None if it or its error is undefined."""
    rows = compute_differences(first, other)
    return next((row for row in rows if row["is_last"] and row["measure"] == measure), None)


def compute_all_differences(models: Sequence[MeasuredModel]) -> list[dict[str, Any]]:
    """Return the differences of each other model from the first one, as rows of `compute_differences`."""
    first, *others = models
    return [row for other in others for row in compute_differences(first, other)]
