"""The picture of one run: IsoScore of every layer before and after training."""

from pathlib import Path

from istar.figures.drawing import render
from istar.figures.plot import Line, Panel, Plot
from istar.results import RunRecord
from istar.scores import displayed


def isotropy_plot(record: RunRecord) -> Plot:
    """IsoScore on the validation set of the embeddings and of each layer, before and after training."""
    layers = sorted(int(layer) for layer in record.isotropy["after"] if layer != "union")
    xs = tuple(map(float, layers))
    lines = tuple(
        Line(f"{moment} training", xs, tuple(record.isotropy[moment][str(layer)] for layer in layers))
        for moment in ("before", "after")
    )
    model, task = Path(record.config["model"]["name"]).name, record.config["task"]["name"]
    metric = record.headline["metric"]
    score = f"{metric} {displayed(metric, record.headline['value']):.2f}"
    return Plot(
        "isotropy",
        "Isotropy of each layer before and after training",
        "IsoScore of the hidden states of the validation set.",
        kind="line",
        x_label="layer",
        panels=(Panel(model, task, lines, score, "IsoScore"),),
        x_names={float(layer): str(layer) if layer else "emb." for layer in layers},
    )


def isotropy_picture(record: RunRecord) -> bytes:
    """`isotropy_plot` as a PNG."""
    return render(isotropy_plot(record), ["png"])["png"]
