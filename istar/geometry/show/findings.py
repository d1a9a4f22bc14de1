"""What a page begins with: at most five lines on unusual measures, and on differences between models and checkpoints.

The table of measures has the bounds of usual values, and the words for unusual ones. Intervals of differences describe
other documents of the same kind, not other training runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show import compare
from istar.geometry.show.compare import TEXTS, MeasuredModel, join_names, list_names
from istar.geometry.show.measured_training import MeasuredTraining
from istar.measures.catalogue import MEASURES, Measure
from istar.runs.names import FINAL_NORM, POOLED

MAX_LINES = 5
_UNUSUAL_TIMES_EVEN_SHARE = 5
"""The largest share of the variance is unusual if it is this many times the even share, 1 / d."""
_POINTS_PER_DIMENSION, _GROUPS_PER_DIMENSION = 10, 1
"""With fewer points per dimension, IsoScore and the ranks are clearly too low. With fewer groups, they are as low
however many points there are, if the points of a group have a correlation of 0.3 or more: all of them then count as at
most 1 / 0.3² points that do not depend on each other."""
_SMALLEST = 1e-3
"""Lower bound of small unusual values, which keeps their excess finite."""
_COMPARED = [measure for measure in MEASURES if measure.compared]


def find_flags(measured: Measurements) -> list[str]:
    """Return a line on what cannot be measured, and one on each unusual measure of all texts, the most unusual first.

    A measure is as unusual as its excess: the ratio of the value to its bound, or the inverse if small values are
    unusual.
    """
    flags = [flag for measure in MEASURES if measure.flag and (flag := _check_measure(measure, measured))]
    return _describe_undefined(measured) + [line for _, line in sorted(flags, key=itemgetter(0), reverse=True)]


def _describe_undefined(measured: Measurements) -> list[str]:
    norms, ratios = (_find_values(measured, name) for name in ("average_norm", "participation_ratio"))
    equal = [name_state(measured, layer) for layer, norm in norms.items() if norm >= 0 and math.isnan(ratios[layer])]
    vectors = TEXTS["words"][measured.kind]["vectors"]
    lines = (
        [f"All {vectors} of {join_names(equal)} are equal, so that measures of variance are undefined."]
        if equal
        else []
    )
    matrices = [side for side, forms in measured.matrices.items() if math.isnan(forms["raw"]["average_norm"])]
    return lines + [f"The {side} embeddings have values that are not finite, and so no measures." for side in matrices]


def _check_measure(measure: Measure, measured: Measurements) -> tuple[float, str] | None:
    """Return the excess of the layer or matrix with the most unusual value, and a line on it; None if it is usual."""
    if measure.subject == "matrices":
        values = {side: forms["raw"][measure.name] for side, forms in measured.matrices.items()}
    else:
        find_values = _FLAGGED_VALUES.get(measure.name, lambda measured: _find_values(measured, measure.name))
        values = find_values(measured)
    values = {place: value for place, value in values.items() if math.isfinite(value)}
    if not values:
        return None
    if measure.flag_at_most is not None:
        place = min(values, key=values.__getitem__)
        excess = measure.flag_at_most / max(values[place], _SMALLEST)
    else:
        place = max(values, key=values.__getitem__)
        excess = values[place] / (measure.flag_at_least or math.inf)
    if excess < 1:
        return None
    words = {**TEXTS["words"][measured.kind], "matrix": place, "layer": name_state(measured, place)}
    fields = {**measured.all_texts.get(place, {}), **words, "value": values[place], "width": measured.width_of(place)}
    if measure.subject == "matrices":
        fields["centered"] = measured.matrices[place]["centered"][measure.name]
    line = ((values[place] == 1 and measure.flag_of_one) or measure.flag).format(**fields)
    return excess, line[0].upper() + line[1:]


def _find_values(measured: Measurements, name: str) -> dict[str, float]:
    return {layer: measures.get(name, math.nan) for layer, measures in measured.all_texts.items()}


def _compare_norms(measured: Measurements) -> dict[str, float]:
    norms = _find_values(measured, "average_norm")
    # What normalizes changes the norm by design.
    norms = {state: norm for state, norm in norms.items() if "norm" not in state.lower() and state != POOLED}
    smallest = min(filter(math.isfinite, norms.values()), default=0.0)
    return {layer: norm / smallest for layer, norm in norms.items()} if smallest > 0 else {}


def _find_falls(measured: Measurements) -> dict[str, float]:
    before = _find_values(measured, "sample_inter_sim")
    after = _find_values(measured, "sample_inter_sim_without_top_5")
    return {layer: before[layer] - after[layer] for layer in before}


def _compare_first_tokens(measured: Measurements) -> dict[str, float]:
    ratios = {}
    for layer, bins in measured.by_position.get(measured.combined_key, {}).items():
        other_tokens = sum(bins["points"][1:])
        if bins["first"][:1] == [0] and other_tokens:
            summed_norm = sum(norm * count for norm, count in zip(bins["norm"][1:], bins["points"][1:], strict=True))
            ratios[layer] = bins["norm"][0] * other_tokens / summed_norm if summed_norm > 0 else math.nan
    return ratios


def _find_large_shares(measured: Measurements) -> dict[str, float]:
    """Return the largest shares of the variance that are several times as large as the share of all dimensions."""
    shares = _find_values(measured, "largest_variance_share")
    return {
        state: share if share * measured.width_of(state) >= _UNUSUAL_TIMES_EVEN_SHARE else math.nan
        for state, share in shares.items()
    }


_FLAGGED_VALUES: dict[str, Callable[[Measurements], dict[str, float]]] = {
    "average_norm": _compare_norms,
    "largest_variance_share": _find_large_shares,
    "sample_inter_sim_without_top_5": _find_falls,
    "norm_by_position": _compare_first_tokens,
}
"""Functions that compute the values by layer to compare with a flag's bound, if not the measure's own values."""


def describe_findings(models: Sequence[MeasuredModel], trainings: Sequence[MeasuredTraining] = ()) -> list[str]:
    """Return at most five lines on models, or on trainings and their last checkpoints `models`.

    First come the largest changes of IsoScore and InterSim of the last layer over the trainings. Then come the largest
    and the smallest values of the models with the same tokens as the first, and the most unusual measures of each. The
    last lines name the models with other tokens, the ranges of a single model, and a warning of few points or groups.
    """
    is_training = any(len(training.steps) > 1 for training in trainings)
    start = "At the last checkpoint: " if is_training else ""
    lines, last_lines = [], []
    if is_training:
        lines += [line for measure in _COMPARED for line in _describe_largest_change(trainings, measure)]
    if len(models) > 1:
        compared = [model for model in models if compare.have_same_tokens(models[0], model)]
        lines += [f"{start}{line}" for measure in _COMPARED for line in _rank_models(compared, measure)]
        if left_out := [model.label for model in models if model not in compared]:
            last_lines.append(
                f"{list_names(left_out)} read other tokens than {models[0].label}, so that they are not compared."
            )
    flags = [
        (rank, f"{start}{model.label}: {line}" if len(models) > 1 else f"{start}{line}")
        for model in models
        for rank, line in enumerate(find_flags(model.measurements))
    ]
    lines += [line for _, line in sorted(flags, key=itemgetter(0))]
    if len(models) == 1 and not is_training:
        measured = models[0].measurements
        last_lines += [*_describe_largest_gap(measured), *_describe_all_layers(measured)]
    last_lines += [line for model in models for line in warn_of_few_points(model.measurements)][:1]
    return [*(lines or ["No measure is unusual."])[: MAX_LINES - len(last_lines)], *last_lines]


def _rank_models(models: Sequence[MeasuredModel], measure: Measure) -> list[str]:
    if not models[0].is_ordered and max(len(model.layers) for model in models) > 1:
        return _describe_largest_difference(models, measure)
    values = {model.label: (model.last_layer_measures.get(measure.name, math.nan), model) for model in models}
    defined = sorted((pair for pair in values.values() if math.isfinite(pair[0])), key=lambda pair: pair[0])
    if len(defined) < 2 or math.isclose(defined[0][0], defined[-1][0], rel_tol=1e-6):
        return []
    (low, low_model), (high, high_model) = defined[0], defined[-1]
    row = compare.find_last_difference(low_model, high_model, measure.name)
    half_width = math.nan if row is None else (row["high"] - row["low"]) / 2
    subject, examples = measure.title + models[0].words["last_layer"], models[0].words["examples"]
    return [
        f"{subject} is largest in {high_model.label} ({high:.3g}) and smallest in "
        f"{low_model.label} ({low:.3g}). {_describe_size('difference', high - low, half_width, examples)}"
    ]


def _describe_largest_difference(models: Sequence[MeasuredModel], measure: Measure) -> list[str]:
    rows = [row for row in compare.compute_all_differences(models) if row["measure"] == measure.name]
    if not rows:
        return []
    row = max(rows, key=lambda row: abs(row["difference"]))
    size, half_width = abs(row["difference"]), (row["high"] - row["low"]) / 2
    return [
        f"{measure.title} of the cloud {row['layer']} is {row['value']:.3g} in {row['model']} and "
        f"{row['value_of_first']:.3g} in {row['first']}. "
        + _describe_size("difference", size, half_width, models[0].words["examples"])
    ]


def _describe_largest_change(trainings: Sequence[MeasuredTraining], measure: Measure) -> list[str]:
    curves = [(training, training.values_by_step(training.last_layer, measure.name)) for training in trainings]
    defined = [(training, ys[0], ys[-1]) for training, ys in curves if math.isfinite(ys[-1] - ys[0])]
    if not defined:
        return []
    training, before, after = max(defined, key=lambda change: abs(change[2] - change[1]))
    steps = training.steps
    start, end = f"step {steps[0]:,}", f"step {steps[-1]:,}"
    if training.checkpoints:
        start, end = training.checkpoints[0].label, training.checkpoints[-1].label
    subject = f"{measure.title} of the last layer"
    if len(trainings) > 1:
        subject += f" changes most in {training.label}: it"
    if f"{before:.3g}" == f"{after:.3g}":
        return [f"{subject} is the same at {start} and at {end}, to three digits: {after:.3g}."]
    examples = "sequences" if training.is_monitored else "documents"
    size = _describe_size("change", abs(after - before), training.half_width_of_change(measure.name), examples)
    verb = "rises" if after > before else "falls"
    return [f"{subject} {verb} from {before:.3g} at {start} to {after:.3g} at {end}. {size}"]


def _describe_size(noun: str, size: float, half_width: float, examples: str = "documents") -> str:
    if not math.isfinite(half_width):
        return f"The {noun} has no interval."
    interval = f"The 95% interval of the {noun}, {size:.3g} ± {half_width:.2g},"
    if size > half_width:
        return f"{interval} does not contain 0, so that the choice of the {examples} does not explain it."
    return f"{interval} contains 0, so that the choice of the {examples} may explain it."


def _describe_all_layers(measured: Measurements) -> list[str]:
    isoscores = _format_range(_find_values(measured, "isoscore"), 2)
    directions = _format_range(_find_values(measured, "participation_ratio"), 0)
    cosines = _format_range(_find_values(measured, "inter_sim"), 2)
    if not (isoscores and directions and cosines):
        return []
    words = TEXTS["words"][measured.kind]
    widths = _format_range({state: measured.width_of(state) for state in measured.all_texts}, 0)
    return [
        f"{words['variance']} is spread as if over {directions} of {widths} directions (IsoScore "
        f"{isoscores}; 1 is evenly over all, 0 a single one), and two random {words['units']} have an average cosine "
        f"of {cosines}."
    ]


def _describe_largest_gap(measured: Measurements) -> list[str]:
    if not measured.gaps:
        return []
    gap = max(measured.gaps, key=lambda gap: -math.inf if math.isnan(gap["distance"]) else gap["distance"])
    subject = f"The means of the clouds {gap['first']} and {gap['second']}"
    farthest = ", the farthest apart," if len(measured.gaps) > 1 else ""
    cosine = "" if math.isnan(gap["cosine"]) else f" and a cosine of {gap['cosine']:.2f}"
    alignment = f" The alignment of their rows is {gap['alignment']:.3g}." if "alignment" in gap else ""
    return [f"{subject}{farthest} have a distance of {gap['distance']:.3g}{cosine}.{alignment}"]


def _format_range(value_by_layer: Mapping[str, float], decimals: int) -> str:
    values = [value for value in value_by_layer.values() if math.isfinite(value)]
    if not values:
        return ""
    low, high = (f"{round(value, decimals) + 0.0:,.{decimals}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def warn_of_few_points(measured: Measurements) -> list[str]:
    """Return a line on the state with the fewest points, or groups of them, for its dimensions, if they are few."""
    words = TEXTS["words"][measured.kind]
    shares = {}
    for state, measures in measured.all_texts.items():
        width = measured.width_of(state)
        num_points, num_groups = measures["points"], measured.groups.get(state, math.inf)
        needed = (_POINTS_PER_DIMENSION * width, _GROUPS_PER_DIMENSION * width)
        shares[state] = min(num_points / needed[0], num_groups / needed[1]) if width else math.inf
    state = min(shares, key=shares.__getitem__)
    if shares[state] >= 1:
        return []
    num_points, width = measured.all_texts[state]["points"], measured.width_of(state)
    num_groups = measured.groups.get(state, num_points)
    groups = f" in {num_groups:,} groups" if num_groups != num_points else ""
    place = f" of {name_state(measured, state)}" if measured.kind != "tokens" and len(shares) > 1 else ""
    return [
        f"There are only {num_points:,.0f} {words['units']}{place}{groups} for {width:,} dimensions: IsoScore and the "
        f"ranks are too low; {words['more']}."
    ]


def name_state(measured: Measurements, state: str) -> str:
    """Return the name of a state as in a sentence: "layer 3", "the embeddings", "the cloud queries" or "the cloud"."""
    if measured.kind == "points":
        return f"the cloud {state}" if len(measured.all_texts) > 1 else "the cloud"
    name = state.replace("_", " ")
    if state.startswith("layer_"):
        return name
    is_module = measured.kind == "places" and state not in ("embeddings", FINAL_NORM)
    return f"the state {state}" if is_module else f"the {name}"
