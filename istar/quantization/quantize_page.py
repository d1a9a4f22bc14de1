"""HTML page of `istar quantize`, with its tables as CSV, Markdown and LaTeX and its figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Section
from istar.pages.sheets import Sheet
from istar.quantization import form_figures, form_tables
from istar.quantization.form_tables import MEASURES
from istar.quantization.quantize import JSON, Quantized

KIND = PageKind("page of quantized models", "istar quantize", (JSON,))
_READING = (
    "A form such as w8a8 has weights and activations of 8 bits each. Quantization is simulated: numbers are rounded to "
    "the grid of the integers and stay in float32, so that scores are those of the form and times mean nothing.",
    "Quantized are the weights and the inputs of the linear layers of the encoder. Embeddings, biases, layer "
    "normalization, softmax, the products of queries, keys and values, the pooler and the head stay in float32.",
)


@dataclass(frozen=True)
class Tables:
    """The tables of a page by name, and the sentences that say what the comparisons allow to conclude."""

    sheets: Mapping[str, Sheet]
    conclusions: Sequence[str]
    comparisons: Sequence[form_tables.FormComparison]


def check(out: Path) -> None:
    """Refuse a folder that `write` would refuse, before models are computed.

    Raises:
        UserError: if the folder holds anything but an earlier page, or the scores of an interrupted command.
    """
    folder.check_replaceable(out, KIND)


def tables(quantized: Quantized) -> Tables:
    """Return the tables; a single model has one row and no comparisons."""
    sheets = [form_tables.runs(quantized)]
    if "family" not in quantized.rows:
        return Tables({sheet.name: sheet for sheet in sheets}, (), ())
    comparisons, corrected = form_tables.compare(quantized)
    sheets += [form_tables.methods(comparisons, corrected), form_tables.relations(quantized)]
    return Tables({sheet.name: sheet for sheet in sheets}, form_tables.conclusions(comparisons), comparisons)


def write(quantized: Quantized, content: Tables, out: Path, command: str = "") -> Path:
    """Write the page and its files, keep `JSON` as it is, and return the page's path.

    Args:
        quantized: the scores.
        content: result of `tables`.
        out: output folder, with the `JSON` of the scores.
        command: command line that made the page, which the page shows.

    Raises:
        UserError: if the folder holds anything but an earlier page, or cannot be written.
    """
    contents = folder.page_files(_page(quantized, content, command), content.sheets)
    contents[JSON] = (out / JSON).read_bytes()
    folder.replace_folder(out, contents, KIND)
    return out / folder.INDEX


def _page(quantized: Quantized, content: Tables, command: str) -> Page:
    sections = [Section("reading", "How to read this", _READING)]
    if content.comparisons:
        drops = form_figures.mean_drops(content.comparisons, quantized.forms)
        methods = content.sheets["methods"]
        sections.append(
            Section("methods", "Methods", (drops.caption,), methods, folder.render_pictures(drops), is_wide=True)
        )
        sentences = content.conclusions
        empty = "" if sentences else "There is no Base with the same task and model to compare with."
        sections.append(Section("conclusions", "What may be concluded", sentences, empty_note=empty))
        plots = [form_figures.drops_by_measure(quantized, measure) for measure in MEASURES]
        pictures = [picture for plot in plots for picture in folder.render_pictures(plot)]
        relations = content.sheets["relations"]
        sections.append(Section("geometry", "Drop and geometry", (), relations, pictures, is_wide=True))
    sections.append(Section("runs", "Models", (), content.sheets["runs"], is_wide=True))
    if quantized.left_out:
        reasons = [f"{path}: {reason}" for path, reason in quantized.left_out.items()]
        sections.append(Section("left_out", "Left out", reasons))
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    count = len(quantized.rows)
    names = ", ".join(dict.fromkeys(map(str, quantized.rows["task"])))
    head = ("Tasks", names, f"computed by istar {version('istar')}")
    figures = [(str(count), "model" if count == 1 else "models"), (str(len(quantized.forms)), "forms")]
    return Page("Quantized models", head, KIND.generator, figures, sections)
