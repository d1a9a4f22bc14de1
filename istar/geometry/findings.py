"""Sentences on what is unusual about a model's geometry, made from its measures by fixed rules.

Each rule compares a measure with a threshold. The thresholds are conventions of this project: values that most of the
published encoders and decoders of the papers do not reach in most of their layers. They rank sentences, and are no
statistical tests.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from istar.geometry.measure import Measurements
from istar.geometry.model_figures import tap_name

MOST = 4
"""Most sentences on unusual measures."""
VARIANCE_SHARE = 0.1
"""A single dimension with at least this share of a layer's variance is unusual."""
INTER_SIM = 0.5
"""An average cosine of at least this value is unusual."""
ISOSCORE = 0.05
"""An IsoScore of at most this value is unusual."""
OFFSET = 10.0
"""A dimension whose mean is at least so many typical standard deviations from 0 is unusual."""
NORM_GROWTH = 10.0
"""An average norm that grows or shrinks at least by this factor between layers is unusual."""
KURTOSIS = 100.0
"""An excess kurtosis of a dimension of at least this value is unusual."""
ROGUE_DROP = 0.25
"""An average cosine that falls by at least this value without five dimensions is unusual."""
MASSIVE_RATIO = 1000.0
"""Massive activations are larger than the median magnitude by this factor, and above 100."""
FIRST_POSITION = 3.0
"""An average norm of the tokens at position 0 that is at least so many times that of the others is unusual."""
SHIFTED, NOT_SHIFTED = 0.5, 0.9
"""Embeddings with I(W) below the first value raw, and above the second one centered, differ by a common shift."""
TOKENS_PER_DIMENSION = 10
"""With fewer tokens per dimension, IsoScore and the ranks are clearly too low."""

_WITHOUT_TOP_5 = "sample_inter_sim_without_top_5"

Layers = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Finding:
    """A sentence on an unusual measure."""

    sentence: str
    excess: float  # how many times the threshold the measure is, or the threshold the measure; at least 1


def sentences(measured: Measurements) -> list[str]:
    """Return at most five sentences: the most unusual measures first, then a warning if there are too few tokens.

    If no measure is unusual, the first sentence says so, with the range of IsoScore and InterSim. All texts count
    together.
    """
    layers = measured.all_texts
    unusual = [
        *_dominant_dimension(layers),
        *_common_direction(layers),
        *_few_directions(layers),
        *_offset_dimension(measured),
        *_norm_growth(layers),
        *_heavy_tails(layers),
        *_rogue_dimensions(layers),
        *_massive_activations(measured),
        *_first_position(measured),
        *_shifted_embeddings(measured),
    ]
    unusual.sort(key=lambda finding: -finding.excess)
    lines = [finding.sentence for finding in unusual[:MOST]] or [_nothing_unusual(layers)]
    return [*lines, *_too_few_tokens(measured)]


def _extreme(layers: Layers, measure: str, largest: bool = True) -> tuple[str, float]:
    """Return the layer with the largest or smallest finite value of a measure, and the value; NaN if there is none."""
    values = {tap: figures.get(measure, math.nan) for tap, figures in layers.items()}
    finite = {tap: value for tap, value in values.items() if math.isfinite(value)}
    if not finite:
        return "", math.nan
    tap = (max if largest else min)(finite, key=lambda tap: finite[tap])
    return tap, finite[tap]


def _dominant_dimension(layers: Layers) -> Iterator[Finding]:
    tap, share = _extreme(layers, "largest_variance_share")
    if share >= VARIANCE_SHARE:
        yield Finding(f"One dimension holds {share:.0%} of the variance of {_named(tap)}.", share / VARIANCE_SHARE)


def _common_direction(layers: Layers) -> Iterator[Finding]:
    tap, cosine = _extreme(layers, "inter_sim")
    if cosine >= INTER_SIM:
        sentence = f"All states of {_named(tap)} share a direction: two random tokens have an average cosine of "
        yield Finding(f"{sentence}{cosine:.2f}.", cosine / INTER_SIM)


def _few_directions(layers: Layers) -> Iterator[Finding]:
    tap, score = _extreme(layers, "isoscore", largest=False)
    if score <= ISOSCORE:
        directions = layers[tap]["participation_ratio"]
        yield Finding(
            f"The variance of {_named(tap)} is concentrated: IsoScore {score:.3f}, as if it were spread over "
            f"{directions:.1f} directions.",
            # A score of 0 would be infinitely unusual.
            ISOSCORE / max(score, 1e-3),
        )


def _offset_dimension(measured: Measurements) -> Iterator[Finding]:
    by_tap = measured.extremes.get(measured.combined_key, {})
    offsets = {
        (tap, int(extreme["dimension"])): abs(extreme["mean_by_typical_deviation"])
        for tap, extremes in by_tap.items()
        for extreme in extremes
        if math.isfinite(extreme["mean_by_typical_deviation"])
    }
    if not offsets:
        return
    (tap, dimension), offset = max(offsets.items(), key=lambda item: item[1])
    if offset >= OFFSET:
        sentence = f"The mean of dimension {dimension} of {_named(tap)} is {offset:.0f} typical standard deviations "
        yield Finding(f"{sentence}from 0.", offset / OFFSET)


def _norm_growth(layers: Layers) -> Iterator[Finding]:
    (low_tap, low), (high_tap, high) = (_extreme(layers, "average_norm", largest) for largest in (False, True))
    if low > 0 and high >= NORM_GROWTH * low:
        sentence = (
            f"The average norm is {high / low:.0f} times as large in {_named(high_tap)} as in {_named(low_tap)}: "
        )
        yield Finding(f"{sentence}{high:.3g} and {low:.3g}.", high / low / NORM_GROWTH)


def _heavy_tails(layers: Layers) -> Iterator[Finding]:
    tap, kurtosis = _extreme(layers, "largest_kurtosis")
    if kurtosis >= KURTOSIS:
        sentence = f"A dimension of {_named(tap)} has rare, very large values: its excess kurtosis is {kurtosis:,.0f}."
        # The scale of a fourth moment; the root compares it with the other measures.
        yield Finding(sentence, math.sqrt(kurtosis / KURTOSIS))


def _rogue_dimensions(layers: Layers) -> Iterator[Finding]:
    drops = {
        tap: {"drop": figures.get("sample_inter_sim", math.nan) - figures.get(_WITHOUT_TOP_5, math.nan)}
        for tap, figures in layers.items()
    }
    tap, drop = _extreme(drops, "drop")
    if drop >= ROGUE_DROP:
        before, after = layers[tap]["sample_inter_sim"], layers[tap][_WITHOUT_TOP_5]
        yield Finding(
            f"Five dimensions carry much of the common direction of {_named(tap)}: without them, the average cosine of "
            f"a sample of tokens falls from {before:.2f} to {after:.2f}.",
            drop / ROGUE_DROP,
        )


def _massive_activations(measured: Measurements) -> Iterator[Finding]:
    by_tap = measured.massive.get(measured.combined_key, {})
    largest = {tap: activations[0] for tap, activations in by_tap.items() if activations}
    if not largest:
        return
    tap = max(largest, key=lambda tap: largest[tap].get("ratio") or 0.0)
    activation = largest[tap]
    ratio = activation.get("ratio") or MASSIVE_RATIO
    yield Finding(
        f"{_named(tap)[0].upper()}{_named(tap)[1:]} has massive activations: {activation['value']:,.0f} in dimension "
        f"{activation['dimension']} at position {activation['position']} is {ratio:,.0f} times the median magnitude.",
        ratio / MASSIVE_RATIO,
    )


def _first_position(measured: Measurements) -> Iterator[Finding]:
    ratios = {}
    for tap, columns in measured.by_position.get(measured.combined_key, {}).items():
        if len(columns["first"]) < 2 or columns["first"][0] != 0:
            continue
        rest = sum(map(math.prod, zip(columns["norm"][1:], columns["tokens"][1:], strict=True)))
        if rest > 0:
            ratios[tap] = {"ratio": columns["norm"][0] / (rest / sum(columns["tokens"][1:]))}
    tap, ratio = _extreme(ratios, "ratio")
    if ratio >= FIRST_POSITION:
        yield Finding(
            f"The first token of the model's input has {ratio:.0f} times the average norm of the others in "
            f"{_named(tap)}.",
            ratio / FIRST_POSITION,
        )


def _shifted_embeddings(measured: Measurements) -> Iterator[Finding]:
    for which, forms in measured.matrices.items():
        raw, centered = (forms[form]["partition_isotropy_both"] for form in ("raw", "centered"))
        if raw <= SHIFTED and centered >= NOT_SHIFTED:
            yield Finding(
                f"The {which} embeddings are isotropic but for a common shift: centering raises I(W) from {raw:.2f} "
                f"to {centered:.2f}.",
                SHIFTED / max(raw, 1e-3),
            )


def _nothing_unusual(layers: Layers) -> str:
    low, high = (_extreme(layers, "isoscore", largest)[1] for largest in (False, True))
    cosine = _extreme(layers, "inter_sim")[1]
    return (
        f"No layer is unusual: IsoScore is {low:.2f} to {high:.2f}, and the average cosine of two tokens is at most "
        f"{cosine:.2f}."
    )


def _too_few_tokens(measured: Measurements) -> Iterator[str]:
    tokens = next(iter(measured.all_texts.values()))["tokens"]
    dimensions = measured.matrices["input"]["raw"]["dimensions"]
    if tokens < TOKENS_PER_DIMENSION * dimensions:
        yield (
            f"There are only {tokens:,.0f} tokens for {dimensions:,} dimensions: IsoScore and the ranks are too low; "
            "measure longer texts."
        )


def _named(tap: str) -> str:
    """Return the name of a layer in a sentence."""
    return tap_name(tap) if tap.startswith("layer_") else f"the {tap_name(tap)}"
