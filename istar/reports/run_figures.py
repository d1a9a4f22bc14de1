"""What the report's figures show, as numbers: panels of lines whose runs differ in nothing but what is said."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from istar.figures.plot import BASE, Line, Panel, Plot
from istar.reports import geometry_file, paper
from istar.reports.cells import Cell, choose, describe, has_zeta, models, tasks
from istar.reports.cells import rows as as_rows
from istar.reports.geometry_file import Geometry
from istar.reports.stability import Stability
from istar.reports.statistics import spread
from istar.results import RunRecord

Draw = Callable[[pd.DataFrame, str, str], Panel | None]


def minibatch_stability(found: Stability) -> Plot:
    """Figure 2."""
    sizes = tuple(map(float, found.sizes))
    lines = [
        Line(
            label,
            sizes,
            tuple(score.mean or 0.0 for score in scores),
            y_error=tuple(score.std or 0.0 for score in scores),
        )
        for label, scores in (
            *((f"ζ = {zeta:g}", scores) for zeta, scores in found.scores.items()),
            ("ζ = auto", found.auto),
            ("unbiased", found.unbiased),
        )
    ]
    panel = Panel("", "", tuple(lines), "", "IsoScore*", level=(found.truth, f"truth ({found.truth:.2f})"))
    return Plot(
        "figure2",
        "Figure 2: mini-batch stability",
        "IsoScore* of batches of a synthetic Gaussian cloud in 768 dimensions, variances 10, 6, 4, 4, 1, ..., 1, by "
        "batch size and ζ; Σ_S is the covariance of 75,000 other points. Beside the paper's: ζ = auto, estimated from "
        "each batch, and the unbiased IsoScore, which needs no Σ_S (docs/measures.md). Mean and standard deviation of "
        "three batches each; dashed: the score of the distribution itself. No run is needed for it.",
        "line",
        "points in the batch",
        (panel,),
        log_x=True,
    )


def isotropy_and_performance(frame: pd.DataFrame) -> Plot:
    """Figure 3."""

    def panel(frame: pd.DataFrame, model: str, task: str) -> Panel | None:
        runs = _istar(_of(frame, model, task))
        chosen = _hold(runs, "lambda", 1)
        if chosen is None:
            return None
        groups = _by_value(frame, chosen, "reg.lambda")
        lines = [_point(_weight_label(value), group) for value, group in groups.items()]
        return Panel(
            model, task, tuple(lines), _held(chosen, runs, "lambda"), _metric_label(chosen), seeds=_seeds(groups)
        )

    return Plot(
        "figure3",
        "Figure 3: isotropy and performance",
        "IsoScore* of layers 1 to L on the validation set (ζ = 0, all its tokens) against the headline metric on the "
        "same set, at the epoch that counts: a point per λ of I-STAR, mean over seeds, bars: standard deviations. "
        "The paper has ζ = 0.2 in this figure, so its x axis is another one.",
        "points",
        "IsoScore*",
        _panels(frame, panel),
        "figure3",
        values=(-5, -3, -1, 0.5, 1, 3, 5),
    )


def mean_activations(frame: pd.DataFrame, measured: Mapping[str, Geometry]) -> Plot:
    """Figure 4."""
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

    def one(run: Mapping[str, Any]) -> Sequence[float]:
        return measured[run["folder"]].mean_activation

    return _layers_like(frame[frame["folder"].isin(measured)], plot, "cosreg", "last", one, "mean activation", start=0)


def intrinsic_dimensions(frame: pd.DataFrame, measured: Mapping[str, Geometry]) -> Plot:
    """Figure 5."""
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

    def one(run: Mapping[str, Any]) -> Sequence[float]:
        return measured[run["folder"]].two_nn

    return _layers_like(frame[frame["folder"].isin(measured)], plot, "istar", "all", one, "TwoNN dimension")


def layer_isotropy(frame: pd.DataFrame, records: Mapping[str, RunRecord]) -> Plot:
    """Figure 6."""
    plot = Plot(
        "figure6",
        "Figure 6: isotropy layer by layer",
        "IsoScore* of each layer on the validation set (ζ = 0, all its tokens) at the epoch that counts, mean over "
        "seeds: without a penalty, and with I-STAR.",
        "line",
        "layer (0: embeddings)",
        (),
        "figure6",
        "qnli",
        (-1, 1),
        with_base=True,
        seeds=1,
    )

    def one(run: Mapping[str, Any]) -> Sequence[float]:
        after = records[run["folder"]].isotropy.get("after", {})
        return [after[layer] for layer in sorted((name for name in after if name.isdigit()), key=int)]

    return _layers_like(frame, plot, "istar", "all", one, "IsoScore*")


def zeta_ablation(frame: pd.DataFrame) -> Plot:
    """Figure 7."""

    def panel(frame: pd.DataFrame, model: str, task: str) -> Panel | None:
        runs = _istar(_of(frame, model, task))
        chosen = _hold(runs, "zeta", 2)
        if chosen is None:
            return None
        groups = _grouped(chosen, "reg.zeta")
        line = _along("mean ± std", groups)
        best = max(groups, key=lambda zeta: float(groups[zeta]["value"].mean()))
        held = _held(chosen, _least(runs, "zeta", 2), "zeta")
        mark = (best, "best ζ")
        return Panel(model, task, (line,), held, _metric_label(chosen), mark=mark, seeds=_seeds(groups))

    return Plot(
        "figure7",
        "Figure 7: ζ ablation",
        "Headline metric on the validation set by ζ of I-STAR, mean ± standard deviation over seeds; ζ = 0 is no "
        "shrinkage, ζ = 1 only Σ_S. Points without bars have one seed. Dashed: the best mean.",
        "bars",
        "ζ",
        _panels(frame, panel),
        "zeta_ablation",
        "rte",
        (0, 0.2, 0.4, 0.6, 0.8, 1),
        "ζ",
    )


def layer_ablation(frame: pd.DataFrame, records: Mapping[str, RunRecord]) -> Plot:
    """Figure 8."""

    def panel(frame: pd.DataFrame, model: str, task: str) -> Panel | None:
        own = _of(frame, model, task)
        own = own[(own["family"] == "istar") & has_zeta(own)].assign(
            layer=lambda runs: runs["reg.layers"].map(_single_layer)
        )
        runs = own[own["layer"].notna() | own["reg.layers"].map(lambda layers: layers == "all").astype(bool)]
        singles = runs[runs["layer"].notna()]
        if singles.empty:
            return None
        held = choose(singles, "beside layers")
        chosen = runs[runs["beside layers"] == held]
        groups: dict[Any, pd.DataFrame] = {int(layer): group for layer, group in _grouped(chosen, "layer").items()}
        whole = chosen[chosen["layer"].isna()]
        level = (100 * float(whole["value"].mean()), "all layers") if len(whole) else None
        line = _along("mean ± std", groups)
        count = layer_count(records[chosen["folder"].iloc[0]])
        seeds: dict[Any, tuple[int, ...]] = dict.fromkeys(range(1, count + 1), ())
        seeds |= {**_seeds(groups), "all": _numbers(whole["seed"])}
        return Panel(
            model, task, (line,), _held(chosen, singles, "layers"), _metric_label(chosen), level, None, seeds
        )  # fmt: skip

    return Plot(
        "figure8",
        "Figure 8: layer ablation",
        "Headline metric on the validation set with I-STAR on one layer alone, mean ± standard deviation over seeds. "
        "Points without bars have one seed. Dashed: I-STAR on all layers.",
        "bars",
        "layer that is penalized",
        _panels(frame, panel),
        "layer_ablation",
        "cola",
        symbol="layer",
    )


def curves(cells: Iterable[Cell], records: Mapping[str, RunRecord]) -> tuple[Plot, Plot]:
    """Validation loss and headline metric by epoch, for the runs behind Table 1."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.runs is not None:
            groups.setdefault((cell.model, cell.task), []).append(cell)
    losses, metrics = [], []
    for (model, task), group in groups.items():
        headline = group[0].metrics[0]
        losses.append(_curve_panel(model, task, group, records, "loss", 1, "validation loss"))
        metrics.append(_curve_panel(model, task, group, records, headline, 100, f"{headline}, percent"))
    about = "after each epoch, for the runs behind Table 1: mean over seeds, band: standard deviation."
    return (
        Plot("curves_loss", "Validation loss", f"Loss on the validation set {about}", "line", "epoch", _some(losses)),
        Plot("curves_metric", "Validation metric", f"Headline metric on the validation set {about}", "line", "epoch",
             _some(metrics)),
    )  # fmt: skip


def _curve_panel(
    model: str,
    task: str,
    group: Sequence[Cell],
    records: Mapping[str, RunRecord],
    metric: str,
    scale: float,
    label: str,
) -> Panel | None:
    lines = []
    for cell in group:
        assert cell.runs is not None
        by_epoch: dict[int, list[float]] = {}
        for folder in cell.runs["folder"]:
            for entry in records[folder].epochs:
                value = entry["metrics"].get(metric)
                if value is not None and math.isfinite(value):
                    by_epoch.setdefault(int(entry["epoch"]), []).append(scale * value)
        spreads = {epoch: spread(values) for epoch, values in sorted(by_epoch.items())}
        if spreads:
            lines.append(
                Line(
                    str(paper.FAMILIES[cell.family]),
                    tuple(map(float, spreads)),
                    tuple(one.mean or 0.0 for one in spreads.values()),
                    y_error=tuple(one.std or 0.0 for one in spreads.values()),
                    seeds=tuple(cell.seeds),
                )
            )
    return Panel(model, task, tuple(lines), "", label) if lines else None


def _layers_like(
    frame: pd.DataFrame,
    plot: Plot,
    family: str,
    layers: str,
    one: Callable[[Mapping[str, Any]], Sequence[float]],
    label: str,
    start: int = 0,
) -> Plot:
    """Panels with a line for Base and for each lambda: numbers of a run in a row, averaged over seeds."""

    def panel(frame: pd.DataFrame, model: str, task: str) -> Panel | None:
        own = _of(frame, model, task)
        runs = own[(own["family"] == family) & own["reg.layers"].map(lambda value: value == layers).astype(bool)]
        wanted = runs[runs["reg.lambda"].isin(plot.values)]
        # Small models are trained with other weights than the paper's.
        runs = wanted if len(wanted) else runs
        chosen = _hold(runs, "lambda", 1)
        if chosen is None:
            return None
        groups = _by_value(frame, chosen, "reg.lambda")
        lines = []
        for value, group in groups.items():
            rows = [tuple(one(run)) for run in as_rows(group)]
            rows = [row for row in rows if row and len(row) == len(rows[0])]
            if rows:
                xs = tuple(float(start + number) for number in range(len(rows[0])))
                name = _weight_label(value)
                lines.append(Line(name, xs, tuple(geometry_file.mean(rows)), seeds=_numbers(group["seed"])))
        if not lines:
            return None
        return Panel(model, task, tuple(lines), _held(chosen, runs, "lambda"), label, seeds=_seeds(groups))

    return Plot(**{**plot.__dict__, "panels": _panels(frame, panel)})


def _panels(frame: pd.DataFrame, panel: Draw) -> tuple[Panel, ...]:
    usable = frame[frame["usable"]]
    if "reg.lambda" not in usable:
        return ()
    return _some([panel(usable, model, task) for model in models(usable) for task in tasks(usable)])


def _some(panels: Iterable[Panel | None]) -> tuple[Panel, ...]:
    return tuple(panel for panel in panels if panel is not None)


def _of(frame: pd.DataFrame, model: str, task: str) -> pd.DataFrame:
    return frame[(frame["model"] == model) & (frame["task"] == task)]


def _istar(frame: pd.DataFrame) -> pd.DataFrame:
    everywhere = frame["reg.layers"].map(lambda layers: layers == "all").astype(bool)
    return frame[(frame["family"] == "istar") & everywhere & has_zeta(frame)]


def _hold(runs: pd.DataFrame, varied: str, least: int) -> pd.DataFrame | None:
    """The runs that have all but `varied` and the seed in common: most runs, then the highest mean.

    Args:
        runs: of one task, model and method.
        varied: a key of `cells.VARIED`.
        least: so many different values of it at the least.
    """
    beside = f"beside {varied}"
    fit = _least(runs, varied, least)
    return None if fit.empty else fit[fit[beside] == choose(fit, beside)]


def _least(runs: pd.DataFrame, varied: str, least: int) -> pd.DataFrame:
    """The runs that others join in all but `varied`, with so many different values of it at the least."""
    if runs.empty:
        return runs
    beside = f"beside {varied}"
    counts = runs.groupby(beside)[f"reg.{varied}"].nunique()
    return runs[runs[beside].isin(counts[counts >= least].index)]


def _by_value(frame: pd.DataFrame, chosen: pd.DataFrame, key: str) -> dict[Any, pd.DataFrame]:
    """Runs by the value of a key, before them the runs without a penalty that are equal in everything else."""
    same = frame[(frame["family"] == "base") & (frame["beside method"] == chosen["beside method"].iloc[0])]
    base = {BASE: same} if len(same) else {}
    return {**base, **_grouped(chosen, key)}


def _grouped(runs: pd.DataFrame, key: str) -> dict[Any, pd.DataFrame]:
    return {value: runs[runs[key] == value] for value in sorted(map(float, runs[key].dropna().unique()))}


def _point(label: str, group: pd.DataFrame) -> Line:
    x = spread([float(value) for value in group["isoscore_after"] if math.isfinite(value)])
    y = spread([100 * float(value) for value in group["value"]])
    return Line(
        label,
        (math.nan if x.mean is None else x.mean,),
        (math.nan if y.mean is None else y.mean,),
        (x.std or 0.0,),
        (y.std or 0.0,),
        _numbers(group["seed"]),
    )


def _along(label: str, groups: Mapping[Any, pd.DataFrame]) -> Line:
    spreads = {x: spread([100 * float(value) for value in group["value"]]) for x, group in sorted(groups.items())}
    return Line(
        label,
        tuple(map(float, spreads)),
        tuple(one.mean or 0.0 for one in spreads.values()),
        y_error=tuple(one.std or 0.0 for one in spreads.values()),
    )


def _seeds(groups: Mapping[Any, pd.DataFrame]) -> dict[Any, tuple[int, ...]]:
    return {value: _numbers(group["seed"]) for value, group in groups.items()}


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(sorted({int(value) for value in values}))


def _held(chosen: pd.DataFrame, runs: pd.DataFrame, varied: str) -> str:
    """`λ = -1, ζ = 0.4, lr 3e-05, batch 32, 3 epochs; 30 runs, 2 other configurations not shown`."""
    first = as_rows(chosen.head(1))[0]
    symbols = {"lambda": "λ", "zeta": "ζ"}
    parts = [
        f"{symbol} = {first[f'reg.{key}']:g}"
        for key, symbol in symbols.items()
        if key != varied and isinstance(first.get(f"reg.{key}"), float) and math.isfinite(first[f"reg.{key}"])
    ]
    others = runs[f"beside {varied}"].nunique() - 1
    hidden = f", {others} other configuration{'s' * (others > 1)} not shown" if others else ""
    return f"{', '.join([*parts, describe(first)])}; {len(chosen)} run{'s' * (len(chosen) > 1)}{hidden}"


def _metric_label(runs: pd.DataFrame) -> str:
    return f"{runs['metric'].iloc[0]}, percent"


def _weight_label(value: Any) -> str:
    return value if isinstance(value, str) else f"λ = {value:g}"


def _single_layer(layers: Any) -> int | None:
    return layers[0] if isinstance(layers, list) and len(layers) == 1 else None


def layer_count(record: RunRecord) -> int:
    """How many transformer layers a finished run has measured."""
    after = record.isotropy.get("after", {})
    return max((int(layer) for layer in after if layer.isdigit()), default=0)
