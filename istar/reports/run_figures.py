"""The report's figures as numbers: the paper's Figures 2 to 8 and learning curves, computed from runs.

The runs of a line differ only in the seed and in the setting that the x axis or the legend varies.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from istar.drawing.plot import Line, Panel, Plot
from istar.records.identity import BASE_LABEL
from istar.records.metric_names import axis_label, displayed
from istar.records.results import RunRecord
from istar.reports import paper
from istar.reports.configurations import (
    Cell,
    are_all_collapsed,
    describe_hyperparameters,
    find_best_group,
    has_fixed_zeta,
    is_finite,
    list_models,
    list_tasks,
    row_dicts,
    select_cell,
)
from istar.reports.geometry_file import Geometry, IsoScoreStar
from istar.reports.stability import StabilityScores

MARKER_LEGEND = "Hollow: fewer seeds than other points. Crossed: all runs have collapsed to constant predictions."
"""Explanation of the markers that `istar.drawing.plot.Plot` describes."""
SYMBOLS = {"lambda": "λ", "zeta": "ζ", "layers": "layer"}
"""Symbols of the settings that figures vary, by the keys of `configurations.VARIED`."""
_MAX_NAMED_RUNS = 10
"""Largest number of runs that a caption names."""
PanelBuilder = Callable[[pd.DataFrame], Panel | None]
"""Takes the usable runs of a model and a task; returns their panel, or None if the figure has nothing to show."""


def build_minibatch_stability_plot(stability: StabilityScores) -> Plot:
    """Return the paper's Figure 2: IsoScore* of batches of a synthetic Gaussian cloud against the batch size."""
    scores_by_label = {f"ζ = {zeta:g}": scores for zeta, scores in stability.scores_by_zeta.items()}
    scores_by_label |= {"ζ = auto": stability.auto_zeta_scores, "unbiased": stability.unbiased_scores}
    lines = []
    for label, scores in scores_by_label.items():
        means = tuple(score.mean or 0.0 for score in scores)
        deviations = tuple(score.std or 0.0 for score in scores)
        lines.append(Line(label, stability.batch_sizes, means, y_error=deviations))
    reference_line = (stability.true_score, f"truth ({stability.true_score:.2f})")
    panel = Panel(
        model="", task="", lines=tuple(lines), fixed_settings="", y_label="IsoScore*", horizontal_line=reference_line
    )
    return Plot(
        name="figure2",
        title="Figure 2: mini-batch stability",
        caption="IsoScore* of batches of a synthetic Gaussian cloud in 768 dimensions, variances 10, 6, 4, 4, 1, ..., "
        "1, by batch size and ζ; Σ_S is the covariance of 75,000 other points. In addition to the paper: ζ = auto, "
        "estimated from each batch, and the unbiased IsoScore, which needs no Σ_S (docs/measures.md). Mean and "
        "standard deviation of three batches each; dashed line: the score of the distribution itself. This figure "
        "needs no run.",
        kind="line",
        x_label="points in the batch",
        panels=(panel,),
        log_x=True,
    )


def build_isotropy_performance_plot(all_runs: pd.DataFrame, geometry_by_folder: Mapping[str, Geometry]) -> Plot:
    """Return the paper's Figure 3: isotropy against the headline metric, with a point for each lambda of I-STAR.

    The isotropy is IsoScore* with the paper's zeta if all runs of the figure have it, and IsoScore otherwise.
    """
    isoscore_by_folder = dict(zip(all_runs["folder"], all_runs["isoscore_after"].astype(float), strict=True))
    plot = _build_uncaptioned_isotropy_performance_plot(all_runs, isoscore_by_folder)
    star_by_folder = _collect_isoscore_stars(geometry_by_folder)
    if _all_runs_have_isoscore_star(plot, star_by_folder):
        union_star_by_folder = {folder: star.union for folder, star in star_by_folder.items()}
        plot = replace(
            _build_uncaptioned_isotropy_performance_plot(all_runs, union_star_by_folder), x_label="IsoScore*"
        )
    caption = (
        f"{_describe_isotropy_measure(plot, star_by_folder)} Isotropy of layers 1 to L on the validation set against "
        "the headline metric on the same set, at the epoch with the best headline metric: a point per λ of I-STAR, "
        f"mean over seeds, error bars: standard deviations. {MARKER_LEGEND}"
    )
    return replace(plot, caption=caption)


def _build_uncaptioned_isotropy_performance_plot(
    all_runs: pd.DataFrame, isotropy_by_folder: Mapping[str, float]
) -> Plot:
    """Return the paper's Figure 3 without its caption, with the given isotropy of each run on the x axis."""

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        """Return the panel of a model and task, or None without a run of I-STAR on all layers."""
        istar_runs = _select_all_layer_istar_runs(runs)
        if istar_runs.empty:
            return None
        selected = _select_runs_to_plot(istar_runs, "lambda", all_runs)
        runs_by_lambda = _group_by_lambda_with_base(runs, selected)
        lines = [
            build_mean_point(_format_lambda(lambda_), lambda_runs, isotropy_by_folder)
            for lambda_, lambda_runs in runs_by_lambda.items()
        ]
        return _build_panel(lines, selected, istar_runs, "lambda", runs_by_lambda, all_runs)

    return Plot(
        name="figure3",
        title="Figure 3: isotropy and performance",
        caption="",
        kind="points",
        x_label="IsoScore",
        panels=_build_panels(all_runs, build_panel),
    )


def build_mean_activation_plot(all_runs: pd.DataFrame, geometry_by_folder: Mapping[str, Geometry]) -> Plot:
    """Return the paper's Figure 4: mean activation of each dimension of the last layer, for Base and CosReg.

    It shows the runs that have an entry in `geometry_by_folder`.
    """
    empty_plot = Plot(
        name="figure4",
        title="Figure 4: mean activations and CosReg",
        caption="",
        kind="line",
        x_label="dimension of the last layer",
        panels=(),
    )
    activations_by_folder = {folder: geometry.mean_activation for folder, geometry in geometry_by_folder.items()}
    plot = _add_panels_by_lambda(
        empty_plot,
        all_runs,
        (-1, 1),
        activations_by_folder,
        family="cosreg",
        layers="last",
        y_label="mean activation",
        # The order of the dimensions means nothing, so that bands would only hide the lines.
        with_deviations=False,
    )
    if not plot.panels:
        return plot
    num_texts = _format_range([geometry_by_folder[folder].num_examples for folder in _get_run_folders(plot)])
    caption = (
        f"Mean activation of each dimension of the last layer over the tokens of {num_texts} validation texts, mean "
        "over seeds: without a penalty, and with CosReg on the last layer."
    )
    return replace(plot, caption=caption)


def build_intrinsic_dimension_plot(all_runs: pd.DataFrame, geometry_by_folder: Mapping[str, Geometry]) -> Plot:
    """Return the paper's Figure 5: TwoNN intrinsic dimension by layer, for Base and I-STAR.

    It shows the runs that have an entry in `geometry_by_folder`.
    """
    empty_plot = Plot(
        name="figure5",
        title="Figure 5: intrinsic dimension",
        caption="TwoNN dimension of the first token's states by layer over at most 1,000 validation texts, mean over "
        "seeds, band: standard deviation; without a penalty, and with I-STAR.",
        kind="line",
        x_label="layer (0: embeddings)",
        panels=(),
    )
    dimensions_by_folder = {folder: geometry.two_nn for folder, geometry in geometry_by_folder.items()}
    return _add_panels_by_lambda(
        empty_plot,
        all_runs,
        (-5, -3, 3, 5),
        dimensions_by_folder,
        family="istar",
        layers="all",
        y_label="TwoNN dimension",
    )


def build_layer_isotropy_plot(
    all_runs: pd.DataFrame, records: Mapping[str, RunRecord], geometry_by_folder: Mapping[str, Geometry]
) -> Plot:
    """Return the paper's Figure 6: isotropy by layer, for Base and I-STAR.

    The isotropy is IsoScore* with the paper's zeta if all runs of the figure have it, and IsoScore otherwise.
    """
    empty_plot = Plot(
        name="figure6",
        title="Figure 6: isotropy layer by layer",
        caption="",
        kind="line",
        x_label="layer (0: embeddings)",
        panels=(),
    )
    isoscores_by_folder = {
        folder: _get_isoscore_by_layer(records[folder]) for folder in all_runs[all_runs["usable"]]["folder"]
    }
    plot = _add_panels_by_lambda(
        empty_plot, all_runs, (-1, 1), isoscores_by_folder, family="istar", layers="all", y_label="IsoScore"
    )
    star_by_folder = _collect_isoscore_stars(geometry_by_folder)
    if _all_runs_have_isoscore_star(plot, star_by_folder):
        # Runs without IsoScore* are in no line of the plot, so that any value does for them.
        isoscore_stars_by_folder = {
            folder: star_by_folder[folder].layers if folder in star_by_folder else isoscores
            for folder, isoscores in isoscores_by_folder.items()
        }
        plot = _add_panels_by_lambda(
            empty_plot, all_runs, (-1, 1), isoscore_stars_by_folder, family="istar", layers="all", y_label="IsoScore*"
        )
    caption = (
        f"{_describe_isotropy_measure(plot, star_by_folder)} Isotropy of each layer on the validation set at the epoch "
        "with the best headline metric, mean over seeds, band: standard deviation; without a penalty, and with I-STAR."
    )
    return replace(plot, caption=caption)


def _collect_isoscore_stars(geometry_by_folder: Mapping[str, Geometry]) -> dict[str, IsoScoreStar]:
    return {
        folder: geometry.isoscore_star
        for folder, geometry in geometry_by_folder.items()
        if geometry.isoscore_star is not None and geometry.isoscore_star.zeta == paper.ISOSCORE_ZETA
    }


def _all_runs_have_isoscore_star(plot: Plot, star_by_folder: Mapping[str, IsoScoreStar]) -> bool:
    folders = _get_run_folders(plot)
    return bool(folders) and folders <= star_by_folder.keys()


def _get_run_folders(plot: Plot) -> set[str]:
    return {folder for panel in plot.panels for folder in panel.runs}


def _format_range(counts: Collection[int]) -> str:
    """Return the smallest and the largest of some numbers, such as "12 to 1,000", or the only one that occurs."""
    smallest, largest = min(counts), max(counts)
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def _describe_isotropy_measure(plot: Plot, star_by_folder: Mapping[str, IsoScoreStar]) -> str:
    """Return the sentences of a caption that say whether a plot shows IsoScore* or IsoScore, and why.

    The plot shows IsoScore* if all its runs have an IsoScore*, and IsoScore otherwise.
    """
    zeta, folders = paper.ISOSCORE_ZETA, _get_run_folders(plot)
    tokens = "all tokens of the validation set"
    if _all_runs_have_isoscore_star(plot, star_by_folder):
        num_points = _format_range([star_by_folder[folder].num_points for folder in folders])
        return (
            f"IsoScore* with the paper's ζ = {zeta:g} over {tokens}, in all {len(folders)} runs of this figure; Σ_S is "
            f"the covariance of the union of layers 1 to L over {num_points} points of the training data, or of a "
            "layer's states over the same tokens."
        )
    sentence = (
        f"IsoScore (ζ = 0) over {tokens}; the paper has IsoScore* with ζ = {zeta:g}, so the axes cannot be compared."
    )
    num_with_star = len(folders & star_by_folder.keys())
    if not num_with_star:
        return f"{sentence} No run of this figure has IsoScore*; run.isotropy_zeta={zeta:g} measures it."
    names_without_star = sorted(Path(folder).name for folder in folders - star_by_folder.keys())
    if len(names_without_star) > _MAX_NAMED_RUNS:
        names_without_star = [
            *names_without_star[:_MAX_NAMED_RUNS],
            f"and {len(names_without_star) - _MAX_NAMED_RUNS} others",
        ]
    return (
        f"{sentence} Of the {len(folders)} runs of this figure, {num_with_star} have IsoScore* as well. It is shown if "
        f"all have it, which run.isotropy_zeta={zeta:g} measures; without it: {', '.join(names_without_star)}."
    )


def build_zeta_ablation_plot(all_runs: pd.DataFrame) -> Plot:
    """Return the paper's Figure 7: the headline metric of I-STAR against zeta, its shrinkage intensity."""

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        """Return the panel of a model and task, or None if no configuration was run with several zetas."""
        istar_runs = _select_all_layer_istar_runs(runs)
        if istar_runs.empty:
            return None
        num_zetas = istar_runs.groupby("hash_without_zeta")["reg.zeta"].transform("nunique")
        candidates = istar_runs[num_zetas > 1]
        if candidates.empty:
            return None
        selected = _select_runs_to_plot(candidates, "zeta", all_runs)
        line = _build_metric_line(selected, x_column="reg.zeta")
        runs_by_zeta = _group_by_number(selected, "reg.zeta")
        panel = _build_panel([line], selected, istar_runs, "zeta", runs_by_zeta, all_runs)
        # The rule is that of Tables 1 and 2: the most seeds, then the best mean.
        best_runs = selected[selected["config_hash"] == find_best_group(selected, "config_hash")]
        if are_all_collapsed(best_runs):
            return panel
        return replace(panel, vertical_line=(float(best_runs["reg.zeta"].iloc[0]), "best ζ"))

    return Plot(
        name="figure7",
        title="Figure 7: ζ ablation",
        caption="Headline metric on the validation set by ζ of I-STAR, mean ± standard deviation over seeds; ζ = 0 is "
        "no shrinkage, ζ = 1 only Σ_S. Points without error bars have one seed. Dashed line: of the ζ with the most "
        f"seeds, the one with the best mean on the set on which the epoch was chosen, as in Table 2. {MARKER_LEGEND}",
        kind="bars",
        x_label="ζ",
        panels=_build_panels(all_runs, build_panel),
    )


def build_layer_ablation_plot(all_runs: pd.DataFrame) -> Plot:
    """Return the paper's Figure 8: the headline metric against the single layer that I-STAR penalizes.

    A dashed line shows the metric with I-STAR on all layers.
    """

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        """Return the panel of a model and task, or None without a run of I-STAR on a single layer."""
        istar_runs = runs[(runs["family"] == "istar") & has_fixed_zeta(runs)]
        istar_runs = istar_runs.assign(layer=istar_runs["reg.layers"].map(_get_single_layer))
        single_layer_runs = istar_runs[istar_runs["layer"].notna()]
        if single_layer_runs.empty:
            return None
        candidates = istar_runs[istar_runs["layer"].notna() | istar_runs["reg.layers"].eq("all")]
        chosen_hash = _choose_group_hash(single_layer_runs, "layers", all_runs)
        selected = candidates[candidates["hash_without_layers"] == chosen_hash]
        all_layer_runs = selected[selected["layer"].isna()]
        runs_by_layer = {**_group_by_number(selected, "layer"), "all": all_layer_runs}
        line = _build_metric_line(selected, x_column="layer")
        panel = _build_panel([line], selected, single_layer_runs, "layers", runs_by_layer, all_runs)
        if all_layer_runs.empty:
            return panel
        return replace(panel, horizontal_line=(float(_compute_displayed_scores(all_layer_runs).mean()), "all layers"))

    return Plot(
        name="figure8",
        title="Figure 8: layer ablation",
        caption="Headline metric on the validation set with I-STAR on a single layer, mean ± standard deviation over "
        f"seeds. Points without error bars have one seed. Dashed line: I-STAR on all layers. {MARKER_LEGEND}",
        kind="bars",
        x_label="layer that is penalized",
        panels=_build_panels(all_runs, build_panel),
    )


def build_learning_curve_plots(cells: Iterable[Cell], records: Mapping[str, RunRecord]) -> tuple[Plot, Plot]:
    """Return two plots, the validation loss and the headline metric against the epoch, for the runs in Table 1."""
    finished_cells = [cell for cell in cells if cell.seeds]
    loss_panels, metric_panels = [], []
    for _, cell_group in groupby(finished_cells, key=lambda cell: (cell.model, cell.task)):
        task_cells = list(cell_group)
        headline_metric = task_cells[0].metrics[0]
        loss_panels.append(_build_learning_curve_panel(task_cells, records, "loss", "validation loss"))
        metric_panels.append(
            _build_learning_curve_panel(task_cells, records, headline_metric, axis_label(headline_metric))
        )

    def build_plot(name: str, title: str, quantity: str, panels: Sequence[Panel]) -> Plot:
        caption = (
            f"{quantity} on the validation set after each epoch, for the runs in Table 1: mean over seeds, band: "
            "standard deviation."
        )
        panels = tuple(panel for panel in panels if panel.lines)
        return Plot(name, title, caption, kind="line", x_label="epoch", panels=panels)

    loss_plot = build_plot("curves_loss", "Validation loss", "Loss", loss_panels)
    return loss_plot, build_plot("curves_metric", "Validation metric", "Headline metric", metric_panels)


def _build_learning_curve_panel(
    cells: Sequence[Cell], records: Mapping[str, RunRecord], metric: str, y_label: str
) -> Panel:
    """Return the panel of a metric by epoch with a line per method, the mean over its seeds.

    The cells have the same model and task. The panel has no lines if no epoch recorded the metric.
    """
    lines = []
    for cell in cells:
        epochs = [epoch for folder in cell.runs["folder"] for epoch in records[folder].epochs]
        metric_values = pd.Series(
            [displayed(metric, epoch["metrics"].get(metric, math.nan)) for epoch in epochs],
            index=[int(epoch["epoch"]) for epoch in epochs],
            dtype=float,
        )
        metric_values = metric_values[np.isfinite(metric_values)]
        if not metric_values.empty:
            lines.append(
                _build_mean_line(paper.FAMILIES[cell.family], metric_values, metric_values.index, tuple(cell.seeds))
            )
    return Panel(cells[0].model, cells[0].task, tuple(lines), fixed_settings="", y_label=y_label)


def _add_panels_by_lambda(
    plot: Plot, all_runs: pd.DataFrame, paper_lambdas: Sequence[float], y_by_folder: Mapping[str, Sequence[float]],
    family: str, layers: str, y_label: str, with_deviations: bool = True,
) -> Plot:  # fmt: skip
    """Return the plot with panels that have a line for Base and one for each lambda, averaged over seeds.

    Args:
        plot: a plot without panels.
        all_runs: all runs of the report.
        paper_lambdas: the lambdas of the paper's figure.
        y_by_folder: y values of each run's line by the run's folder; runs without an entry are not shown.
        family: method family of the runs with a lambda.
        layers: value of `reg.layers` of the runs with a lambda.
        y_label: label of the y axis.
        with_deviations: whether the lines have bands of one standard deviation over seeds.
    """

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        """Return the panel of a model and task, or None without a penalized run."""
        penalized = runs[(runs["family"] == family) & runs["reg.layers"].eq(layers)]
        if penalized.empty:
            return None
        # Small models are trained with other lambdas than the paper's; show these if there is none of the paper's.
        with_paper_lambda = penalized[penalized["reg.lambda"].isin(paper_lambdas)]
        penalized = penalized if with_paper_lambda.empty else with_paper_lambda
        selected = _select_runs_to_plot(penalized, "lambda", all_runs)
        runs_by_lambda = _group_by_lambda_with_base(runs, selected)
        lines = []
        for lambda_, lambda_runs in runs_by_lambda.items():
            drawn_runs = runs_by_lambda[lambda_] = _keep_runs_of_equal_length(lambda_runs, y_by_folder)
            ys_by_run = [y_by_folder[folder] for folder in drawn_runs["folder"]]
            if ys_by_run:
                ys = pd.DataFrame(ys_by_run, dtype=float).replace([math.inf, -math.inf], math.nan)
                means = ys.mean()
                # A single run has no standard deviation.
                deviations = tuple(ys.std()) if with_deviations and len(ys) > 1 else ()
                xs = tuple(map(float, range(len(means))))
                seeds = _get_seeds(drawn_runs)
                lines.append(Line(_format_lambda(lambda_), xs, tuple(means), y_error=deviations, seeds=seeds))
        return _build_panel(lines, selected, penalized, "lambda", runs_by_lambda, all_runs, y_label)

    panels = _build_panels(all_runs[all_runs["folder"].isin(list(y_by_folder))], build_panel)
    return replace(plot, panels=panels)


def _keep_runs_of_equal_length(runs: pd.DataFrame, y_by_folder: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Return the runs whose number of y values is that of the first run with any y values."""
    num_ys = runs["folder"].map(lambda folder: len(y_by_folder[folder]))
    nonzero_num_ys = num_ys[num_ys > 0]
    return runs[num_ys.eq(nonzero_num_ys.iloc[0])] if len(nonzero_num_ys) else runs.head(0)


def _build_panels(all_runs: pd.DataFrame, build_panel: PanelBuilder) -> tuple[Panel, ...]:
    """Return a panel for each model and task of the usable runs, without those that have nothing to show."""
    usable = all_runs[all_runs["usable"]]
    if "reg.lambda" not in usable:
        return ()
    panels = [
        build_panel(usable[(usable["model"] == model) & (usable["task"] == task)])
        for model in list_models(usable)
        for task in list_tasks(usable)
    ]
    return tuple(panel for panel in panels if panel is not None and panel.lines)


def _build_panel(
    lines: Sequence[Line],
    selected: pd.DataFrame,
    candidates: pd.DataFrame,
    varied: str,
    runs_by_value: Mapping[Any, pd.DataFrame],
    all_runs: pd.DataFrame,
    y_label: str = "",
) -> Panel:
    """Return a panel of lines with a description of the settings that its runs have in common.

    Args:
        lines: the lines of the panel.
        selected: the runs that the lines show.
        candidates: the runs of the same model, task and method from which the shown runs were selected.
        varied: the setting that the figure varies, a key of `configurations.VARIED`.
        runs_by_value: the runs that are drawn, by the value of the varied setting.
        all_runs: all runs of the report, from which Table 1 is made.
        y_label: label of the y axis; by default that of the headline metric.
    """
    first_run = row_dicts(selected.head(1))[0]
    fixed_settings = [
        f"{symbol} = {first_run[f'reg.{key}']:g}"
        for key, symbol in (("lambda", "λ"), ("zeta", "ζ"))
        if key != varied and is_finite(first_run.get(f"reg.{key}"))
    ]
    hash_column = f"hash_without_{varied}"
    num_hidden = candidates[hash_column].nunique() - 1
    hidden_note = f", {num_hidden} other configuration{'s' * (num_hidden > 1)} not shown" if num_hidden else ""
    table1_hash = _get_table1_hash(candidates, varied, all_runs)
    if num_hidden and table1_hash in set(candidates[hash_column]) - set(selected[hash_column]):
        hidden_note += f", among them that of Table 1, for which only one {SYMBOLS[varied]} was tried"
    num_runs = sum(map(len, runs_by_value.values()))
    settings = ", ".join([*fixed_settings, describe_hyperparameters(first_run)])
    return Panel(
        first_run["model"],
        first_run["task"],
        tuple(lines),
        fixed_settings=f"{settings}; {num_runs} run{'s' * (num_runs > 1)}{hidden_note}"
        f"{_describe_values_with_fewer_seeds(runs_by_value, SYMBOLS[varied])}",
        y_label=y_label or axis_label(first_run["metric"]),
        runs=tuple(folder for runs in runs_by_value.values() for folder in runs["folder"]),
    )


def _select_all_layer_istar_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of I-STAR with a fixed zeta that penalize all layers."""
    return runs[(runs["family"] == "istar") & runs["reg.layers"].eq("all") & has_fixed_zeta(runs)]


def _describe_values_with_fewer_seeds(runs_by_value: Mapping[Any, pd.DataFrame], symbol: str) -> str:
    """Return the part of a caption that names the values with fewer seeds than others; empty if there are none."""
    max_seeds = max(map(len, runs_by_value.values()), default=0)
    descriptions = [
        f"{len(runs)} at {value if isinstance(value, str) else f'{symbol} = {value:g}'}"
        for value, runs in runs_by_value.items()
        if 0 < len(runs) < max_seeds
    ]
    return f"; fewer than {max_seeds} seeds: {', '.join(descriptions)}" if descriptions else ""


def _select_runs_to_plot(candidates: pd.DataFrame, varied: str, all_runs: pd.DataFrame) -> pd.DataFrame:
    """Return those of the candidates that a figure shows; they differ only in the seed and in the setting `varied`.

    The candidates are runs of one task, model and method; `varied` is a key of `configurations.VARIED`.
    """
    return candidates[candidates[f"hash_without_{varied}"] == _choose_group_hash(candidates, varied, all_runs)]


def _choose_group_hash(candidates: pd.DataFrame, varied: str, all_runs: pd.DataFrame) -> str:
    """Return the hash that the runs of a figure have in common: that of all their settings except seed and `varied`.

    It is the hash of the configuration in Table 1. If only one value of `varied` was tried with that configuration, but
    several with other configurations, it is the hash of the best of the other ones, see `find_best_group`.
    """
    column = f"hash_without_{varied}"
    with_several_values = candidates[candidates.groupby(column)["config_hash"].transform("nunique") > 1]
    preferred_candidates = candidates if with_several_values.empty else with_several_values
    table1_hash = _get_table1_hash(candidates, varied, all_runs)
    is_available = table1_hash in set(preferred_candidates[column])
    return table1_hash if is_available else find_best_group(preferred_candidates, column)


def _get_table1_hash(runs: pd.DataFrame, varied: str, all_runs: pd.DataFrame) -> str:
    """Return the hash, without `varied`, of the configuration that Table 1 shows for the method of these runs.

    It is empty if Table 1 shows no configuration of the method.
    """
    first_run = row_dicts(runs.head(1))[0]
    cell = select_cell(all_runs, first_run["task"], first_run["model"], first_run["family"])
    return str(cell.first_run.get(f"hash_without_{varied}", ""))


def _group_by_lambda_with_base(runs: pd.DataFrame, selected: pd.DataFrame) -> dict[Any, pd.DataFrame]:
    """Return runs by lambda: first the runs of Base, under the key `BASE_LABEL`, then the selected runs.

    The runs of Base are those among `runs` whose settings, except for the penalty, equal those of the selected runs.
    """
    has_same_settings = runs["hash_without_method"] == selected["hash_without_method"].iloc[0]
    base_runs = runs[(runs["family"] == "base") & has_same_settings]
    return {**({} if base_runs.empty else {BASE_LABEL: base_runs}), **_group_by_number(selected, "reg.lambda")}


def _group_by_number(runs: pd.DataFrame, column: str) -> dict[Any, pd.DataFrame]:
    """Return the runs by the number that they have in a column, in ascending order of the numbers."""
    return {float(number): group for number, group in runs.groupby(runs[column].astype(float))}


def build_mean_point(label: str, runs: pd.DataFrame, isotropy_by_folder: Mapping[str, float] | pd.Series) -> Line:
    """Return a point at the mean isotropy and the mean headline metric of the runs, with standard deviations."""
    isotropy, scores = runs["folder"].map(isotropy_by_folder).astype(float), _compute_displayed_scores(runs)
    # A single run has no standard deviation.
    x_error, y_error = np.nan_to_num([isotropy.std(), scores.std()])
    return Line(
        label,
        x=(isotropy.mean(),),
        y=(scores.mean(),),
        x_error=(x_error,),
        y_error=(y_error,),
        seeds=_get_seeds(runs),
        num_seeds=(len(runs),),
        collapsed=(are_all_collapsed(runs),),
    )


def _build_metric_line(runs: pd.DataFrame, x_column: str) -> Line:
    """Return a line of the mean headline metric over seeds against the numbers in a column."""
    line = _build_mean_line("mean ± std", _compute_displayed_scores(runs), runs[x_column].astype(float))
    runs_of_points = _group_by_number(runs, x_column).values()
    is_collapsed = tuple(map(are_all_collapsed, runs_of_points))
    return replace(line, num_seeds=tuple(map(len, runs_of_points)), collapsed=is_collapsed)


def _compute_displayed_scores(runs: pd.DataFrame) -> pd.Series:
    """Return the headline metric of each run, scaled by `displayed`, with the index of the runs."""
    metrics_and_values = zip(runs["metric"], runs["value"].astype(float), strict=True)
    return pd.Series([displayed(metric, value) for metric, value in metrics_and_values], index=runs.index, dtype=float)


def _build_mean_line(label: str, values: pd.Series, xs: Any, seeds: tuple[int, ...] = ()) -> Line:
    """Return a line through the means of the values at each x, with standard deviations as error bars."""
    values_by_x = values.groupby(xs)
    means, deviations = values_by_x.mean(), values_by_x.std().fillna(0.0)
    return Line(label, tuple(map(float, means.index)), tuple(means), y_error=tuple(deviations), seeds=seeds)


def _get_seeds(runs: pd.DataFrame) -> tuple[int, ...]:
    """Return the different seeds of the runs in ascending order."""
    return tuple(sorted({int(seed) for seed in runs["seed"]}))


def _format_lambda(lambda_: Any) -> str:
    """Return the label of a line, e.g. `λ = -1`; a text, such as `Base`, is returned as it is."""
    return lambda_ if isinstance(lambda_, str) else f"λ = {lambda_:g}"


def _get_single_layer(layers: Any) -> int | None:
    """Return the only layer of a list of penalized layers, or None if the value is no list of one layer."""
    return layers[0] if isinstance(layers, list) and len(layers) == 1 else None


def _get_isoscore_by_layer(record: RunRecord) -> list[float]:
    """Return IsoScore after training from the embeddings to the last layer; empty if it was not measured."""
    after = record.isotropy.get("after", {})
    return [after[layer] for layer in sorted(filter(str.isdigit, after), key=int)]
