"""The report's figures as numbers: the paper's Figures 2 to 8 and training curves, computed from runs.

The runs of a line differ only in the seed and in what the axis or the legend of the figure varies.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from istar.figures.plot import BASE, Line, Panel, Plot
from istar.reports import paper
from istar.reports.cells import Cell, best_group, describe, has_zeta, is_finite, models, row_dicts, tasks
from istar.reports.geometry_file import Geometry
from istar.reports.stability import Stability
from istar.reports.statistics import Spread, spread
from istar.results import RunRecord

PanelBuilder = Callable[[pd.DataFrame], Panel | None]
"""Takes the usable runs of a model and a task; returns their panel, or None if the figure has nothing to show."""


def minibatch_stability(scores: Stability) -> Plot:
    """Return Figure 2: scores of batches of a synthetic cloud by batch size."""
    labels = {f"ζ = {zeta:g}": spreads for zeta, spreads in scores.scores.items()}
    labels |= {"ζ = auto": scores.auto, "unbiased": scores.unbiased}
    lines = [_spread_line(label, dict(zip(scores.sizes, spreads, strict=True))) for label, spreads in labels.items()]
    panel = Panel("", "", tuple(lines), "", "IsoScore*", level=(scores.truth, f"truth ({scores.truth:.2f})"))
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


def isotropy_and_performance(frame: pd.DataFrame) -> Plot:
    """Return Figure 3: IsoScore* against the headline metric, with a point per lambda."""

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        istar_runs = _all_layer_istar(runs)
        selected = _select_varied(istar_runs, "lambda", at_least=1)
        if selected is None:
            return None
        groups = _by_lambda_with_base(runs, selected)
        lines = [_mean_point(_lambda_label(value), group) for value, group in groups.items()]
        return _make_panel(lines, selected, istar_runs, "lambda", _seeds_by_value(groups))

    return Plot(
        "figure3",
        "Figure 3: isotropy and performance",
        "IsoScore* of layers 1 to L on the validation set (ζ = 0, all its tokens) against the headline metric on the "
        "same set, at the epoch with the best headline metric: a point per λ of I-STAR, mean over seeds, bars: "
        "standard deviations. The paper's figure has ζ = 0.2, so the x axes cannot be compared.",
        "points",
        "IsoScore*",
        _panels(frame, build_panel),
        "figure3",
        values=(-5, -3, -1, 0.5, 1, 3, 5),
    )


def mean_activations(frame: pd.DataFrame, geometries: Mapping[str, Geometry]) -> Plot:
    """Return Figure 4: mean activation of each dimension of the last layer, for Base and CosReg.

    Args:
        frame: a frame from `cells.prepare`.
        geometries: geometry by the run's folder; other runs are not shown.
    """
    plot = Plot(
        "figure4",
        "Figure 4: mean activations and CosReg",
        "Mean activation of each dimension of the last layer over the tokens of at most 1,000 validation texts, "
        "mean over seeds: without a penalty, and with CosReg on the last layer.",
        "line",
        "dimension of the last layer",
        (),
        "figure4",
        "qnli",
        (-1, 1),
        with_base=True,
        seeds=1,
    )
    values = {folder: geometry.mean_activation for folder, geometry in geometries.items()}
    return _with_line_per_lambda(plot, frame, values, "cosreg", "last", "mean activation")


def intrinsic_dimensions(frame: pd.DataFrame, geometries: Mapping[str, Geometry]) -> Plot:
    """Return Figure 5: TwoNN intrinsic dimension by layer, for Base and I-STAR; the arguments as for Figure 4."""
    plot = Plot(
        "figure5",
        "Figure 5: intrinsic dimension",
        "TwoNN dimension of the first token's states by layer over at most 1,000 validation texts, mean over "
        "seeds: without a penalty, and with I-STAR.",
        "line",
        "layer (0: embeddings)",
        (),
        "figure5",
        "sst2",
        (-5, -3, 3, 5),
        with_base=True,
        seeds=1,
    )
    values = {folder: geometry.two_nn for folder, geometry in geometries.items()}
    return _with_line_per_lambda(plot, frame, values, "istar", "all", "TwoNN dimension")


def layer_isotropy(frame: pd.DataFrame, records: Mapping[str, RunRecord]) -> Plot:
    """Return Figure 6: IsoScore* by layer, for Base and I-STAR."""
    plot = Plot(
        "figure6",
        "Figure 6: isotropy layer by layer",
        "IsoScore* of each layer on the validation set (ζ = 0, all its tokens) at the epoch with the best headline "
        "metric, mean over seeds: without a penalty, and with I-STAR.",
        "line",
        "layer (0: embeddings)",
        (),
        "figure6",
        "qnli",
        (-1, 1),
        with_base=True,
        seeds=1,
    )
    values = {folder: _isoscore_by_layer(records[folder]) for folder in frame[frame["usable"]]["folder"]}
    return _with_line_per_lambda(plot, frame, values, "istar", "all", "IsoScore*")


def zeta_ablation(frame: pd.DataFrame) -> Plot:
    """Return Figure 7: the headline metric by zeta of I-STAR."""

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        istar_runs = _all_layer_istar(runs)
        selected = _select_varied(istar_runs, "zeta", at_least=2)
        if selected is None:
            return None
        groups = _by_value(selected, "reg.zeta")
        best = max(groups, key=lambda zeta: float(groups[zeta]["value"].mean()))
        alternatives = _with_values(istar_runs, "zeta", at_least=2)
        panel = _make_panel([_metric_line(groups)], selected, alternatives, "zeta", _seeds_by_value(groups))
        return replace(panel, mark=(best, "best ζ"))

    return Plot(
        "figure7",
        "Figure 7: ζ ablation",
        "Headline metric on the validation set by ζ of I-STAR, mean ± standard deviation over seeds; ζ = 0 is no "
        "shrinkage, ζ = 1 only Σ_S. Points without bars have one seed. Dashed: the best mean.",
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
        selected = runs[runs["hash_without_layers"] == best_group(single, "hash_without_layers")]
        all_layers = selected[selected["layer"].isna()]
        groups = {int(layer): group for layer, group in _by_value(selected, "layer").items()}
        count = layer_count(records[selected["folder"].iloc[0]])
        seeds: dict[Any, tuple[int, ...]] = dict.fromkeys(range(1, count + 1), ())
        seeds |= {**_seeds_by_value(groups), "all": _seeds(all_layers)}
        level = (100 * float(all_layers["value"].mean()), "all layers") if len(all_layers) else None
        return replace(_make_panel([_metric_line(groups)], selected, single, "layers", seeds), level=level)

    return Plot(
        "figure8",
        "Figure 8: layer ablation",
        "Headline metric on the validation set with I-STAR on a single layer, mean ± standard deviation over seeds. "
        "Points without bars have one seed. Dashed: I-STAR on all layers.",
        "bars",
        "layer that is penalized",
        _panels(frame, build_panel),
        "layer_ablation",
        "cola",
        symbol="layer",
    )


def curves(cells: Iterable[Cell], records: Mapping[str, RunRecord]) -> tuple[Plot, Plot]:
    """Return validation loss and headline metric by epoch, for the runs in Table 1."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.seeds:
            groups.setdefault((cell.model, cell.task), []).append(cell)
    losses, metrics = [], []
    for group in groups.values():
        headline = group[0].metrics[0]
        losses.append(_curve_panel(group, records, "loss", 1, "validation loss"))
        metrics.append(_curve_panel(group, records, headline, 100, f"{headline}, percent"))
    averaging = "after each epoch, for the runs in Table 1: mean over seeds, band: standard deviation."
    loss_plot = Plot(
        "curves_loss",
        "Validation loss",
        f"Loss on the validation set {averaging}",
        "line",
        "epoch",
        tuple(panel for panel in losses if panel.lines),
    )
    metric_panels = tuple(panel for panel in metrics if panel.lines)
    caption = f"Headline metric on the validation set {averaging}"
    return loss_plot, replace(
        loss_plot, name="curves_metric", title="Validation metric", caption=caption, panels=metric_panels
    )


def _curve_panel(
    group: Sequence[Cell], records: Mapping[str, RunRecord], metric: str, scale: float, y_label: str
) -> Panel:
    """Return a panel with a line per method; it has no lines if no epoch recorded the metric."""
    lines = []
    for cell in group:
        by_epoch: dict[int, list[float]] = {}
        for folder in cell.runs["folder"]:
            for entry in records[folder].epochs:
                value = entry["metrics"].get(metric)
                if value is not None and math.isfinite(value):
                    by_epoch.setdefault(int(entry["epoch"]), []).append(scale * value)
        if by_epoch:
            spreads = {epoch: spread(values) for epoch, values in by_epoch.items()}
            lines.append(_spread_line(paper.FAMILIES[cell.family], spreads, tuple(cell.seeds)))
    return Panel(group[0].model, group[0].task, tuple(lines), "", y_label)


def _with_line_per_lambda(
    plot: Plot,
    frame: pd.DataFrame,
    values: Mapping[str, Sequence[float]],
    family: str,
    layers: str,
    y_label: str,
) -> Plot:
    """Return the plot with panels that have a line for Base and for each lambda, averaged over seeds.

    Args:
        plot: the figure without panels.
        frame: a frame from `cells.prepare`.
        values: y values of a run's line, by its folder; runs without an entry are not shown.
        family: method family beside Base.
        layers: `reg.layers` of that family's runs.
        y_label: label of the y axis.
    """

    def build_panel(runs: pd.DataFrame) -> Panel | None:
        penalized = runs[(runs["family"] == family) & runs["reg.layers"].eq(layers)]
        of_paper = penalized[penalized["reg.lambda"].isin(plot.values)]
        # Small models are trained with other lambdas than the paper's.
        penalized = penalized if of_paper.empty else of_paper
        selected = _select_varied(penalized, "lambda", at_least=1)
        if selected is None:
            return None
        groups = _by_lambda_with_base(runs, selected)
        lines = []
        for value, group in groups.items():
            rows = [values[folder] for folder in group["folder"] if values[folder]]
            rows = [row for row in rows if len(row) == len(rows[0])]
            if rows:
                means = pd.DataFrame(rows, dtype=float).replace([math.inf, -math.inf], math.nan).mean()
                xs = tuple(map(float, range(len(means))))
                lines.append(Line(_lambda_label(value), xs, tuple(means.tolist()), seeds=_seeds(group)))
        return _make_panel(lines, selected, penalized, "lambda", _seeds_by_value(groups), y_label)

    return replace(plot, panels=_panels(frame[frame["folder"].isin(list(values))], build_panel))


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
    seeds: Mapping[Any, tuple[int, ...]],
    y_label: str = "",
) -> Panel:
    """Return a panel with a description of the settings that its runs have in common.

    Args:
        lines: the panel's lines.
        selected: the runs that the lines show.
        alternatives: the runs from which they were selected.
        varied: what the runs vary, a key of `cells.VARIED`.
        seeds: seeds of the runs by the value that varies.
        y_label: label of the y axis; by default the headline metric.
    """
    first = row_dicts(selected.head(1))[0]
    settings = [
        f"{symbol} = {first[f'reg.{key}']:g}"
        for key, symbol in (("lambda", "λ"), ("zeta", "ζ"))
        if key != varied and is_finite(first.get(f"reg.{key}"))
    ]
    others = alternatives[f"hash_without_{varied}"].nunique() - 1
    hidden = f", {others} other configuration{'s' * (others > 1)} not shown" if others else ""
    runs = f"{len(selected)} run{'s' * (len(selected) > 1)}"
    held = f"{', '.join([*settings, describe(first)])}; {runs}{hidden}"
    y_label = y_label or f"{first['metric']}, percent"
    return Panel(first["model"], first["task"], tuple(lines), held, y_label, seeds=seeds)


def _all_layer_istar(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[(runs["family"] == "istar") & runs["reg.layers"].eq("all") & has_zeta(runs)]


def _select_varied(runs: pd.DataFrame, varied: str, at_least: int) -> pd.DataFrame | None:
    """Select, by `best_group`, runs that have the same settings except `varied`; None if there are none.

    Args:
        runs: runs of one task, model and method.
        varied: a key of `cells.VARIED`.
        at_least: minimum number of different values of `varied`.
    """
    column = f"hash_without_{varied}"
    runs = _with_values(runs, varied, at_least)
    return None if runs.empty else runs[runs[column] == best_group(runs, column)]


def _with_values(runs: pd.DataFrame, varied: str, at_least: int) -> pd.DataFrame:
    """Keep the runs whose group has at least this many different values of `varied`."""
    if runs.empty:
        return runs
    counts = runs.groupby(f"hash_without_{varied}")[f"reg.{varied}"].transform("nunique")
    return runs[counts >= at_least]


def _by_lambda_with_base(runs: pd.DataFrame, selected: pd.DataFrame) -> dict[Any, pd.DataFrame]:
    """Group the selected runs by lambda, after the Base runs with otherwise the same settings."""
    is_same = runs["hash_without_method"] == selected["hash_without_method"].iloc[0]
    base = runs[(runs["family"] == "base") & is_same]
    return {**({} if base.empty else {BASE: base}), **_by_value(selected, "reg.lambda")}


def _by_value(runs: pd.DataFrame, column: str) -> dict[Any, pd.DataFrame]:
    """Group the runs by the numbers in a column, in ascending order."""
    return {float(value): group for value, group in runs.groupby(runs[column].astype(float))}


def _mean_point(label: str, runs: pd.DataFrame) -> Line:
    """Return a point at the mean IsoScore* and the mean headline metric, with standard deviations of both."""
    x = spread([float(value) for value in runs["isoscore_after"] if math.isfinite(value)])
    y = _metric_spread(runs)
    return Line(
        label,
        (math.nan if x.mean is None else x.mean,),
        (math.nan if y.mean is None else y.mean,),
        (x.std or 0.0,),
        (y.std or 0.0,),
        _seeds(runs),
    )


def _metric_line(groups: Mapping[Any, pd.DataFrame]) -> Line:
    return _spread_line("mean ± std", {value: _metric_spread(runs) for value, runs in groups.items()})


def _metric_spread(runs: pd.DataFrame) -> Spread:
    """Return mean and standard deviation of the headline metric in percent."""
    return spread([100 * float(value) for value in runs["value"]])


def _spread_line(label: str, spreads: Mapping[Any, Spread], seeds: tuple[int, ...] = ()) -> Line:
    """Return a line of means with standard deviations as errors, ordered by x."""
    xs = sorted(spreads)
    means = tuple(spreads[x].mean or 0.0 for x in xs)
    deviations = tuple(spreads[x].std or 0.0 for x in xs)
    return Line(label, tuple(map(float, xs)), means, y_error=deviations, seeds=seeds)


def _seeds_by_value(groups: Mapping[Any, pd.DataFrame]) -> dict[Any, tuple[int, ...]]:
    return {value: _seeds(runs) for value, runs in groups.items()}


def _seeds(runs: pd.DataFrame) -> tuple[int, ...]:
    return tuple(sorted({int(seed) for seed in runs["seed"]}))


def _lambda_label(value: Any) -> str:
    return value if isinstance(value, str) else f"λ = {value:g}"


def _single_layer(layers: Any) -> int | None:
    return layers[0] if isinstance(layers, list) and len(layers) == 1 else None


def _isoscore_by_layer(record: RunRecord) -> list[float]:
    """Return IsoScore* after training from the embeddings to the last layer; empty if it was not measured."""
    after = record.isotropy.get("after", {})
    return [after[layer] for layer in sorted(filter(str.isdigit, after), key=int)]


def layer_count(record: RunRecord) -> int:
    """Return the number of transformer layers that a finished run has measured."""
    return max(map(int, filter(str.isdigit, record.isotropy.get("after", {}))), default=0)
