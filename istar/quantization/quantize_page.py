"""HTML page of `istar quantize`, with its tables as CSV, Markdown and LaTeX and its figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from istar.drawing import page_folder
from istar.drawing.page import Page, Section
from istar.drawing.page_tables import Sheet
from istar.quantization import form_figures, form_tables
from istar.quantization.form_tables import MEASURE_LABELS
from istar.quantization.quantize import KIND, SCORES_FILE, QuantizedScores

_HOW_TO_READ = (
    "A form such as w8a8 has weights and activations of 8 bits each. Quantization is simulated: numbers are rounded to "
    "the grid of the integers and stay in float32, so that scores are those of the form and times mean nothing.",
    "Quantized are the weights and the inputs of the linear layers of the encoder. Embeddings, biases, layer "
    "normalization, softmax, the products of queries, keys and values, the pooler and the head stay in float32.",
)


@dataclass(frozen=True)
class PageTables:
    """The tables of the page by name, the comparisons of methods, and sentences on what they allow to conclude."""

    sheets: Mapping[str, Sheet]
    conclusions: Sequence[str]
    comparisons: Sequence[form_tables.SchemeComparison]


def make_tables(quantized: QuantizedScores) -> PageTables:
    """Return the tables of the page; those of a single model have no comparisons."""
    sheets = [form_tables.build_models_sheet(quantized)]
    if "family" not in quantized.rows:
        return PageTables({sheet.name: sheet for sheet in sheets}, conclusions=(), comparisons=())
    comparisons, holm_result = form_tables.compare_methods(quantized)
    methods_sheet = form_tables.build_methods_sheet(comparisons, holm_result)
    sheets += [methods_sheet, form_tables.build_correlation_sheet(quantized)]
    return PageTables({sheet.name: sheet for sheet in sheets}, form_tables.write_conclusions(comparisons), comparisons)


def write_page(quantized: QuantizedScores, tables: PageTables, out: Path, command: str = "") -> Path:
    """Write the HTML page with its tables and figures, and return the path of the page.

    Args:
        quantized: the scores.
        tables: result of `make_tables`.
        out: output folder, whose contents are replaced except for `SCORES_FILE`.
        command: command line, to show on the page.

    Raises:
        UserError: see `istar.drawing.page_folder.write`.
    """
    content_by_path = page_folder.page_files(_make_page(quantized, tables, command), tables.sheets)
    content_by_path[SCORES_FILE] = (out / SCORES_FILE).read_bytes()
    return page_folder.write(out, content_by_path, KIND)


def _make_page(quantized: QuantizedScores, tables: PageTables, command: str) -> Page:
    """Return the page of the scores; that of a single model has no sections on methods."""
    sections = [Section("reading", "How to read this", _HOW_TO_READ)]
    if tables.comparisons:
        drop_plot = form_figures.make_mean_drop_plot(tables.comparisons, quantized.scheme_names)
        methods_sheet = tables.sheets["methods"]
        drop_pictures = page_folder.render_pictures(drop_plot)
        sections.append(Section("methods", "Methods", (drop_plot.caption,), methods_sheet, drop_pictures, is_wide=True))
        sentences = tables.conclusions
        empty_note = "" if sentences else "There is no Base with the same task and model to compare with."
        sections.append(Section("conclusions", "What may be concluded", sentences, empty_note=empty_note))
        measure_plots = [form_figures.make_drop_by_measure_plot(quantized, measure) for measure in MEASURE_LABELS]
        measure_pictures = [picture for plot in measure_plots for picture in page_folder.render_pictures(plot)]
        correlation_sheet = tables.sheets["relations"]
        sections.append(Section("geometry", "Drop and geometry", (), correlation_sheet, measure_pictures, is_wide=True))
    sections.append(Section("runs", "Models", (), tables.sheets["runs"], is_wide=True))
    if quantized.exclusion_reasons:
        reasons = [f"{path}: {reason}" for path, reason in quantized.exclusion_reasons.items()]
        sections.append(Section("left_out", "Left out", reasons))
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    num_models = len(quantized.rows)
    task_names = ", ".join(dict.fromkeys(map(str, quantized.rows["task"])))
    head = ("Tasks", task_names, f"computed by istar {version('istar')}")
    counts = [
        (str(num_models), "model" if num_models == 1 else "models"), (str(len(quantized.scheme_names)), "forms")
    ]  # fmt: skip
    return Page("Quantized models", head, KIND.generator, counts, sections)
