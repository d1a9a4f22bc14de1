"""The paper's Figures 2 to 8 as numbers: Figure 2 from a file, the others computed from runs."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from istar.drawing.plot import Line, Panel, Plot
from istar.reports import paper
from istar.reports.configurations import are_all_collapsed, find_best_group, hash_without
from istar.reports.figure_runs import (
    FigureRuns,
    build_panel,
    choose_settings,
    get_istar_runs,
    group_by_number,
    select_by_lambda,
    select_settings,
    split_by_task,
)
from istar.reports.geometry_file import IsoScoreStar, RunGeometry
from istar.runs.record import RunRecord

MARKER_LEGEND = "Hollow: fewer seeds than other points. Crossed: all runs have collapsed to constant predictions."
TRUE_SCORE = 0.86734
"""IsoScore of the distribution in Figure 2."""


def build_minibatch_stability_plot() -> Plot:
    """Return the paper's Figure 2: IsoScore* of batches of a synthetic Gaussian cloud against the batch size.

    The scores do not depend on any run, and are in `stability.csv`, which `python -m tests.reports.simulated_stability`
    writes.
    """
    with files("istar.reports").joinpath("stability.csv").open(encoding="utf-8") as file:
        scores = pd.read_csv(file)
    lines = []
    for label, rows in scores.groupby("line", sort=False):
        points, means, deviations = (tuple(rows[column].astype(float)) for column in ("points", "mean", "std"))
        line = Line(str(label), points, means, y_error=deviations)
        zeta = float(rows["zeta"].iloc[0])  # NaN for a line without a fixed zeta
        lines.append(line if math.isnan(zeta) else replace(line, scale_position=zeta))
    truth = TRUE_SCORE, f"truth ({TRUE_SCORE:.2f})"
    panel = Panel("IsoScore*", lines, y_bounds=(0, 1), horizontal_line=truth)
    return Plot(
        name="figure2",
        title="Figure 2: mini-batch stability",
        caption="IsoScore* of batches of a synthetic Gaussian cloud in 768 dimensions, variances 10, 6, 4, 4, 1, ..., "
        "1, by batch size and ζ; Σ_S is the covariance of 75,000 other points. In addition to the paper: ζ = auto, "
        "estimated from each batch, and the unbiased IsoScore, which needs no Σ_S. Mean and "
        "standard deviation of three batches each; dashed line: the score of the distribution itself. This figure "
        "needs no run.",
        kind="line",
        x_label="points in the batch",
        panels=(panel,),
        log_x=True,
    )


def build_isotropy_performance_plot(all_runs: pd.DataFrame, geometry_by_folder: Mapping[str, RunGeometry]) -> Plot:
    """Return the paper's Figure 3: isotropy against the headline metric, with a point for each lambda of I-STAR."""
    selections = [
        select_by_lambda(runs, istar_runs)
        for runs in split_by_task(all_runs)
        if not (istar_runs := get_istar_runs(runs)).empty
    ]
    measure, reason = _choose_isotropy_measure(selections, geometry_by_folder)
    isotropy_by_folder = dict(zip(all_runs["folder"], all_runs["isoscore_after"].astype(float), strict=True))
    if measure == "IsoScore*":
        unions = {folder: star["union"] for folder, star in _get_isoscore_stars(geometry_by_folder).items()}
        isotropy_by_folder = pd.Series(unions, dtype=float).to_dict()
    panels = []
    for selection in selections:
        max_seeds = max(map(len, selection.runs_by_value.values()))
        lines = [
            build_mean_point(_name_method(runs), runs, isotropy_by_folder, max_seeds)
            for runs in selection.runs_by_value.values()
        ]
        panels.append(build_panel(selection, lines))
    return Plot(
        name="figure3",
        title="Figure 3: isotropy and performance",
        caption=f"{reason} Isotropy of layers 1 to L on the validation set against the headline metric on the same "
        "set, at the epoch with the best headline metric: a point per λ of I-STAR, mean over seeds, error bars: "
        f"standard deviations. {MARKER_LEGEND}",
        kind="points",
        x_label=measure,
        panels=tuple(panels),
    )


def build_mean_activation_plot(all_runs: pd.DataFrame, geometry_by_folder: Mapping[str, RunGeometry]) -> Plot:
    """Return the paper's Figure 4: mean activation of each dimension of the last layer, for Base and CosReg."""
    activations_by_folder = {folder: geometry["mean_activation"] for folder, geometry in geometry_by_folder.items()}
    selections = _select_curves(all_runs, activations_by_folder, "cosreg", "last", (-1, 1))
    caption = ""
    if selections:
        counts = [geometry_by_folder[folder]["examples"] for selection in selections for folder in selection.folders]
        caption = (
            f"Mean activation of each dimension of the last layer over the tokens of {_format_range(counts)} "
            "validation texts, mean over seeds: without a penalty, and with CosReg on the last layer."
        )
    panels = _build_curve_panels(selections, activations_by_folder, "mean activation")
    # The order of the dimensions means nothing, so that bands would only hide the lines.
    panels = [replace(panel, lines=tuple(replace(line, y_error=()) for line in panel.lines)) for panel in panels]
    return Plot(
        name="figure4",
        title="Figure 4: mean activations and CosReg",
        caption=caption,
        kind="line",
        x_label="dimension of the last layer",
        panels=tuple(panels),
    )


def build_intrinsic_dimension_plot(all_runs: pd.DataFrame, geometry_by_folder: Mapping[str, RunGeometry]) -> Plot:
    """Return the paper's Figure 5: TwoNN intrinsic dimension by layer, for Base and I-STAR."""
    dimensions_by_folder = {folder: geometry["two_nn"] for folder, geometry in geometry_by_folder.items()}
    selections = _select_curves(all_runs, dimensions_by_folder, "istar", "all", (-5, -3, 3, 5))
    return Plot(
        name="figure5",
        title="Figure 5: intrinsic dimension",
        caption="TwoNN dimension of the first token's states by layer over at most 1,000 validation texts, mean over "
        "seeds, band: standard deviation; without a penalty, and with I-STAR.",
        kind="line",
        x_label="layer (0: embeddings)",
        panels=tuple(_build_curve_panels(selections, dimensions_by_folder, "TwoNN dimension")),
    )


def build_layer_isotropy_plot(
    all_runs: pd.DataFrame, records: Mapping[str, RunRecord], geometry_by_folder: Mapping[str, RunGeometry]
) -> Plot:
    """Return the paper's Figure 6: isotropy by layer, for Base and I-STAR, of the runs that measured IsoScore."""
    isotropy_by_folder = {
        folder: isoscores
        for folder in all_runs[all_runs["usable"]]["folder"]
        if (isoscores := _sort_by_layer(records[folder].isotropy.get("after", {})))
    }
    selections = _select_curves(all_runs, isotropy_by_folder, "istar", "all", (-1, 1))
    measure, reason = _choose_isotropy_measure(selections, geometry_by_folder)
    if measure == "IsoScore*":
        stars = _get_isoscore_stars(geometry_by_folder)
        isotropy_by_folder = {folder: _sort_by_layer(star["layers"]) for folder, star in stars.items()}
    return Plot(
        name="figure6",
        title="Figure 6: isotropy layer by layer",
        caption=f"{reason} Isotropy of each layer on the validation set at the epoch with the best headline metric, "
        "mean over seeds, band: standard deviation; without a penalty, and with I-STAR.",
        kind="line",
        x_label="layer (0: embeddings)",
        panels=tuple(_build_curve_panels(selections, isotropy_by_folder, measure)),
    )


def _sort_by_layer(score_by_layer: Mapping[str, float | None]) -> list[float | None]:
    return [score_by_layer[layer] for layer in sorted(filter(str.isdigit, score_by_layer), key=int)]


def _get_isoscore_stars(geometry_by_folder: Mapping[str, RunGeometry]) -> dict[str, IsoScoreStar]:
    return {
        folder: geometry["isoscore_star"]
        for folder, geometry in geometry_by_folder.items()
        if "isoscore_star" in geometry
    }


def _choose_isotropy_measure(
    selections: Sequence[FigureRuns], geometry_by_folder: Mapping[str, RunGeometry]
) -> tuple[str, str]:
    """Return the isotropy measure of a figure, and the reason for its caption."""
    zeta, tokens = paper.ISOSCORE_ZETA, "all tokens of the validation set"
    folders = {folder for selection in selections for folder in selection.folders}
    stars = _get_isoscore_stars(geometry_by_folder)
    num_points = {
        folder: star["num_points"] for folder, star in stars.items() if folder in folders and star["zeta"] == zeta
    }
    if folders and len(num_points) == len(folders):
        return "IsoScore*", (
            f"IsoScore* with the paper's ζ = {zeta:g} over {tokens}, in all {len(folders)} runs of this figure; Σ_S is "
            f"the covariance of the union of layers 1 to L over {_format_range(num_points.values())} points of the "
            "training data, or of a layer's states over the same tokens."
        )
    reason = (
        f"IsoScore (ζ = 0) over {tokens}; the paper has IsoScore* with ζ = {zeta:g}, so the axes cannot be compared."
    )
    if not num_points:
        return "IsoScore", f"{reason} No run of this figure has IsoScore*; run.isotropy_zeta={zeta:g} measures it."
    return "IsoScore", (
        f"{reason} Of the {len(folders)} runs of this figure, {len(num_points)} have IsoScore* as well. It is shown if "
        f"all have it, which run.isotropy_zeta={zeta:g} measures."
    )


def _format_range(counts: Collection[int]) -> str:
    smallest, largest = min(counts), max(counts)
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def _select_curves(
    all_runs: pd.DataFrame,
    y_by_folder: Mapping[str, Sequence[float | None]],
    family: str,
    layers: str,
    paper_lambdas: Sequence[float],
) -> list[FigureRuns]:
    """Select the runs of a figure with a line for Base and for each lambda of a penalty.

    Runs without an entry in `y_by_folder` are not shown. `layers` is the penalty's `reg.layers`.
    """
    selections = []
    for runs in split_by_task(all_runs[all_runs["folder"].isin(list(y_by_folder))]):
        penalized = runs[(runs["family"] == family) & runs["reg.layers"].eq(layers)]
        # Small models are trained with other lambdas; show them if the paper's are missing.
        with_paper_lambda = penalized[penalized["reg.lambda"].isin(paper_lambdas)]
        penalized = penalized if with_paper_lambda.empty else with_paper_lambda
        if not penalized.empty:
            selections.append(select_by_lambda(runs, penalized))
    return selections


def _build_curve_panels(
    selections: Sequence[FigureRuns], y_by_folder: Mapping[str, Sequence[float | None]], y_label: str
) -> list[Panel]:
    panels = []
    for selection in selections:
        lines = []
        for runs in selection.runs_by_value.values():
            curves = pd.DataFrame([y_by_folder[folder] for folder in runs["folder"]], dtype=float)
            curves = curves.replace([math.inf, -math.inf], math.nan)
            # The standard deviation of a single run is undefined.
            deviations = tuple(curves.std()) if len(curves) > 1 else ()
            xs = tuple(map(float, curves.columns))
            lines.append(Line(_name_method(runs), xs, tuple(curves.mean()), y_error=deviations))
        panels.append(build_panel(selection, lines, y_label))
    return panels


def _name_method(runs: pd.DataFrame) -> str:
    return str(runs["method"].iloc[0])


def build_zeta_ablation_plot(all_runs: pd.DataFrame) -> Plot:
    """Return the paper's Figure 7: the headline metric of I-STAR against zeta, its shrinkage intensity."""
    panels = []
    for runs in split_by_task(all_runs):
        istar_runs = get_istar_runs(runs)
        if istar_runs.empty:
            continue
        selected = select_settings(istar_runs, "reg.zeta")
        runs_by_zeta = group_by_number(selected, "reg.zeta")
        if len(runs_by_zeta) < 2:
            continue
        selection = FigureRuns("reg.zeta", istar_runs, selected, runs_by_zeta)
        panel = build_panel(selection, [_build_metric_line(selected, "reg.zeta")])
        # As in Tables 1 and 2.
        best_runs = selected[selected["configuration"] == find_best_group(selected, "configuration")]
        if not are_all_collapsed(best_runs):
            panel = replace(panel, vertical_line=(float(best_runs["reg.zeta"].iloc[0]), "best ζ"))
        panels.append(panel)
    return Plot(
        name="figure7",
        title="Figure 7: ζ ablation",
        caption="Headline metric on the validation set by ζ of I-STAR, mean ± standard deviation over seeds; ζ = 0 is "
        "no shrinkage, ζ = 1 only Σ_S. Points without error bars have one seed. Dashed line: of the ζ with the most "
        f"seeds, the one with the best mean on the set on which the epoch was chosen, as in Table 2. {MARKER_LEGEND}",
        kind="bars",
        x_label="ζ",
        panels=tuple(panels),
    )


def build_layer_ablation_plot(all_runs: pd.DataFrame) -> Plot:
    """Return the paper's Figure 8: the headline metric against the single layer that I-STAR penalizes."""
    panels = []
    for runs in split_by_task(all_runs):
        istar_runs = runs[runs["has_fixed_zeta"]]
        istar_runs = istar_runs.assign(layer=istar_runs["reg.layers"].map(_get_single_layer))
        single_layer_runs = istar_runs[istar_runs["layer"].notna()]
        if single_layer_runs.empty:
            continue
        settings = choose_settings(single_layer_runs, "reg.layers")
        has_settings = hash_without(istar_runs, "reg.layers") == settings
        selected = istar_runs[has_settings & (istar_runs["layer"].notna() | istar_runs["reg.layers"].eq("all"))]
        runs_by_layer = group_by_number(selected, "layer")
        all_layer_runs = selected[selected["layer"].isna()]
        selection = FigureRuns("reg.layers", single_layer_runs, selected, {**runs_by_layer, "all": all_layer_runs})
        panel = build_panel(selection, [_build_metric_line(selected, "layer")])
        if not all_layer_runs.empty:
            all_layer_score = float(all_layer_runs["score"].mean())
            panel = replace(panel, horizontal_line=(all_layer_score, "all layers"))
        panels.append(panel)
    return Plot(
        name="figure8",
        title="Figure 8: layer ablation",
        caption="Headline metric on the validation set with I-STAR on a single layer, mean ± standard deviation over "
        f"seeds. Points without error bars have one seed. Dashed line: I-STAR on all layers. {MARKER_LEGEND}",
        kind="bars",
        x_label="layer that is penalized",
        panels=tuple(panels),
    )


def _get_single_layer(layers: Any) -> int | None:
    return layers[0] if isinstance(layers, list) and len(layers) == 1 else None


def _build_metric_line(runs: pd.DataFrame, x_column: str) -> Line:
    scores_by_x = runs["score"].groupby(runs[x_column].astype(float))
    counts, means = scores_by_x.size(), scores_by_x.mean()
    return Line(
        "mean ± std",
        x=tuple(map(float, means.index)),
        y=tuple(means),
        # The standard deviation of a single run is undefined.
        y_error=tuple(scores_by_x.std().fillna(0.0)),
        hollow=tuple(counts < counts.max()),
        crossed=tuple(map(are_all_collapsed, group_by_number(runs, x_column).values())),
    )


def build_mean_point(
    label: str, runs: pd.DataFrame, isotropy_by_folder: Mapping[str, float] | pd.Series, max_seeds: int
) -> Line:
    """Return a point at the mean isotropy and the mean headline metric of the runs, with standard deviations.

    `max_seeds` is the largest number of seeds of a point in the same panel.
    """
    isotropy, scores = runs["folder"].map(isotropy_by_folder).astype(float), runs["score"]
    x_error, y_error = np.nan_to_num([isotropy.std(), scores.std()])
    return Line(
        label,
        x=(isotropy.mean(),),
        y=(scores.mean(),),
        x_error=(x_error,),
        y_error=(y_error,),
        hollow=(len(runs) < max_seeds,),
        crossed=(are_all_collapsed(runs),),
    )
