"""The report's figures as numbers: the paper's Figures 2 to 8 and training curves, computed from runs.

The runs of a line differ only in the seed and in what the axis or the legend of the figure varies.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from istar.figures.plot import BASE, Line, Panel, Plot
from istar.reports import paper
from istar.reports.cells import (
    Cell,
    all_collapsed,
    best_group,
    describe,
    has_zeta,
    is_finite,
    models,
    row_dicts,
    select_cell,
    tasks,
)
from istar.reports.geometry_file import Geometry, IsoScoreStar
from istar.reports.stability import Stability
from istar.results import RunRecord
from istar.scores import axis_label, displayed

MARKS = "Hollow: fewer seeds than other points. Crossed: all runs have collapsed to constant predictions."
"""Explanation of the markers that `istar.figures.plot.Plot` describes."""
SYMBOLS = {"lambda": "λ", "zeta": "ζ", "layers": "layer"}
"""Symbols of what figures vary, by the keys of `cells.VARIED`."""
_NAMED = 10
"""Largest number of runs that a caption names."""
PanelBuilder = Callable[[pd.DataFrame], Panel | None]
"""Takes the usable runs of a model and a task; returns their panel, or None if the figure has nothing to show."""


def minibatch_stability(scores: Stability) -> Plot:
    """Return Figure 2: scores of batches of a synthetic cloud by batch size."""
    spreads = {f"ζ = {zeta:g}": by_size for zeta, by_size in scores.scores.items()}
    spreads |= {"ζ = auto": scores.auto, "unbiased": scores.unbiased}
    lines = []
    for label, by_size in spreads.items():
        means = tuple(score.mean or 0.0 for score in by_size)
        deviations = tuple(score.std or 0.0 for score in by_size)
        lines.append(Line(label, scores.sizes, means, y_error=deviations))
    panel = Panel("", "", tuple(lines), "", "IsoScore*", horizontal_line=(scores.truth, f"truth ({scores.truth:.2f})"))
    return Plot(
        "figure2",
        "Figure 2: mini-batch stability",
        "IsoScore* of batches of a synthetic Gaussian cloud in 768 dimensions, variances 10, 6, 4, 4, 1, ..., 1, by "
        "batch size and ζ; Σ_S is the covariance of 75,000 other points. In addition to the paper: ζ = auto, estimated "
        "from each batch, and the unbiased IsoScore, which needs no Σ_S (docs/measures.md). Mean and standard "
        "deviation of three batches each; dashed: the score of the distribution itself. This figure needs no run.",
        "line",
        "points in the batch",
        (panel,),
        log_x=True,
    )


def isotropy_and_performance(frame: pd.DataFrame, geometries: Mapping[str, Geometry]) -> Plot:
    """Return Figure 3: isotropy against the headline metric, with a point per lambda.

    The isotropy is IsoScore* with the paper's zeta if `geometries` has it for all runs of the figure, and IsoScore if
    not.
    """
    isoscores = dict(zip(frame["folder"], frame["isoscore_after"].astype(float), strict=True))
    plot = _isotropy_and_performance(frame, isoscores)
    stars = _paper_isoscore_stars(geometries)
    if _have_all(plot, stars):
        unions = {folder: star.union for folder, star in stars.items()}
        plot = replace(_isotropy_and_performance(frame, unions), x_label="IsoScore*")
    caption = (
        f"{_of_shrinkage(plot, stars)} Isotropy of layers 1 to L on the validation set against the headline metric on "
        "the same set, at the epoch with the best headline metric: a point per λ of I-STAR, mean over seeds, bars: "
        f"standard deviations. {MARKS}"
    )
    return replace(plot, caption=caption)


def _isotropy_and_performance(frame: pd.DataFrame, isotropy: Mapping[str, float]) -> Plot:
    """Return Figure 3 without its caption; `isotropy` has the x value of each run by the run's folder."""

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        istar_runs = _all_layer_istar(runs)
        if istar_runs.empty:
            return None
        selected = _select(istar_runs, "lambda", frame)
        groups = _by_lambda_with_base(runs, selected)
        lines = [mean_point(_lambda_label(value), group, isotropy) for value, group in groups.items()]
        return _make_panel(lines, selected, istar_runs, "lambda", groups, frame)

    return Plot(
        "figure3",
        "Figure 3: isotropy and performance",
        "",
        "points",
        "IsoScore",
        _panels(frame, build_panel),
        "figure3",
        values=(-5, -3, -1, 0.5, 1, 3, 5),
    )


def mean_activations(frame: pd.DataFrame, geometries: Mapping[str, Geometry]) -> Plot:
    """Return Figure 4: mean activation of each dimension of the last layer, for the runs with a geometry."""
    plot = Plot(
        "figure4",
        "Figure 4: mean activations and CosReg",
        "Mean activation of each dimension of the last layer over the tokens of at most 1,000 validation texts, "
        "mean over seeds: without a penalty, and with CosReg on the last layer.",
        "line",
        "dimension of the last layer",
        (),
        task="qnli",
        values=(-1, 1),
    )
    values = {folder: geometry.mean_activation for folder, geometry in geometries.items()}
    return _with_line_per_lambda(plot, frame, values, "cosreg", "last", "mean activation")


def intrinsic_dimensions(frame: pd.DataFrame, geometries: Mapping[str, Geometry]) -> Plot:
    """Return Figure 5: TwoNN intrinsic dimension by layer, for the runs with a geometry."""
    plot = Plot(
        "figure5",
        "Figure 5: intrinsic dimension",
        "TwoNN dimension of the first token's states by layer over at most 1,000 validation texts, mean over "
        "seeds: without a penalty, and with I-STAR.",
        "line",
        "layer (0: embeddings)",
        (),
        task="sst2",
        values=(-5, -3, 3, 5),
    )
    values = {folder: geometry.two_nn for folder, geometry in geometries.items()}
    return _with_line_per_lambda(plot, frame, values, "istar", "all", "TwoNN dimension")


def layer_isotropy(frame: pd.DataFrame, records: Mapping[str, RunRecord], geometries: Mapping[str, Geometry]) -> Plot:
    """Return Figure 6: isotropy by layer, for Base and I-STAR.

    The isotropy is chosen as in `isotropy_and_performance`.
    """
    empty = Plot(
        "figure6",
        "Figure 6: isotropy layer by layer",
        "",
        "line",
        "layer (0: embeddings)",
        (),
        task="qnli",
        values=(-1, 1),
    )
    values = {folder: _isoscore_by_layer(records[folder]) for folder in frame[frame["usable"]]["folder"]}
    plot = _with_line_per_lambda(empty, frame, values, "istar", "all", "IsoScore")
    stars = _paper_isoscore_stars(geometries)
    if _have_all(plot, stars):
        # The runs without a value are in no line, so that they may have any number here.
        by_layer = {folder: stars[folder].layers if folder in stars else scores for folder, scores in values.items()}
        plot = _with_line_per_lambda(empty, frame, by_layer, "istar", "all", "IsoScore*")
    caption = (
        f"{_of_shrinkage(plot, stars)} Isotropy of each layer on the validation set at the epoch with the best "
        "headline metric, mean over seeds: without a penalty, and with I-STAR."
    )
    return replace(plot, caption=caption)


def _paper_isoscore_stars(geometries: Mapping[str, Geometry]) -> dict[str, IsoScoreStar]:
    """Return the IsoScore* of the runs that have it with the paper's zeta, by the run's folder."""
    return {
        folder: geometry.isoscore_star
        for folder, geometry in geometries.items()
        if geometry.isoscore_star is not None and geometry.isoscore_star.zeta == paper.ISOSCORE_ZETA
    }


def _have_all(plot: Plot, stars: Mapping[str, IsoScoreStar]) -> bool:
    """Return whether the plot shows runs and all of them have an IsoScore*."""
    runs = _drawn(plot)
    return bool(runs) and runs <= stars.keys()


def _drawn(plot: Plot) -> set[str]:
    """Return the folders of the runs in the panels of a plot."""
    return {folder for panel in plot.panels for folder in panel.runs}


def _of_shrinkage(plot: Plot, stars: Mapping[str, IsoScoreStar]) -> str:
    """Return the sentences of a caption that say which isotropy the plot shows, and which runs have which."""
    zeta, runs = paper.ISOSCORE_ZETA, _drawn(plot)
    points = "all tokens of the validation set"
    if _have_all(plot, stars):
        numbers = sorted({stars[folder].num_points for folder in runs})
        counted = f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
        return (
            f"IsoScore* with the paper's ζ = {zeta:g} over {points}, in all {len(runs)} runs of this figure; Σ_S is "
            f"the covariance of the union of layers 1 to L over {counted} points of the training data, or of a layer's "
            "states over the same tokens."
        )
    sentence = (
        f"IsoScore (ζ = 0) over {points}; the paper has IsoScore* with ζ = {zeta:g}, so the axes cannot be compared."
    )
    with_star = len(runs & stars.keys())
    if not with_star:
        return f"{sentence} No run of this figure has IsoScore*; run.isotropy_zeta={zeta:g} measures it."
    names = sorted(Path(folder).name for folder in runs - stars.keys())
    without = ", ".join(names if len(names) <= _NAMED else [*names[:_NAMED], f"and {len(names) - _NAMED} others"])
    return (
        f"{sentence} Of the {len(runs)} runs of this figure, {with_star} have IsoScore* as well. It is shown if all "
        f"have it, which run.isotropy_zeta={zeta:g} measures; without it: {without}."
    )


def zeta_ablation(frame: pd.DataFrame) -> Plot:
    """Return Figure 7: the headline metric by zeta of I-STAR."""

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        istar_runs = _all_layer_istar(runs)
        if istar_runs.empty:
            return None
        zetas = istar_runs.groupby("hash_without_zeta")["reg.zeta"].transform("nunique")
        alternatives = istar_runs[zetas > 1]
        if alternatives.empty:
            return None
        selected = _select(alternatives, "zeta", frame)
        line = _metric_line(selected, "reg.zeta")
        panel = _make_panel([line], selected, istar_runs, "zeta", _by_value(selected, "reg.zeta"), frame)
        # The rule is that of Tables 1 and 2: the most seeds, then the best mean.
        best = selected[selected["config_hash"] == best_group(selected, "config_hash")]
        return (
            panel if all_collapsed(best) else replace(panel, vertical_line=(float(best["reg.zeta"].iloc[0]), "best ζ"))
        )

    return Plot(
        "figure7",
        "Figure 7: ζ ablation",
        "Headline metric on the validation set by ζ of I-STAR, mean ± standard deviation over seeds; ζ = 0 is no "
        "shrinkage, ζ = 1 only Σ_S. Points without bars have one seed. Dashed: of the ζ with the most seeds, the best "
        f"mean on the set that chose the epoch, as in Table 2. {MARKS}",
        "bars",
        "ζ",
        _panels(frame, build_panel),
        "zeta_ablation",
        "rte",
        (0, 0.2, 0.4, 0.6, 0.8, 1),
        "ζ",
    )


def layer_ablation(frame: pd.DataFrame, records: Mapping[str, RunRecord]) -> Plot:
    """Return Figure 8: the headline metric by the single layer that I-STAR penalizes."""

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        runs = runs[(runs["family"] == "istar") & has_zeta(runs)]
        runs = runs.assign(layer=runs["reg.layers"].map(_single_layer))
        single = runs[runs["layer"].notna()]
        if single.empty:
            return None
        runs = runs[runs["layer"].notna() | runs["reg.layers"].eq("all")]
        selected = runs[runs["hash_without_layers"] == _chosen_group(single, "layers", frame)]
        all_layers = selected[selected["layer"].isna()]
        count = layer_count(records[selected["folder"].iloc[0]])
        groups: dict[Any, pd.DataFrame] = dict.fromkeys(range(1, count + 1), selected.head(0))
        groups |= {**_by_value(selected, "layer"), "all": all_layers}
        panel = _make_panel([_metric_line(selected, "layer")], selected, single, "layers", groups, frame)
        level = (float(_scores(all_layers).mean()), "all layers") if len(all_layers) else None
        return replace(panel, horizontal_line=level)

    return Plot(
        "figure8",
        "Figure 8: layer ablation",
        "Headline metric on the validation set with I-STAR on a single layer, mean ± standard deviation over seeds. "
        f"Points without bars have one seed. Dashed: I-STAR on all layers. {MARKS}",
        "bars",
        "layer that is penalized",
        _panels(frame, build_panel),
        "layer_ablation",
        "cola",
        symbol="layer",
    )


def curves(cells: Iterable[Cell], records: Mapping[str, RunRecord]) -> tuple[Plot, Plot]:
    """Return validation loss and headline metric by epoch, for the runs in Table 1."""
    finished = [cell for cell in cells if cell.seeds]
    losses, metrics = [], []
    for _, cells_of_task in groupby(finished, key=lambda cell: (cell.model, cell.task)):
        group = list(cells_of_task)
        headline = group[0].metrics[0]
        losses.append(_curve_panel(group, records, "loss", "validation loss"))
        metrics.append(_curve_panel(group, records, headline, axis_label(headline)))

    def plot(name: str, title: str, quantity: str, panels: Sequence[Panel]) -> Plot:
        averaging = "after each epoch, for the runs in Table 1: mean over seeds, band: standard deviation."
        with_lines = tuple(panel for panel in panels if panel.lines)
        return Plot(name, title, f"{quantity} on the validation set {averaging}", "line", "epoch", with_lines)

    loss_plot = plot("curves_loss", "Validation loss", "Loss", losses)
    return loss_plot, plot("curves_metric", "Validation metric", "Headline metric", metrics)


def _curve_panel(group: Sequence[Cell], records: Mapping[str, RunRecord], metric: str, y_label: str) -> Panel:
    """Return a panel with a line per method; it has no lines if no epoch recorded the metric."""
    lines = []
    for cell in group:
        epochs = [entry for folder in cell.runs["folder"] for entry in records[folder].epochs]
        values = pd.Series(
            [displayed(metric, entry["metrics"].get(metric, math.nan)) for entry in epochs],
            index=[int(entry["epoch"]) for entry in epochs],
            dtype=float,
        )
        values = values[np.isfinite(values)]
        if not values.empty:
            lines.append(_mean_line(paper.FAMILIES[cell.family], values, values.index, tuple(cell.seeds)))
    return Panel(group[0].model, group[0].task, tuple(lines), "", y_label)


def _with_line_per_lambda(
    plot: Plot, frame: pd.DataFrame, values: Mapping[str, Sequence[float]], family: str, layers: str, y_label: str
) -> Plot:
    """Return the plot with panels that have a line for Base and for each lambda, averaged over seeds.

    `values` has the y values of each run's line by the run's folder; runs without an entry are not shown. The runs with
    a lambda are those of the method family that penalize the given layers.
    """

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        penalized = runs[(runs["family"] == family) & runs["reg.layers"].eq(layers)]
        if penalized.empty:
            return None
        of_paper = penalized[penalized["reg.lambda"].isin(plot.values)]
        # Small models are trained with other lambdas than the paper's.
        penalized = penalized if of_paper.empty else of_paper
        selected = _select(penalized, "lambda", frame)
        groups = _by_lambda_with_base(runs, selected)
        lines = []
        for value, group in groups.items():
            group = groups[value] = _of_equal_length(group, values)
            rows = [values[folder] for folder in group["folder"]]
            if rows:
                means = pd.DataFrame(rows, dtype=float).replace([math.inf, -math.inf], math.nan).mean()
                xs = tuple(map(float, range(len(means))))
                lines.append(Line(_lambda_label(value), xs, tuple(means), seeds=_seeds(group)))
        return _make_panel(lines, selected, penalized, "lambda", groups, frame, y_label)

    panels = _panels(frame[frame["folder"].isin(list(values))], build_panel)
    return replace(plot, panels=panels, sweep=plot.name, has_baseline=True, seeds=1)


def _of_equal_length(runs: pd.DataFrame, values: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Return the runs that have values, as many as the first of them."""
    lengths = runs["folder"].map(lambda folder: len(values[folder]))
    nonempty = lengths[lengths > 0]
    return runs[lengths.eq(nonempty.iloc[0])] if len(nonempty) else runs.head(0)


def _panels(frame: pd.DataFrame, build_panel: PanelBuilder) -> tuple[Panel, ...]:
    """Return a panel per model and task, without those that have nothing to show."""
    usable = frame[frame["usable"]]
    if "reg.lambda" not in usable:
        return ()
    panels = [
        build_panel(usable[(usable["model"] == model) & (usable["task"] == task)])
        for model in models(usable)
        for task in tasks(usable)
    ]
    return tuple(panel for panel in panels if panel is not None and panel.lines)


def _make_panel(
    lines: Sequence[Line],
    selected: pd.DataFrame,
    alternatives: pd.DataFrame,
    varied: str,
    groups: Mapping[Any, pd.DataFrame],
    frame: pd.DataFrame,
    y_label: str = "",
) -> Panel:
    """Return a panel of lines with a description of the settings that its runs have in common.

    The lines show the runs `selected` from the `alternatives`. `groups` has the runs that are drawn by the value of
    `varied`, a key of `cells.VARIED`. `frame` has all runs, from which Table 1 is made. The y axis shows the headline
    metric unless it has another label.
    """
    first = row_dicts(selected.head(1))[0]
    settings = [
        f"{symbol} = {first[f'reg.{key}']:g}"
        for key, symbol in (("lambda", "λ"), ("zeta", "ζ"))
        if key != varied and is_finite(first.get(f"reg.{key}"))
    ]
    others = alternatives[f"hash_without_{varied}"].nunique() - 1
    hidden = f", {others} other configuration{'s' * (others > 1)} not shown" if others else ""
    column = f"hash_without_{varied}"
    table_group = _group_of_table1(alternatives, varied, frame)
    if others and table_group in set(alternatives[column]) - set(selected[column]):
        hidden += f", among them that of Table 1, for which only one {SYMBOLS[varied]} was tried"
    drawn = sum(map(len, groups.values()))
    runs = f"{drawn} run{'s' * (drawn > 1)}"
    held = f"{', '.join([*settings, describe(first)])}; {runs}{hidden}{_fewer_seeds(groups, SYMBOLS[varied])}"
    y_label = y_label or axis_label(first["metric"])
    seeds = {value: _seeds(group) for value, group in groups.items()}
    folders = tuple(folder for group in groups.values() for folder in group["folder"])
    return Panel(first["model"], first["task"], tuple(lines), held, y_label, seeds=seeds, runs=folders)


def _all_layer_istar(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[(runs["family"] == "istar") & runs["reg.layers"].eq("all") & has_zeta(runs)]


def _fewer_seeds(groups: Mapping[Any, pd.DataFrame], symbol: str) -> str:
    """Name the values of a figure that have fewer seeds than others."""
    most = max(map(len, groups.values()), default=0)
    fewer = [
        f"{len(group)} at {value if isinstance(value, str) else f'{symbol} = {value:g}'}"
        for value, group in groups.items()
        if 0 < len(group) < most
    ]
    return f"; fewer than {most} seeds: {', '.join(fewer)}" if fewer else ""


def _select(runs: pd.DataFrame, varied: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Select runs of a task, model and method that have the same settings except `varied`; see `_chosen_group`."""
    return runs[runs[f"hash_without_{varied}"] == _chosen_group(runs, varied, frame)]


def _chosen_group(runs: pd.DataFrame, varied: str, frame: pd.DataFrame) -> str:
    """Return the hash, without `varied`, of the runs that a figure shows: those of the configuration in Table 1.

    If that configuration has a single value of `varied` and another one has several, it is that one, by `best_group`.
    """
    column = f"hash_without_{varied}"
    several = runs[runs.groupby(column)["config_hash"].transform("nunique") > 1]
    candidates = runs if several.empty else several
    table_group = _group_of_table1(runs, varied, frame)
    return table_group if table_group in set(candidates[column]) else best_group(candidates, column)


def _group_of_table1(runs: pd.DataFrame, varied: str, frame: pd.DataFrame) -> str:
    """Return the hash, without `varied`, of the configuration of these runs' method in Table 1; empty for none."""
    first = row_dicts(runs.head(1))[0]
    cell = select_cell(frame, first["task"], first["model"], first["family"])
    return str(cell.first_run.get(f"hash_without_{varied}", ""))


def _by_lambda_with_base(runs: pd.DataFrame, selected: pd.DataFrame) -> dict[Any, pd.DataFrame]:
    """Group the selected runs by lambda, after the Base runs with otherwise the same settings."""
    is_same = runs["hash_without_method"] == selected["hash_without_method"].iloc[0]
    base = runs[(runs["family"] == "base") & is_same]
    return {**({} if base.empty else {BASE: base}), **_by_value(selected, "reg.lambda")}


def _by_value(runs: pd.DataFrame, column: str) -> dict[Any, pd.DataFrame]:
    """Group the runs by the numbers in a column, in ascending order."""
    return {float(value): group for value, group in runs.groupby(runs[column].astype(float))}


def mean_point(label: str, runs: pd.DataFrame, isotropy: Mapping[str, float] | pd.Series) -> Line:
    """Return a point at the mean isotropy and the mean headline metric, with standard deviations of both.

    `isotropy` has the isotropy of each run by the run's folder.
    """
    x, y = runs["folder"].map(isotropy).astype(float), _scores(runs)
    # A single run has no standard deviation.
    x_error, y_error = np.nan_to_num([x.std(), y.std()])
    return Line(
        label, (x.mean(),), (y.mean(),), (x_error,), (y_error,), _seeds(runs), (len(runs),), (all_collapsed(runs),)
    )


def _metric_line(runs: pd.DataFrame, column: str) -> Line:
    """Return a line of the headline metric, as `_scores` gives it, by the numbers in a column."""
    line = _mean_line("mean ± std", _scores(runs), runs[column].astype(float))
    groups = _by_value(runs, column).values()
    return replace(line, num_seeds=tuple(map(len, groups)), collapsed=tuple(map(all_collapsed, groups)))


def _scores(runs: pd.DataFrame) -> pd.Series:
    """Return the headline metric of each run as `istar.scores.displayed` gives it."""
    pairs = zip(runs["metric"], runs["value"].astype(float), strict=True)
    return pd.Series([displayed(metric, value) for metric, value in pairs], index=runs.index, dtype=float)


def _mean_line(label: str, values: pd.Series, xs: Any, seeds: tuple[int, ...] = ()) -> Line:
    """Return a line through the means of the values at each x, with standard deviations as errors."""
    groups = values.groupby(xs)
    means, deviations = groups.mean(), groups.std().fillna(0.0)
    return Line(label, tuple(map(float, means.index)), tuple(means), y_error=tuple(deviations), seeds=seeds)


def _seeds(runs: pd.DataFrame) -> tuple[int, ...]:
    return tuple(sorted({int(seed) for seed in runs["seed"]}))


def _lambda_label(value: Any) -> str:
    return value if isinstance(value, str) else f"λ = {value:g}"


def _single_layer(layers: Any) -> int | None:
    return layers[0] if isinstance(layers, list) and len(layers) == 1 else None


def _isoscore_by_layer(record: RunRecord) -> list[float]:
    """Return IsoScore after training from the embeddings to the last layer; empty if it was not measured."""
    after = record.isotropy.get("after", {})
    return [after[layer] for layer in sorted(filter(str.isdigit, after), key=int)]


def layer_count(record: RunRecord) -> int:
    """Return the number of transformer layers that a finished run has measured."""
    return max(0, len(_isoscore_by_layer(record)) - 1)
