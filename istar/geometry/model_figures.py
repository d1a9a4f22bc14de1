"""What the figures of `istar measure` show, as numbers: the plots that `istar.figures.drawing` draws."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from istar.figures.plot import Line, Panel, Plot
from istar.geometry.measure import COMBINED, Measured
from istar.geometry.spheres import Sphere
from istar.geometry.taps import EMBEDDINGS, FINAL_NORM

NAMES = {
    "isoscore": "IsoScore*",
    "isoscore_unbiased": "IsoScore, unbiased",
    "inter_sim": "InterSim",
    "intra_sim": "IntraSim",
    "two_nn": "TwoNN dimension",
    "effective_rank": "effective rank",
    "participation_ratio": "participation ratio",
    "average_norm": "average norm",
    "norm_ratio": "norm ratio",
}
"""The measures that are drawn, as the figures and tables call them."""
FORMS = {"raw": "raw", "centered": "centered", "post_processed": "post-processed"}
_LINES, _LONGEST_LABEL, _TICKS = 5, 32, 6
_STATES_ROUNDING, _MATRIX_ROUNDING = 1e-4, 1e-6
"""Singular values of so small a part of the largest are rounding: of a float32 scatter, and of float32 points."""


def layer_plots(measured: Measured) -> list[Plot]:
    """A line for each text: its figures by layer."""
    return [
        Plot(
            name,
            title,
            caption,
            "line",
            "layer",
            tuple(panel for key in keys if (panel := _layer_panel(measured, key)) is not None),
            x_names=_tick_names(list(taps_of(measured))),
            ink=COMBINED,
        )
        for name, title, caption, keys in _LAYER_PLOTS
    ]


_LAYER_PLOTS = (
    (
        "isotropy",
        "IsoScore by layer",
        "How evenly the variance is spread over all directions: 1 for all alike, 0 for a single one; blind to where "
        "the mean is. IsoScore* has ζ = 0 and is biased towards 0 for few tokens, the other form is not.",
        ("isoscore", "isoscore_unbiased"),
    ),
    (
        "directions",
        "InterSim and IntraSim by layer",
        "InterSim: mean cosine of any two tokens' states. IntraSim: of two occurrences of one token, mean over token "
        "types. Where both are near 1 there is one direction; where IntraSim alone is, context changes little.",
        ("inter_sim", "intra_sim"),
    ),
    (
        "dimension",
        "Intrinsic dimension and rank by layer",
        "TwoNN of a sample of the tokens: of how many dimensions the cloud is close by. Effective rank and "
        "participation ratio of the centered spectrum: how many directions it spans; the first counts small ones, "
        "the second the largest alone.",
        ("two_nn", "effective_rank", "participation_ratio"),
    ),
    (
        "norms",
        "Norms by layer",
        "Average norm of the states, and the norm of their mean divided by it: 0 for a cloud about the origin, 1 "
        "where all states are one.",
        ("average_norm", "norm_ratio"),
    ),
)


def not_drawn(plot: Plot) -> list[str]:
    """Names of the measures that a plot of `layer_plots` lacks, because no layer has a number."""
    keys = next(keys for name, *_, keys in _LAYER_PLOTS if name == plot.name)
    return [NAMES[key] for key in keys if NAMES[key] not in {panel.y_label for panel in plot.panels}]


def taps_of(measured: Measured) -> dict[str, dict[str, float]]:
    """Figures by tap, of all texts together."""
    return measured.sources[whole(measured)]


def whole(measured: Measured) -> str:
    """The name under which all texts together stand."""
    return COMBINED if COMBINED in measured.sources else next(iter(measured.sources))


def tap_name(tap: str) -> str:
    """A tap in words."""
    return tap.replace("_", " ")


def _layer_panel(measured: Measured, key: str) -> Panel | None:
    lines = tuple(
        Line(label, tuple(map(float, range(len(own)))), tuple(figures.get(key, math.nan) for figures in own.values()))
        for label, own in zip(_labels(list(measured.sources)), measured.sources.values(), strict=True)
        if any(math.isfinite(figures.get(key, math.nan)) for figures in own.values())
    )
    return Panel("", "", lines, "", NAMES[key]) if lines else None


def _labels(names: Sequence[str]) -> list[str]:
    """Names that a legend has room for, all different."""
    labels: list[str] = []
    for name in names:
        plain = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split()) or "text"
        label = plain if len(plain) <= _LONGEST_LABEL else f"{plain[: _LONGEST_LABEL - 1]}…"
        # matplotlib leaves out of a legend what begins with an underscore.
        label = f" {label}" if label.startswith("_") else label
        labels.append(f"{label} ({len(labels) + 1})" if label in labels else label)
    return labels


def _tick_names(taps: Sequence[str]) -> dict[float, str]:
    """The first and the last tap by name, and as many numbers between them as have room."""
    end = len(taps) - 1 if taps[-1] == FINAL_NORM else None
    layers = len(taps) - 1 - (end is not None)
    step = math.ceil(layers / _TICKS) or 1
    numbers = [number for number in range(step, layers + 1, step) if end is None or end - number >= step]
    first = {0.0: "emb."} if taps[0] == EMBEDDINGS else {}
    last = {} if end is None else {float(end): "final\nnorm"}
    return {**first, **{float(number): str(number) for number in numbers}, **last}


def spectra(measured: Measured) -> Plot:
    """Singular values of the hidden states."""
    own = measured.spectra.get(whole(measured), {})
    panels = []
    for form in ("raw", "centered"):
        lines = [_decay(tap_name(tap), own[tap][form], _STATES_ROUNDING) for tap in _some(list(own))]
        panels += [Panel("", FORMS[form], tuple(lines), "", "singular value / largest")] if lines else []
    return Plot(
        "spectra",
        "Singular values of the hidden states",
        "Each layer's singular values, divided by its largest, of the states as they are and about their mean. A "
        "first value far above the others in the raw spectrum that is gone in the centered one is a shift of the "
        "cloud, no cone. What is below 1e-4 of the largest is rounding, and left out. All texts together.",
        "line",
        "number of the singular value",
        tuple(panels),
        log_y=True,
        ordered=True,
    )


def matrix_spectra(measured: Measured) -> Plot:
    """Singular values of the embedding matrices."""
    panels = tuple(
        Panel(
            "",
            _matrix_name(which),
            tuple(
                _decay(FORMS[form], own["singular_values"], _MATRIX_ROUNDING)
                for form, own in forms.items()
                if form in FORMS
            ),
            "",
            "singular value / largest",
        )
        for which, forms in measured.matrices.items()
    )
    return Plot(
        "matrix_spectra",
        "Singular values of the embedding matrix",
        "Of the matrix as it is, centered, and without its first components (all-but-the-top), each divided by its "
        "largest.",
        "line",
        "number of the singular value",
        panels,
        log_y=True,
    )


def _decay(label: str, values: Sequence[float], rounding: float) -> Line:
    largest = max(values, default=0.0)
    known = [value / largest for value in values if value > rounding * largest]
    return Line(label, tuple(map(float, range(1, len(known) + 1))), tuple(known))


def _some(names: Sequence[str]) -> list[str]:
    """At most so many as can be told apart, evenly from the first to the last."""
    if len(names) <= _LINES:
        return list(names)
    return [names[round(number * (len(names) - 1) / (_LINES - 1))] for number in range(_LINES)]


def partition(measured: Measured) -> Plot:
    """I(W) of the embedding matrices."""
    panels = []
    for which, forms in measured.matrices.items():
        shown = [form for form in FORMS if form in forms]
        lines = tuple(
            Line(
                label,
                tuple(map(float, range(len(shown)))),
                tuple(forms[form][f"partition_isotropy_{signs}"] for form in shown),
            )
            for signs, label in (("as_computed", "signs as computed"), ("both", "both signs"))
        )
        panels.append(Panel("", _matrix_name(which), lines, "", "I(W)"))
    return Plot(
        "partition",
        "I(W) of the embedding matrix",
        "Smallest over largest partition function along the eigenvectors c of the matrix; 1 is isotropic. Signs as "
        "computed: c as the eigensolver gives it, the papers' convention, which depends on its build. Both signs: "
        "over c and -c, the same everywhere; for comparisons.",
        "columns",
        "",
        tuple(panels),
        x_names={float(number): name for number, name in enumerate(FORMS.values())},
    )


def projection(measured: Measured) -> Plot:
    """Rows of the embedding matrices in two dimensions."""
    panels, said = [], ""
    for which, own in measured.rows.items():
        shades, said = _shades(own)
        for form in ("raw", "centered"):
            if len(own[form]) < 2:
                continue
            x, y = own[form]
            lines = tuple(
                Line(label, tuple(x[place] for place in places), tuple(y[place] for place in places))
                for label, places in shades.items()
            )
            panels.append(Panel("", f"{_matrix_name(which)}, {form}", lines, "", "second direction"))
    return Plot(
        "projection",
        "The embedding matrix in two dimensions",
        f"Rows along the first two singular directions of the whole matrix, as it is and about its mean; dashed: the "
        f"origin. {said}",
        "scatter",
        "first direction",
        tuple(Panel(**{**vars(panel), "level": (0.0, "origin"), "mark": (0.0, "origin")}) for panel in panels),
        ordered=True,
    )


def _shades(own: Mapping[str, Any]) -> tuple[dict[str, list[int]], str]:
    """Which rows have which colour, by its label, and what the colours are."""
    many = len(own["ids"])
    counts = own.get("counts")
    if counts and sum(count > 0 for count in counts) >= many / 2:
        seen = sorted((place for place in range(many) if counts[place]), key=lambda place: -counts[place])
        labels = ("most frequent quarter", "second", "third", "rarest quarter")
        unseen = [place for place in range(many) if not counts[place]]
        shades = {**dict(zip(labels, _parts(seen, 4), strict=True)), **({"not in the texts": unseen} if unseen else {})}
        return shades, f"{many:,} rows, evenly by token id; the colour is the token's frequency in these texts."
    parts = _parts(list(range(many)), 5)
    shades = {f"ids {own['ids'][part[0]]:,} to {own['ids'][part[-1]]:,}": part for part in parts if part}
    return shades, (
        f"{many:,} rows, evenly by token id; the colour is the id, which stands for the rank by frequency: most "
        "tokenizers number tokens in the order in which they were learnt, frequent ones first."
    )


def _parts(places: Sequence[int], count: int) -> list[list[int]]:
    bounds = [round(number * len(places) / count) for number in range(count + 1)]
    return [list(places[low:high]) for low, high in itertools.pairwise(bounds)]


def state_norms(measured: Measured) -> Plot:
    """How the norms of the hidden states are distributed."""
    own = measured.norms.get(whole(measured), {})
    lines = []
    for tap in _some(list(own)):
        edges, counts = own[tap]["edges"], own[tap]["counts"]
        if counts:
            total = sum(counts) + sum(own[tap].get("outside", ()))
            factor = edges[1] / edges[0]
            middles = [math.sqrt(low * high) for low, high in itertools.pairwise(edges)]
            xs = (middles[0] / factor, *middles, middles[-1] * factor)
            lines.append(Line(tap_name(tap), xs, (0.0, *(100 * count / total for count in counts), 0.0)))
    return Plot(
        "state_norms",
        "Norms of the hidden states",
        "Percent of the tokens by the norm of their state, in bins of a fortieth of a decade; all texts together.",
        "histogram",
        "norm",
        (Panel("", "", tuple(lines), "", "tokens, percent"),) if lines else (),
        log_x=True,
        ordered=True,
    )


def row_norms(measured: Measured) -> Plot:
    """How the norms of the rows of the embedding matrices are distributed."""
    panels = []
    for which, own in measured.rows.items():
        edges, counts = own["norms"]["edges"], own["norms"]["counts"]
        width = edges[1] - edges[0]
        middles = [low + width / 2 for low in (edges[0] - width, *edges)]
        panels.append(
            Panel(
                "", _matrix_name(which), (Line("rows", tuple(middles), (0.0, *counts, 0.0)),), "", "rows of the matrix"
            )
        )
    return Plot(
        "row_norms",
        "Norms of the embedding matrix's rows",
        "How many rows have which norm, in forty bins of equal width. Rows that training has hardly touched, such as "
        "those of unused tokens, often stand apart.",
        "histogram",
        "norm",
        tuple(panels),
    )


def sphere_plot(found: Sequence[Sphere]) -> Plot:
    """The toy spheres."""
    panels = tuple(
        Panel(
            "",
            one.name,
            (Line("points", one.x, one.y),),
            f"average cosine {one.inter_sim:.3f}, IsoScore {one.isoscore:.3f}, I(W) {one.partition_as_computed:.3f} "
            f"with signs as computed and {one.partition_both:.3f} with both",
            "second coordinate",
            level=(0.0, "origin"),
            mark=(0.0, "origin"),
        )
        for one in found
    )
    return Plot(
        "spheres",
        "What the measures see: a sphere, and the same one moved",
        f"{len(found[0].x)} points on a unit sphere in three dimensions, about the origin and about another place. "
        "Moving it turns average cosine and I(W) from isotropic to anisotropic; IsoScore, which is about the "
        "covariance, stays. Computed with the functions that measured the model; no model is needed for it.",
        "scatter",
        "first coordinate",
        panels,
    )


def _matrix_name(which: str) -> str:
    return f"{which} embeddings"
