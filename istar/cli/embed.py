"""Implements `istar embed`: measures the geometry and word similarity of embedding matrices, raw and post-processed."""

import argparse
from pathlib import Path
from typing import Any

from istar.drawing.terminal import make_console
from istar.errors import UserError

_FORMS = ("raw", "centered", "scaled_centered", "all_but_the_top", "all_but_the_top_published")


def add_parser(commands: Any) -> None:
    """Register `istar embed`."""
    parser = commands.add_parser(
        "embed", help="measure embedding matrices, raw and post-processed, and their word similarity"
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="model", help="[label=]<folder, run or hub id>[@revision]; repeatable")
    add("--out", type=Path, default=Path("embeddings"), help="output folder (default: embeddings)")
    add("--revision", help="branch, tag or commit of a single model on the hub")
    add("--matrix", choices=("input", "output"), default="input", help="which embedding matrix (default: input)")
    add("--form", choices=_FORMS, help="post-processing of a single model's matrix, for --save (default: raw)")
    forms_help = "forms for word similarity, separated by commas (default: --form, or all but the last form of --form)"
    add("--forms", type=_parse_forms, help=forms_help)
    components_help = "number of directions that all_but_the_top removes (default: a hundredth of the dimensions)"
    add("--components", type=int, help=components_help)
    add("--save", choices=("matrix", "model"), help="write a single processed matrix, alone or within its model")
    add("--wordsim", action="append", default=[], type=Path, help="word similarity benchmark file; repeatable")
    policy_help = "for words of several tokens: leave them out, or average their tokens (default: single_token)"
    add("--policy", choices=("single_token", "mean"), default="single_token", help=policy_help)
    text_help = "text in which tokens are counted, as for istar measure; repeatable"
    add("--text", action="append", default=[], help=text_help)
    parser.set_defaults(command=run, extra="train")


def _parse_forms(text: str) -> tuple[str, ...]:
    forms = tuple(form.strip() for form in text.split(","))
    for form in forms:
        if form not in _FORMS:
            raise argparse.ArgumentTypeError(f"{form!r} is no form; expected some of {', '.join(_FORMS)}")
    return forms


def run(options: argparse.Namespace) -> None:
    """Measure the embedding matrices of all models, print the first two tables, and write a page about them."""
    from istar.drawing import page_folder, page_tables
    from istar.embeddings import embed_models, embed_page, token_frequencies
    from istar.inputs import corpus

    for name in ("form", "save", "revision"):
        if len(options.models) > 1 and getattr(options, name) is not None:
            raise UserError(f"--{name} is for a single model; remove it, or call istar embed for each model")
    models = embed_models.parse_named_models(options.models, options.revision)
    forms = options.forms or ((options.form,) if options.form else embed_models.WORDSIM_FORMS)
    settings = embed_models.EmbeddingSettings(options.matrix, forms, options.components, options.policy)
    sources = corpus.parse_sources(options.text)
    inputs = [model.config.name for model in models] + [*options.wordsim, *(source.path for source in sources)]
    page_folder.check(options.out, embed_page.EMBEDDINGS_KIND, inputs)
    benchmarks = embed_models.read_benchmarks(options.wordsim)
    console, progress_console = make_console(), make_console(stderr=True)
    measured_models = []
    for model in models:
        if len(models) > 1:
            progress_console.print(f"measuring {model.config.name}", highlight=False, soft_wrap=True, markup=False)
        measured_models.append(embed_models.measure_embeddings(model, settings, benchmarks, sources))
    words = token_frequencies.count_words(sources)
    sheets = embed_page.make_tables(measured_models, words)
    contents, drafts = embed_page.make_contents(measured_models, sheets, words, options.typed), {}
    if options.save:
        form = options.form or "raw"
        matrix, processed = embed_models.process_matrix(models[0], options.matrix, form, options.components)
        if options.save == "matrix":
            settings_of_form = {"form": form, "components": options.components}
            contents |= embed_models.make_matrix_files(models[0], matrix, processed, settings_of_form)
        else:
            output = page_folder.page_output(options.out, embed_page.EMBEDDINGS_KIND)
            drafts = {embed_models.MODEL_FOLDER: embed_models.save_model(models[0], matrix, processed, output)}
        if matrix.tied:
            console.out("the output embeddings are tied to the input embeddings: processing one processes both")
    page_path = page_folder.write(options.out, contents, embed_page.EMBEDDINGS_KIND, drafts)
    for name in ("table1", "table2"):
        if name in sheets:
            console.print(page_tables.to_terminal_table(sheets[name]))
            for note in sheets[name].notes:
                console.print(note, highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page_path}, and figures, tables, CSV files and {embed_page.JSON} next to it", highlight=False)
