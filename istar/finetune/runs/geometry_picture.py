"""The plot of a run's geometry against the optimizer step."""

import re
from collections.abc import Mapping, Sequence

from istar.drawing.plot import Line, Panel, Plot
from istar.drawing.rendering import render
from istar.drawing.spacing import evenly_spaced
from istar.records.metric_names import GEOMETRY_LABELS, geometry_key

_MEASURE_KEY = re.compile(geometry_key(r"(\d+)", r"(\w+)"))


def build_geometry_plot(rows: Sequence[Mapping[str, float]]) -> Plot:
    """Return the plot of the measures of the layers' geometry against the optimizer step.

    There is a panel for each measure, with a line for each of at most five evenly spaced layers. `rows` are those of a
    run's `metrics.csv`, in which a measure has the key `geometry/layer_<l>/<measure>`.
    """
    measured_rows = [row for row in rows if any(_MEASURE_KEY.fullmatch(name) for name in row)]
    steps = tuple(float(row["step"]) for row in measured_rows)
    layer_indices = sorted(
        {int(match[1]) for row in measured_rows for name in row if (match := _MEASURE_KEY.fullmatch(name))}
    )
    panels = []
    for measure, label in GEOMETRY_LABELS.items():
        lines = [
            Line(
                f"layer {layer}" if layer else "embeddings",
                steps,
                tuple(row[geometry_key(layer, measure)] for row in measured_rows),
            )
            for layer in evenly_spaced(layer_indices)
        ]
        panels.append(Panel(model="", task="", lines=tuple(lines), fixed_settings="", y_label=label))
    return Plot(
        name="geometry_over_steps",
        title="Geometry of the layers during training",
        caption="Measures of the hidden states of a sample of validation examples, which is always the same one.",
        kind="line",
        x_label="optimizer step",
        panels=tuple(panels),
        ordered=True,
    )


def render_geometry_plot(rows: Sequence[Mapping[str, float]]) -> bytes:
    """Return the plot of `build_geometry_plot` as a PNG."""
    return render(build_geometry_plot(rows), ["png"])["png"]
