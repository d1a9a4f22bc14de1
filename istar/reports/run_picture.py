r"""The picture of one run: IsoScore\* of every layer before and after training."""

from pathlib import Path

from istar.figures.drawing import render
from istar.figures.plot import Line, Panel, Plot
from istar.results import RunRecord


def isotropy_plot(record: RunRecord) -> Plot:
    r"""IsoScore\* on the validation set of the embeddings and of each layer, before and after training."""
    layers = sorted(int(layer) for layer in record.isotropy["after"] if layer != "union")
    lines = tuple(
        Line(
            label=f"{moment} training",
            x=tuple(float(layer) for layer in layers),
            y=tuple(record.isotropy[moment][str(layer)] for layer in layers),
        )
        for moment in ("before", "after")
    )
    headline = record.headline
    panel = Panel(
        model=Path(record.config["model"]["name"]).name,
        task=record.config["task"]["name"],
        lines=lines,
        held=f"{headline['metric']} {100 * headline['value']:.2f}",
        y_label="IsoScore*",
    )
    return Plot(
        name="isotropy",
        title="Isotropy of each layer before and after training",
        caption="IsoScore* of the hidden states of the validation set.",
        kind="line",
        x_label="layer",
        panels=(panel,),
        x_names={float(layer): str(layer) if layer else "emb." for layer in layers},
    )


def isotropy_picture(record: RunRecord) -> bytes:
    """`isotropy_plot` as a PNG."""
    return render(isotropy_plot(record))["png"]
