"""The table of one finished run for the terminal."""

from pathlib import Path

from rich.table import Table

from istar.records.identity import label_method
from istar.records.metric_names import format_metric, is_lower_better
from istar.records.results import RunRecord


def build_run_table(record: RunRecord) -> Table:
    """Return a table of one finished run: its metrics, and IsoScore per layer before and after training."""
    headline = record.headline
    title = (
        f"{record.config['task']['name']} · {label_method(record.config)} · {Path(record.config['model']['name']).name}"
    )
    table = Table(title=title, title_justify="left", caption=_build_run_caption(record), caption_justify="left")
    for header in ("", "before", "after", "change"):
        table.add_column(header, justify="left" if not header else "right")
    headline_metric = headline["metric"]
    other_metrics = [name for name in record.metrics if name not in (headline_metric, "loss")]
    headline_label = f"{headline_metric} (epoch {headline['epoch']})"
    for name, label in [(headline_metric, headline_label), *((name, name) for name in other_metrics)]:
        value = headline["value"] if name == headline_metric else record.metrics[name]
        # Before training, the metric of a random head says nothing, but that of a pretrained language model does.
        value_before = format_metric(name, record.metrics_before.get(name)) if is_lower_better(headline_metric) else ""
        table.add_row(label, value_before, format_metric(name, value), "")
    table.add_section()
    isotropy_before, isotropy_after = record.isotropy["before"], record.isotropy["after"]
    layer_names = {"0": "embeddings", "union": "layers 1 to L"}
    for layer, score_after in isotropy_after.items():
        score_before = isotropy_before[layer]
        label = f"IsoScore {layer_names.get(layer, f'layer {layer}')}"
        table.add_row(label, f"{score_before:.4f}", f"{score_after:.4f}", f"{score_after - score_before:+.4f}")
    return table


def _build_run_caption(record: RunRecord) -> str:
    """Return the text below the table of a run: its baseline, the choice of the epoch, collapsed sets and tokens."""
    metric = record.headline["metric"]
    lines = []
    if metric in record.baseline:
        baseline = "The frequency of each token alone" if is_lower_better(metric) else "A constant prediction"
        lines.append(f"{baseline} has {metric} {format_metric(metric, record.baseline[metric])}.")
    if record.selection.get("metric", metric) != metric:
        selection_metric = record.selection["metric"]
        value = format_metric(selection_metric, record.selection["value"])
        lines.append(f"The epoch was chosen by {selection_metric} {value}.")
    collapsed_sets = [name for name, is_collapsed in record.collapsed.items() if is_collapsed]
    lines += [f"Collapsed on {name}: all predictions are the same." for name in collapsed_sets]
    unit = "" if is_lower_better(metric) else "; metrics in percent"
    lines.append(f"IsoScore of {record.isotropy['points']} validation tokens{unit}.")
    return "\n".join(lines)
