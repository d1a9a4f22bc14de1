"""Tables of one run and of several."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from istar.files import write_text
from istar.results import RunRecord


def summary(record: RunRecord) -> Table:
    r"""One run: its headline metric, and IsoScore\* per layer before and after training."""
    headline = record.headline
    title = f"{record.config['task']['name']} · {method(record)} · {Path(record.config['model']['name']).name}"
    table = Table(title=title, title_justify="left", caption=_caption(record), caption_justify="left")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(f"{headline['metric']} (epoch {headline['epoch']})", "", f"{100 * headline['value']:.2f}", "")
    for name, value in record.metrics.items():
        if name not in (headline["metric"], "loss"):
            table.add_row(name, "", f"{100 * value:.2f}", "")
    table.add_section()
    before, after = record.isotropy["before"], record.isotropy["after"]
    for layer in after:
        change = after[layer] - before[layer]
        table.add_row(_layer_name(layer), f"{before[layer]:.4f}", f"{after[layer]:.4f}", f"{change:+.4f}")
    return table


def comparison(records: Sequence[RunRecord]) -> Table:
    """Several runs, a row each."""
    table = Table(title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 3 else "right")
    for record in records:
        table.add_row(*comparison_row(record))
    return table


COLUMNS = (
    "task",
    "model",
    "method",
    "metric",
    "value",
    "majority",
    "epoch",
    "IsoScore* before",
    "IsoScore* after",
    "seconds",
)


def comparison_row(record: RunRecord) -> list[str]:
    """The cells of a run under `COLUMNS`; metrics in percent."""
    metric = record.headline["metric"]
    baseline = record.baseline.get(metric)
    collapsed = " (collapsed)" if any(record.collapsed.values()) else ""
    return [
        record.config["task"]["name"],
        Path(record.config["model"]["name"]).name,
        method(record),
        metric,
        f"{100 * record.headline['value']:.2f}{collapsed}",
        "-" if baseline is None else f"{100 * baseline:.2f}",
        str(record.headline["epoch"]),
        f"{record.isotropy['before']['union']:.4f}",
        f"{record.isotropy['after']['union']:.4f}",
        f"{record.timing['total']:.0f}",
    ]


def markdown(records: Sequence[RunRecord]) -> str:
    """`comparison` as a Markdown table."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(comparison_row(record) for record in records)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_markdown(records: Sequence[RunRecord], path: Path) -> None:
    """Write `markdown`."""
    write_text(path, markdown(records))


def method(record: RunRecord) -> str:
    """How a run regularizes, in the paper's words: Base, I-STAR lambda=-1 zeta=0.4, CosReg lambda=1."""
    reg = record.config["reg"]
    if reg["name"] == "none":
        return "Base"
    parts = ["I-STAR" if reg["name"] == "istar" else "CosReg", f"lambda={reg['lambda']:g}"]
    parts += [f"zeta={reg['zeta']:g}"] if "zeta" in reg else []
    parts += ["padding counted"] if reg["include_padding"] else []
    return " ".join(parts)


def _caption(record: RunRecord) -> str:
    metric = record.headline["metric"]
    lines = []
    if metric in record.baseline:
        lines.append(f"A constant prediction has {metric} {100 * record.baseline[metric]:.2f}.")
    collapsed = [name for name, is_so in record.collapsed.items() if is_so]
    lines += [f"Collapsed on {name}: all predictions are the same." for name in collapsed]
    lines.append(f"IsoScore* of {record.isotropy['points']} validation tokens; metrics in percent.")
    return "\n".join(lines)


def _layer_name(layer: str) -> str:
    return {"0": "IsoScore* embeddings", "union": "IsoScore* layers 1 to L"}.get(layer, f"IsoScore* layer {layer}")
