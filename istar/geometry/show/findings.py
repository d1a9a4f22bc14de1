"""Sentences on what is unusual about a model's geometry, made from its measures by fixed rules.

Each rule compares a measure with a threshold. The thresholds are conventions of this project: values that most of the
published encoders and decoders of the papers do not reach in most of their layers. They rank sentences, and are no
statistical tests.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from istar.geometry.collect.layer_outputs import FINAL_NORM
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show.model_figures import format_tap_name

MAX_FINDINGS = 4
"""Most sentences on unusual measures."""
VARIANCE_SHARE = 0.1
"""A single dimension with at least this share of a layer's variance is unusual."""
INTER_SIM = 0.5
"""An average cosine of at least this value is unusual."""
ISOSCORE = 0.05
"""An IsoScore of at most this value is unusual."""
OFFSET = 5.0
"""A dimension whose mean is at least this number of typical standard deviations from 0 is unusual. From this value on,
the page counts it as an outlier dimension."""
NORM_GROWTH = 10.0
"""An average norm that differs at least by this factor between layers is unusual. The final normalization, whose task
it is to change the norm, does not count."""
KURTOSIS = 100.0
"""An excess kurtosis of a dimension of at least this value is unusual."""
ROGUE_DROP = 0.25
"""An average cosine that falls by at least this value without five dimensions is unusual."""
MASSIVE_RATIO = 1000.0
"""Massive activations are larger than the median magnitude by this factor, and above 100."""
FIRST_POSITION = 3.0
"""An average norm of the tokens at position 0 that is at least this multiple of that of the others is unusual."""
SHIFTED, NOT_SHIFTED = 0.5, 0.9
"""Embeddings with I(W) of at most the first value are unusual; with the second one or more after centering, a common
shift is all that makes them so."""
TOKENS_PER_DIMENSION = 10
"""With fewer tokens per dimension, IsoScore and the ranks are clearly too low."""

_WITHOUT_TOP_5 = "sample_inter_sim_without_top_5"

Layers = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Finding:
    """A sentence on an unusual measure."""

    sentence: str
    excess: float  # ratio of the measure to its threshold, or the inverse if small values are unusual; at least 1


def describe_findings(measured: Measurements) -> list[str]:
    """Return at most six sentences on a model, over all its texts together.

    They are on its most unusual measures, the most unusual one first, or say that nothing is unusual. Then come the
    range of IsoScore and InterSim over the layers, with their meaning, and a warning if there are too few tokens.
    """
    layers = measured.all_texts
    unusual = [
        *_find_dominant_dimension(layers),
        *_find_common_direction(layers),
        *_find_few_directions(measured),
        *_find_offset_dimension(measured),
        *_find_norm_growth(layers),
        *_find_heavy_tails(layers),
        *_find_rogue_dimensions(layers),
        *_find_massive_activations(measured),
        *_find_large_first_token(measured),
        *_find_anisotropic_embeddings(measured),
    ]
    unusual.sort(key=lambda finding: -finding.excess)
    sentences = [finding.sentence for finding in unusual[:MAX_FINDINGS]] or ["No measure is unusual."]
    return [*sentences, *_describe_all_layers(measured), *warn_of_too_few_tokens(measured)]


def _find_extreme(layers: Layers, name: str, find_largest: bool = True) -> tuple[str, float]:
    """Return the layer with the largest or smallest finite value of a measure, and the value.

    If no value is finite, the layer is an empty string and the value NaN.
    """
    value_by_tap = {tap: measures.get(name, math.nan) for tap, measures in layers.items()}
    finite_by_tap = {tap: value for tap, value in value_by_tap.items() if math.isfinite(value)}
    if not finite_by_tap:
        return "", math.nan
    tap = (max if find_largest else min)(finite_by_tap, key=lambda tap: finite_by_tap[tap])
    return tap, finite_by_tap[tap]


def _find_dominant_dimension(layers: Layers) -> Iterator[Finding]:
    """Yield a finding if a single dimension holds a large share of a layer's variance."""
    tap, share = _find_extreme(layers, "largest_variance_share")
    if share >= VARIANCE_SHARE:
        yield Finding(f"One dimension holds {share:.0%} of the variance of {name_layer(tap)}.", share / VARIANCE_SHARE)


def _find_common_direction(layers: Layers) -> Iterator[Finding]:
    """Yield a finding if the average cosine of two tokens is large in a layer."""
    tap, cosine = _find_extreme(layers, "inter_sim")
    if cosine >= INTER_SIM:
        sentence = f"All states of {name_layer(tap)} share a direction: two random tokens have an average cosine of "
        yield Finding(f"{sentence}{cosine:.2f}.", cosine / INTER_SIM)


def _find_few_directions(measured: Measurements) -> Iterator[Finding]:
    """Yield a finding if IsoScore is small in a layer."""
    layers = measured.all_texts
    tap, score = _find_extreme(layers, "isoscore", find_largest=False)
    if score <= ISOSCORE:
        directions = layers[tap]["participation_ratio"]
        yield Finding(
            f"The variance of {name_layer(tap)} is concentrated: IsoScore {score:.3f}, as if it were spread over "
            f"{directions:.1f} of {measured.width:,} directions.",
            # The lower bound keeps the excess finite for a score of 0.
            ISOSCORE / max(score, 1e-3),
        )


def _find_offset_dimension(measured: Measurements) -> Iterator[Finding]:
    """Yield a finding if the mean of a dimension is many typical standard deviations from 0."""
    extremes_by_tap = measured.extremes.get(measured.combined_key, {})
    offset_by_place = {
        (tap, int(extreme["dimension"])): abs(extreme["mean_by_typical_deviation"])
        for tap, extremes in extremes_by_tap.items()
        for extreme in extremes
        if math.isfinite(extreme["mean_by_typical_deviation"])
    }
    if not offset_by_place:
        return
    tap, dimension = max(offset_by_place, key=lambda place: offset_by_place[place])
    offset = offset_by_place[tap, dimension]
    if offset >= OFFSET:
        sentence = (
            f"Dimension {dimension} of {name_layer(tap)} is an outlier: its mean is {offset:.0f} typical standard "
        )
        yield Finding(f"{sentence}deviations from 0.", offset / OFFSET)


def _find_norm_growth(layers: Layers) -> Iterator[Finding]:
    """Yield a finding if the average norm differs by a large factor between layers."""
    layers_before_norm = {tap: measures for tap, measures in layers.items() if tap != FINAL_NORM}
    (low_tap, low), (high_tap, high) = (
        _find_extreme(layers_before_norm, "average_norm", find_largest) for find_largest in (False, True)
    )
    if low > 0 and high >= NORM_GROWTH * low:
        yield Finding(
            f"The average norm is {high / low:.0f} times as large in {name_layer(high_tap)} as in "
            f"{name_layer(low_tap)}: {high:.3g} and {low:.3g}.",
            high / low / NORM_GROWTH,
        )


def _find_heavy_tails(layers: Layers) -> Iterator[Finding]:
    """Yield a finding if a dimension of a layer has a large excess kurtosis."""
    tap, kurtosis = _find_extreme(layers, "largest_kurtosis")
    if kurtosis >= KURTOSIS:
        sentence = (
            f"A dimension of {name_layer(tap)} has rare, very large values: its excess kurtosis is {kurtosis:,.0f}."
        )
        # The root makes the excess of a fourth moment comparable with that of the other measures.
        yield Finding(sentence, math.sqrt(kurtosis / KURTOSIS))


def _find_rogue_dimensions(layers: Layers) -> Iterator[Finding]:
    """Yield a finding if the average cosine of a layer falls far without five dimensions."""
    drop_by_tap = {
        tap: {"drop": measures.get("sample_inter_sim", math.nan) - measures.get(_WITHOUT_TOP_5, math.nan)}
        for tap, measures in layers.items()
    }
    tap, drop = _find_extreme(drop_by_tap, "drop")
    if drop >= ROGUE_DROP:
        before, after = layers[tap]["sample_inter_sim"], layers[tap][_WITHOUT_TOP_5]
        yield Finding(
            f"Five dimensions carry much of the common direction of {name_layer(tap)}: without them, the average "
            f"cosine of a sample of tokens falls from {before:.2f} to {after:.2f}.",
            drop / ROGUE_DROP,
        )


def _find_massive_activations(measured: Measurements) -> Iterator[Finding]:
    """Yield a finding on the largest massive activation of all layers, if there is any."""
    activations_by_tap = measured.massive.get(measured.combined_key, {})
    largest_by_tap = {tap: activations[0] for tap, activations in activations_by_tap.items() if activations}
    if not largest_by_tap:
        return
    tap = max(largest_by_tap, key=lambda tap: largest_by_tap[tap].get("ratio") or 0.0)
    activation = largest_by_tap[tap]
    # The ratio is missing if the median is 0, and in files of earlier versions.
    ratio, subject = activation.get("ratio") or MASSIVE_RATIO, name_layer(tap)
    yield Finding(
        f"{subject[0].upper()}{subject[1:]} has massive activations: {activation['value']:,.0f} in dimension "
        f"{activation['dimension']} at position {activation['position']} is {ratio:,.0f} times the median magnitude.",
        ratio / MASSIVE_RATIO,
    )


def _find_large_first_token(measured: Measurements) -> Iterator[Finding]:
    """Yield a finding if the first token of the model's input has a far larger norm than the others in a layer."""
    measures_by_tap = {}
    for tap, columns in measured.by_position.get(measured.combined_key, {}).items():
        # The comparison needs tokens at position 0, which are a bin of their own, and in another bin.
        if len(columns["first"]) < 2 or columns["first"][0] != 0:
            continue
        other_bins = zip(columns["norm"][1:], columns["tokens"][1:], strict=True)
        sum_of_other_norms = sum(average_norm * num_tokens for average_norm, num_tokens in other_bins)
        if sum_of_other_norms > 0:
            measures_by_tap[tap] = {"ratio": columns["norm"][0] / (sum_of_other_norms / sum(columns["tokens"][1:]))}
    tap, ratio = _find_extreme(measures_by_tap, "ratio")
    if ratio >= FIRST_POSITION:
        yield Finding(
            f"The first token of the model's input has {ratio:.0f} times the average norm of the others in "
            f"{name_layer(tap)}.",
            ratio / FIRST_POSITION,
        )


def _find_anisotropic_embeddings(measured: Measurements) -> Iterator[Finding]:
    """Yield a finding for each anisotropic embedding matrix, which says whether a common shift makes it so."""
    for side, forms in measured.matrices.items():
        raw, centered = (forms[form]["partition_isotropy_both"] for form in ("raw", "centered"))
        anisotropy = classify_anisotropy(raw, centered)
        if anisotropy is None:
            continue
        sentence = (
            f"The {side} embeddings are isotropic but for a common shift: centering raises I(W) from {raw:.2f} to "
            f"{centered:.2f}."
            if anisotropy == "shifted"
            else f"The {side} embeddings are anisotropic: I(W), which is at most 1, is {raw:.2f}, and {centered:.2f} "
            "after centering."
        )
        yield Finding(sentence, SHIFTED / max(raw, 1e-3))


def _describe_all_layers(measured: Measurements) -> Iterator[str]:
    """Yield a sentence with the ranges of IsoScore and InterSim over the layers, if both are defined in any layer."""
    texts = ", over all texts together" if len(measured.sources) > 1 else ""
    isoscores, directions, cosines = (
        _format_range(measured.all_texts, name, decimals)
        for name, decimals in (("isoscore", 2), ("participation_ratio", 0), ("inter_sim", 2))
    )
    if isoscores and directions and cosines:
        yield (
            f"In all layers{texts}, the variance is spread as if over {directions} of {measured.width:,} directions "
            f"(IsoScore {isoscores}; 1 is evenly over all, 0 a single one), and two random tokens have an average "
            f"cosine of {cosines}."
        )


def _format_range(layers: Layers, name: str, decimals: int) -> str:
    """Return the range of a measure over the layers as text, such as `0.14 to 0.39`; empty if it is undefined."""
    low, high = (_find_extreme(layers, name, find_largest)[1] for find_largest in (False, True))
    if not math.isfinite(low):
        return ""
    low_text, high_text = (f"{value:,.{decimals}f}" for value in (low, high))
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def name_layer(tap: str) -> str:
    """Return the name of a layer as in a sentence: "layer 3", but "the embeddings" with an article."""
    return format_tap_name(tap) if tap.startswith("layer_") else f"the {format_tap_name(tap)}"


def warn_of_too_few_tokens(measured: Measurements) -> Iterator[str]:
    """Yield a warning if there are fewer than `TOKENS_PER_DIMENSION` tokens per dimension."""
    num_tokens = next(iter(measured.all_texts.values()))["tokens"]
    num_dimensions = measured.width
    if num_tokens < TOKENS_PER_DIMENSION * num_dimensions:
        yield (
            f"There are only {num_tokens:,.0f} tokens for {num_dimensions:,} dimensions: IsoScore and the ranks are "
            "too low; measure longer texts."
        )


def classify_anisotropy(raw: float, centered: float) -> Literal["shifted", "anisotropic"] | None:
    """Return whether an unusually anisotropic embedding matrix is only `shifted`, or `anisotropic` beyond that.

    Args:
        raw: I(W) of the matrix over both signs of the eigenvectors.
        centered: the same of the centered matrix.

    Returns:
        None if the matrix is not unusually anisotropic, or I(W) is undefined.
    """
    if not raw <= SHIFTED or math.isnan(centered):
        return None
    return "shifted" if centered >= NOT_SHIFTED else "anisotropic"
