"""The table of one run for the terminal, and its picture of IsoScore by layer."""

from rich.table import Table

from istar.drawing.plot import Line, Panel, Plot
from istar.runs.key import RunKey
from istar.runs.labels import shorten_model_name
from istar.runs.names import BASE, format_metric, format_number, is_lower_better, scale_for_display
from istar.runs.record import RunRecord


def describe_penalty(key: RunKey) -> str:
    """Return a line with the penalty of a run, and the config keys that change it."""
    label = "none" if key.method == BASE else key.label
    keys = [f"reg.{name}=" for name in ("lambda", "zeta") if name in key.settings["reg"]]
    return f"penalty: {label} (change with {', '.join(['reg=', *keys])})"


def build_run_table(record: RunRecord) -> Table:
    """Return a table of one finished run: its metrics, and IsoScore per layer before and after training."""
    headline = record.headline
    title = (
        f"{record.config['task']['name']} · {record.key.label} · {shorten_model_name(record.config['model']['name'])}"
    )
    table = Table(title=title, title_justify="left", caption=_build_run_caption(record), caption_justify="left")
    for header in ("", "before", "after", "change"):
        table.add_column(header, justify="left" if not header else "right")
    headline_metric = headline["metric"]
    other_metrics = [name for name in record.metrics if name not in (headline_metric, "loss")]
    headline_label = f"{headline_metric} (epoch {headline['epoch']})"
    for name, label in [(headline_metric, headline_label), *((name, name) for name in other_metrics)]:
        value = headline["value"] if name == headline_metric else record.metrics[name]
        # Before training, a random head's metric says nothing, but a pretrained language model's does.
        value_before = format_metric(name, record.metrics_before.get(name)) if is_lower_better(headline_metric) else ""
        table.add_row(label, value_before, format_metric(name, value), "")
    table.add_section()
    isotropy_before, isotropy_after = record.isotropy["before"], record.isotropy["after"]
    layer_names = {"0": "embeddings", "union": "layers 1 to L"}
    for layer, score_after in isotropy_after.items():
        score_before = isotropy_before[layer]
        label = f"IsoScore {layer_names.get(layer, f'layer {layer}')}"
        scores = [format_number(score, ".4f") for score in (score_before, score_after)]
        table.add_row(label, *scores, format_number(score_after - score_before, "+.4f"))
    return table


def _build_run_caption(record: RunRecord) -> str:
    metric = record.headline["metric"]
    lines = []
    if metric in record.baseline:
        baseline = "The frequency of each token alone" if is_lower_better(metric) else "A constant prediction"
        lines.append(f"{baseline} has {metric} {format_metric(metric, record.baseline[metric])}.")
        if is_lower_better(metric) and record.headline["value"] > record.baseline[metric]:
            lines.append("The model is worse than that; train it longer, on more text or with another optim.lr.")
    if record.selection.get("metric", metric) != metric:
        selection_metric = record.selection["metric"]
        value = format_metric(selection_metric, record.selection["value"])
        lines.append(f"The epoch was chosen by {selection_metric} {value}.")
    reg = record.key.settings["reg"]
    if record.key.method == "istar" and reg.get("target_score") is None:
        change = record.isotropy["after"]["union"] - record.isotropy["before"]["union"]
        if change * reg["lambda"] < 0:
            moved, expected = ("rose", "λ < 0 lowers") if change > 0 else ("fell", "λ > 0 raises")
            lines.append(f"IsoScore {moved}, although {expected} it: the task loss moved it more; compare reg=none.")
    collapsed_sets = [name for name, is_collapsed in record.collapsed.items() if is_collapsed]
    lines += [f"Collapsed on {name}: all predictions are the same." for name in collapsed_sets]
    unit = "" if is_lower_better(metric) else "; metrics in percent"
    lines.append(f"IsoScore of {record.isotropy['points']} validation tokens{unit}.")
    return "\n".join(lines)


def build_isotropy_plot(record: RunRecord) -> Plot:
    """Return the plot of IsoScore on the validation set against the layer, before and after training."""
    layer_indices = sorted(int(layer) for layer in record.isotropy["after"] if layer != "union")
    xs = tuple(map(float, layer_indices))
    lines = tuple(
        Line(f"{stage} training", xs, tuple(record.isotropy[stage][str(layer)] for layer in layer_indices))
        for stage in ("before", "after")
    )
    model, task = shorten_model_name(record.config["model"]["name"]), record.config["task"]["name"]
    metric = record.headline["metric"]
    score_text = f"{metric} {scale_for_display(metric, record.headline['value']):.2f}"
    return Plot(
        name="isotropy",
        title="Isotropy of each layer before and after training",
        caption="IsoScore of the hidden states of the validation set.",
        kind="line",
        x_label="layer",
        panels=(Panel("IsoScore", lines, task, model, score_text, y_bounds=(0, 1)),),
        x_names={float(layer): str(layer) if layer else "emb." for layer in layer_indices},
    )
