"""The table of all measures: what each one is, how it is computed and shown, what it costs and what it does not see.

The table is data, in `catalogue.toml`. The list of `istar measure --list`, the titles, captions and groups of figures,
the flags on pages, and the table in the documentation are made from it.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from istar.errors import UserError, did_you_mean

Subject = Literal["layers", "matrices", "final_norm"]


@dataclass(frozen=True)
class Measure:
    """A row of the table of all measures.

    Attributes:
        name: key in `measures.json`.
        subject: what is measured: hidden states of the `layers`, rows of the embedding `matrices`, or the gain and bias
            of the `final_norm`. A name may occur once for each subject.
        title: name in texts and figures.
        header: short name in the tables of the terminal, for the main measures.
        formula: formula in words and symbols.
        range: smallest and largest value.
        convention: where papers differ: whether points are centered, what a point is, which average or logarithm.
        cost: time and memory.
        blind_to: what the value does not show, or is distorted by.
        function: public function or accumulator that computes it.
        paper: source of the definition.
        meaning: sentences for the caption of its figure, or words for a table.
        figure: figure that shows it; see `FIGURES`.
        twin: measure of which it is another estimate. Figures over layers or steps have both in one panel.
        bounds: ends of its axis, with `d` for the number of dimensions; None for an axis around the values.
        log: whether its axis is logarithmic if the values need it.
        error: what its standard error needs of each group of documents: `points`, sums over points, or `covariance`,
            d² numbers; empty if it has none.
        summary: whether tables with a row for each model show it.
        compared: whether pages of several models begin with it.
        needs_inter_sim: figures show it only where InterSim is at least this.
        flag: sentence on an unusual value, with the fields `layer`, `value` and `width`, all measures of the layer, and
            words for what was measured, such as `units`.
        flag_of_one: the same sentence for the value 1.
        flag_at_least: smallest unusual value. The bounds of flags are conventions of this project, not tests: most
            published encoders and decoders of the papers do not reach them in most of their layers.
        flag_at_most: largest unusual value, if small values are unusual.
    """

    name: str
    subject: Subject
    title: str
    formula: str
    range: str
    convention: str
    cost: str
    blind_to: str
    function: str
    header: str = ""
    paper: str = ""
    meaning: str = ""
    figure: str = ""
    twin: str = ""
    bounds: tuple[float, float | Literal["d"]] | None = None
    log: bool = False
    error: Literal["", "points", "covariance"] = ""
    summary: bool = False
    compared: bool = False
    needs_inter_sim: float | None = None
    flag: str = ""
    flag_of_one: str = ""
    flag_at_least: float | None = None
    flag_at_most: float | None = None


@dataclass(frozen=True)
class FigureGroup:
    """A figure of a page: its title, and its caption if this is not made of the `meaning` of its measures."""

    title: str
    caption: str = ""
    same_y: bool = False  # whether all panels have the same y axis


_TABLE = tomllib.loads(files("istar.measures").joinpath("catalogue.toml").read_text(encoding="utf-8"))


def _read_measures(subject: Subject) -> list[Measure]:
    measures = []
    for name, row in _TABLE[subject].items():
        bounds = tuple(row.pop("bounds")) if "bounds" in row else None
        function = f"istar.measures.{row.pop('function')}"
        measures.append(Measure(name=name, subject=subject, bounds=bounds, function=function, **row))
    return measures


def _describe_error(measure: Measure) -> Measure:
    return Measure(
        name=f"{measure.name}_error",
        subject=measure.subject,
        title=f"standard error of {measure.title}",
        formula="√((G-1)/G Σ (θ₍g₎ - mean)²), θ₍g₎ the measure without group g of G groups of documents",
        range="≥ 0",
        convention="delete-a-group jackknife; tokens of a document may depend on each other; G - 1 degrees of freedom",
        cost="memory O(G d)" if measure.error == "points" else "memory O(G d²)",
        blind_to="the bias of the measure; dependence between documents",
        function="istar.measures.jackknife.jackknife_error",
        paper="Tukey (1958); Kott (2001)",
    )


_LAYER_MEASURES = _read_measures("layers")
MEASURES: tuple[Measure, ...] = (
    *_LAYER_MEASURES,
    *(_describe_error(measure) for measure in _LAYER_MEASURES if measure.error),
    *_read_measures("matrices"),
    *_read_measures("final_norm"),
)
"""All measures: of the layers with their standard errors, of the embedding matrices, and of the final normalization."""
MEASURES_WITH_ERROR = {
    measure.name: measure.error
    for needed in ("points", "covariance")
    for measure in _LAYER_MEASURES
    if measure.error == needed
}
"""The measures with a standard error, those that need the least first, and their `Measure.error`."""
FIGURES = {name: FigureGroup(**row) for name, row in _TABLE["figures"].items()}
"""Figures of pages by name, in their order."""


def find_measure(name: str, subject: Subject = "layers") -> Measure:
    """Return the row of a measure.

    Raises:
        UserError: if there is no measure of this name for this subject; the message suggests the most similar name.

    >>> find_measure("inter_sim").title
    'InterSim'
    """
    for measure in MEASURES:
        if (measure.name, measure.subject) == (name, subject):
            return measure
    names = [measure.name for measure in MEASURES if measure.subject == subject]
    raise UserError(f"{subject} have no measure {name!r}{suggest_measure(name, names)}; istar measure --list shows all")


def suggest_measure(word: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?` with the measure among `names` that has this title or header, or a similar name.

    The result is empty if there is none.

    >>> suggest_measure("rank", ["rank_me", "effective_rank"])
    '; did you mean effective_rank?'
    """
    name_by_text = {text.lower(): measure.name for measure in MEASURES for text in (measure.title, measure.header)}
    return did_you_mean(name_by_text.get(word.lower(), word), names)
