"""The plot of one run: IsoScore of every layer before and after training."""

from pathlib import Path

from istar.drawing.plot import Line, Panel, Plot
from istar.drawing.rendering import render
from istar.records.metric_names import displayed
from istar.records.results import RunRecord


def build_isotropy_plot(record: RunRecord) -> Plot:
    """Return the plot of IsoScore on the validation set against the layer, before and after training."""
    layer_indices = sorted(int(layer) for layer in record.isotropy["after"] if layer != "union")
    xs = tuple(map(float, layer_indices))
    lines = tuple(
        Line(f"{stage} training", xs, tuple(record.isotropy[stage][str(layer)] for layer in layer_indices))
        for stage in ("before", "after")
    )
    model, task = Path(record.config["model"]["name"]).name, record.config["task"]["name"]
    metric = record.headline["metric"]
    score_text = f"{metric} {displayed(metric, record.headline['value']):.2f}"
    return Plot(
        name="isotropy",
        title="Isotropy of each layer before and after training",
        caption="IsoScore of the hidden states of the validation set.",
        kind="line",
        x_label="layer",
        panels=(Panel(model, task, lines, fixed_settings=score_text, y_label="IsoScore"),),
        x_names={float(layer): str(layer) if layer else "emb." for layer in layer_indices},
    )


def render_isotropy_plot(record: RunRecord) -> bytes:
    """Return the plot of `build_isotropy_plot` as a PNG."""
    return render(build_isotropy_plot(record), ["png"])["png"]
