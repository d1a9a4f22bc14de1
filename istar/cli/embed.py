"""Implements `istar embed`: measures the geometry and word similarity of embedding matrices, raw and post-processed."""

import argparse
from pathlib import Path

from istar.cli.options import EMBEDDING_FORMS
from istar.drawing import page_folder, page_tables
from istar.drawing.terminal import make_console, make_progress, with_wide_text
from istar.embeddings import embed_models, embed_page, token_frequencies
from istar.errors import UserError, check_one_of
from istar.files.folders import split_label
from istar.files.outputs import Output
from istar.measures import numerics
from istar.models import embedding_matrix, pretrained, saved_checkpoints
from istar.texts import corpus


def run(options: argparse.Namespace) -> None:
    """Measure the embedding matrices of all models, print the first two tables, and write a page about them."""
    for form in options.forms:
        check_one_of("--forms", form, EMBEDDING_FORMS)
    for name in ("form", "save"):
        if len(options.models) > 1 and getattr(options, name) is not None:
            raise UserError(f"--{name} is for a single model; remove it, or call istar embed for each model")
    models = saved_checkpoints.parse_models(options.models)
    saved_checkpoints.check_distinct_labels([model.default_label for model in models])
    forms = tuple(options.forms) or ((options.form,) if options.form else embed_models.WORDSIM_FORMS)
    settings = embed_models.EmbeddingSettings(options.matrix, forms, options.components, options.policy)
    sources = corpus.parse_sources(options.text)
    paths = [Path(split_label(text)[1]) for text in options.wordsim] + [source.path for source in sources]
    inputs = [model.source.name for model in models] + paths
    page_folder.check(options.out, embed_page.EMBEDDINGS_KIND, inputs)
    # Saved results do not belong to the page, so that a page without --save does not remove them.
    saved_output = Output(options.out, "result of --save")
    if options.save:
        saved_output.check((*embed_models.MATRIX_FILES, embed_models.MODEL_FOLDER), inputs)
    benchmarks = embed_models.read_benchmarks(options.wordsim)
    for model in models:  # what cannot be read or measured is refused before the first one is measured
        pretrained.load_tokenizer(model.source)
        matrix = embedding_matrix.read_matrix(model.source, options.matrix)
        numerics.check_matrix(matrix.values, f"the {options.matrix} embeddings of {model.name}")
    console, measured_models = make_console(stderr=options.json), []
    with make_progress(make_console(stderr=True)) as progress:
        task = progress.add_task("", total=len(models) * len(settings.measured_forms))
        for model in models:
            progress.update(task, description=model.default_label)
            measured_models.append(
                embed_models.measure_embeddings(model, settings, benchmarks, sources, lambda: progress.advance(task))
            )
    words = token_frequencies.count_words(sources)
    sheets = embed_page.make_tables(measured_models, words)
    contents = embed_page.make_contents(measured_models, sheets, words, options.out, options.typed)
    page_path = page_folder.write(options.out, contents, embed_page.EMBEDDINGS_KIND)
    if options.save:
        form = options.form or "raw"
        matrix = embedding_matrix.read_matrix(models[0].source, options.matrix)
        processed = embed_models.FORM_FUNCTIONS[form](matrix.values, options.components)
        if options.save == "matrix":
            settings_of_form = {"form": form, "components": options.components}
            files = embed_models.make_matrix_files(models[0], matrix, processed, settings_of_form)
            saved_output.write(files, is_complete=True)
        else:
            draft = embed_models.save_model(models[0], matrix, processed, saved_output)
            saved_output.write({}, {embed_models.MODEL_FOLDER: draft}, is_complete=True)
        if matrix.tied:
            console.out("the output embeddings are tied to the input embeddings: processing one processes both")
    shown_sheets = {name: sheets[name] for name in ("table1", "table2") if name in sheets}
    if options.json:
        page_tables.print_json({name: sheet.frame for name, sheet in shown_sheets.items()})
    for sheet in () if options.json else shown_sheets.values():
        console.print(with_wide_text(page_tables.to_terminal_table(sheet)))
        for note in sheet.notes:
            console.print(note, soft_wrap=True)
    console.out(f"{page_path}, and figures, tables, CSV files and {embed_page.JSON} next to it", highlight=False)
