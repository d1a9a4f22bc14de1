"""Implements `istar embed`: measures the geometry and word similarity of embedding matrices, raw and post-processed."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.drawing.terminal import make_console
from istar.errors import UserError

if TYPE_CHECKING:
    from istar.inputs.corpus import Source

_FORMS = ("raw", "centered", "scaled_centered", "all_but_the_top", "all_but_the_top_published")


def add_parser(commands: Any) -> None:
    """Add the command `istar embed` to `commands`, the subparsers of the parser of `istar`."""
    parser = commands.add_parser(
        "embed", help="measure embedding matrices, raw and post-processed, and their word similarity"
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="model", help="hub id, or a folder that save_pretrained wrote; several models, as "
        "[label=]<folder or hub id>[@revision], make a page with tables and figures")  # fmt: skip
    add("--out", type=Path, default=Path("embeddings"), help="output folder (default: embeddings)")
    add("--revision", help="branch, tag or commit on the hub")
    add("--matrix", choices=("input", "output"), default="input", help="which embedding matrix (default: input)")
    add("--form", choices=_FORMS, help="how to post-process the matrix of one model (default: raw)")
    forms_help = "forms of a page, separated by commas (default for several models: all but the last form of --form)"
    add("--forms", type=_parse_forms, help=forms_help)
    components_help = "number of directions that all_but_the_top removes (default: a hundredth of the dimensions)"
    add("--components", type=int, help=components_help)
    add("--save", choices=("matrix", "model"), help="write the processed matrix, alone or within its model")
    add("--wordsim", action="append", default=[], type=Path, help="word similarity benchmark file; repeatable")
    policy_help = "for words of several tokens: leave them out, or average their tokens (default: single_token)"
    add("--policy", choices=("single_token", "mean"), default="single_token", help=policy_help)
    text_help = "text in which tokens are counted, as for istar measure; repeatable"
    add("--text", action="append", default=[], help=text_help)
    parser.set_defaults(command=run, extra="train")


def _parse_forms(text: str) -> tuple[str, ...]:
    """Parse the value of `--forms`, the names of post-processing forms separated by commas."""
    forms = tuple(form.strip() for form in text.split(","))
    for form in forms:
        if form not in _FORMS:
            raise argparse.ArgumentTypeError(f"{form!r} is no form; expected some of {', '.join(_FORMS)}")
    return forms


def run(options: argparse.Namespace) -> None:
    """Measure one embedding matrix and write its files, or several matrices or forms and write a page about them."""
    if len(options.models) > 1 or options.forms is not None:
        _measure_several_matrices(options)
    else:
        _measure_one_matrix(options)


def _measure_one_matrix(options: argparse.Namespace) -> None:
    """Measure one embedding matrix, write the results to the output folder and print them."""
    from istar.embeddings import embed
    from istar.inputs import corpus
    from istar.records.config import ModelConfig

    sources = corpus.parse_sources(options.text)
    embed.check_output_folder(options.out, _list_inputs(options.models, options, sources))
    config = ModelConfig(name=options.models[0], revision=options.revision)
    settings = embed.MatrixSettings(options.matrix, options.form or "raw", options.components, options.policy)
    embedding = embed.measure_embeddings(config, settings, options.wordsim, sources)
    paths = embed.write_results(embedding, options.out, options.save, config)
    console = make_console()
    for table in embed.make_terminal_tables(embedding):
        console.print(table)
    for line in (*embed.make_remarks(embedding), ", ".join(map(str, paths))):
        console.out(line, highlight=False)


def _list_inputs(
    model_names: Sequence[str], options: argparse.Namespace, sources: Sequence["Source"]
) -> list[str | Path]:
    return [*model_names, *options.wordsim, *(source.path for source in sources)]


def _measure_several_matrices(options: argparse.Namespace) -> None:
    """Measure the embedding matrices of all models in all forms, print the first two tables and write the page."""
    from istar.drawing import page_folder
    from istar.embeddings import embed_models, embed_page, embed_tables
    from istar.geometry.show import compare
    from istar.inputs import corpus

    for name, advice in _OPTIONS_FOR_ONE_MATRIX.items():
        if getattr(options, name) is not None:
            raise UserError(f"--{name} needs a single matrix in a single form; {advice}")
    forms = options.forms or embed_models.WORDSIM_FORMS
    if options.components is not None and not any(form.startswith("all_but_the_top") for form in forms):
        raise UserError("--components needs an all_but_the_top form, but --forms has none; remove --components")
    model_arguments = compare.parse_models(options.models)
    embed_models.check_labels(model_arguments)
    sources = corpus.parse_sources(options.text)
    model_names = [argument.name for argument in model_arguments]
    page_folder.check(options.out, embed_page.KIND, _list_inputs(model_names, options, sources))
    benchmarks = embed_models.read_benchmarks(options.wordsim)
    settings = embed_models.EmbeddingSettings(options.matrix, forms, options.components, options.policy)
    console, progress_console = make_console(), make_console(stderr=True)
    measured_models = []
    for argument in model_arguments:
        progress_console.print(f"measuring {argument.model_name}", highlight=False, soft_wrap=True, markup=False)
        measured_models.append(embed_models.measure_model(argument, settings, benchmarks, sources))
    word_counts = embed_models.count_words(sources)
    sheets = embed_page.make_tables(measured_models, word_counts)
    page_path = embed_page.write_page(measured_models, sheets, word_counts, options.out, options.typed)
    for name in ("table1", "table2"):
        if name in sheets:
            console.print(embed_tables.make_terminal_table(sheets[name]))
            for note in sheets[name].notes:
                console.print(note, highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page_path}, and figures, tables, CSV files and {embed_page.JSON} beside it", highlight=False)


_OPTIONS_FOR_ONE_MATRIX = {
    "form": "name the forms with --forms",
    "save": "call istar embed with one model and --form",
    "revision": "give it with its model, as in <model>@<revision>",
}
"""Options that several models or forms refuse, with advice what to do instead."""
