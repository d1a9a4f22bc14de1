"""Implements `istar compare`: a page with the geometry of several models."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.drawing.terminal import make_console
from istar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from istar.geometry.collect.measures_file import Measurements
    from istar.geometry.collect.similarity import Similarity
    from istar.geometry.show.compare import MeasuredModel
    from istar.inputs.corpus import Source
    from istar.inputs.saved_checkpoints import ModelArgument


def add_parser(commands: Any) -> None:
    """Register `istar compare`."""
    parser = commands.add_parser("compare", help="compare the geometry of several models on one page")
    add = parser.add_argument
    models_help = (
        "folder of istar measure, model, or run, as [label=]<folder or hub id>[@revision]; two or more; or folders of "
        "istar measure --revisions or --checkpoints alone, which are compared over their training"
    )
    add("models", nargs="+", help=models_help)
    text_help = "text to measure models over that are no folders of istar measure, and for CKA; repeatable"
    add("--text", action="append", default=[], help=text_help)
    add("--length", type=int, default=128, help="maximum tokens per block, the same for all models (default: 128)")
    add("--max-tokens", type=int, help="maximum number of tokens of each text")
    add("--documents", type=int, default=1_000, help="documents for CKA; 0 leaves CKA out (default: 1000)")
    add("--out", type=Path, default=Path("comparison"), help="output folder (default: comparison)")
    parser.set_defaults(command=run, extra="train", minima={"documents": 0, "length": 1, "max_tokens": 1})


def run(options: argparse.Namespace) -> None:
    """Measure the models that are not measured yet, print a table that compares all models, and write the page."""
    from istar.drawing import page_folder
    from istar.geometry.show import compare, compare_page, terminal_tables
    from istar.inputs import corpus

    model_arguments = compare.parse_compared_models(options.models)
    if any(compare.has_trajectory(argument) for argument in model_arguments):
        _compare_trajectories(options, model_arguments)
        return
    sources = corpus.parse_sources(options.text)
    inputs: list[str | Path] = [*(argument.name for argument in model_arguments), *(source.path for source in sources)]
    page_folder.check(options.out, compare_page.COMPARISON_KIND, inputs)
    console, progress_console = make_console(), make_console(stderr=True)
    measured_models = _measure_models(model_arguments, sources, options, progress_console)
    similarities = _compute_similarities(measured_models, sources, options, progress_console)
    page_path = compare_page.write_comparison(measured_models, options.out, similarities, options.typed)
    console.print(terminal_tables.make_comparison_table(measured_models))
    for sentence in compare.describe_other_settings(measured_models):
        console.print(f"warning: {sentence}", highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page_path}, and figures, tables, {compare_page.COMPARISON_FILE} beside it", highlight=False)


def _compare_trajectories(options: argparse.Namespace, model_arguments: Sequence["ModelArgument"]) -> None:
    """Print the table of the models' trajectories over their training, and write the page."""
    from istar.drawing import page_folder
    from istar.geometry.show import compare_page, measured_training, terminal_tables

    if options.text:
        raise UserError("--text does not go with folders of trainings, which are measured already; leave it out")
    page_folder.check(options.out, compare_page.TRAININGS_KIND, [argument.name for argument in model_arguments])
    trajectories = measured_training.read_trainings(model_arguments)
    page_path = compare_page.write_trainings(trajectories, options.out, options.typed)
    console = make_console()
    console.print(terminal_tables.make_training_table(trajectories))
    for sentence in compare_page.describe_other_training_settings(trajectories):
        console.print(f"warning: {sentence}", highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page_path}, and figures, tables, {compare_page.TRAININGS_FILE} beside it", highlight=False)


def _measure_models(
    model_arguments: Sequence["ModelArgument"],
    sources: Sequence["Source"],
    options: argparse.Namespace,
    progress_console: "Console",
) -> list["MeasuredModel"]:
    """Return the measures of all models; unmeasured models are measured into folders next to `--out`."""
    from istar.geometry.collect import measures_file
    from istar.geometry.show import compare

    file_name = measures_file.JSON_FILE
    unmeasured_models = [argument for argument in model_arguments if not compare.is_measured(argument)]
    if unmeasured_models and not sources:
        raise UserError(
            f"{unmeasured_models[0].name} holds no {file_name}; give a folder of istar measure, or --text to measure it"
        )
    measurements = [
        measures_file.read_measurement(Path(argument.name) / file_name)
        if compare.is_measured(argument)
        else _measure_model(argument, sources, options, progress_console)
        for argument in model_arguments
    ]
    return compare.label_models(model_arguments, measurements)


def _measure_model(
    model_argument: "ModelArgument",
    sources: Sequence["Source"],
    options: argparse.Namespace,
    progress_console: "Console",
) -> "Measurements":
    """Measure a model, write its page into a folder next to `--out`, and return its measurements."""
    # These need transformers, which takes seconds to import, and finished folders do not need them.
    from istar.geometry.collect import measure
    from istar.geometry.collect.corpus_statistics import MeasureSettings
    from istar.geometry.show import compare_page

    out = options.out.with_name(f"{options.out.name}-measures") / model_argument.default_label
    texts = [source.path for source in sources]
    compare_page.check_model_folder(out, model_argument.model_name, model_argument.revision, texts)
    progress_console.print(f"measuring {model_argument.model_name}", highlight=False, soft_wrap=True, markup=False)
    settings = MeasureSettings(options.length, limit=options.max_tokens)
    measurements = measure.measure_model(
        model_argument.model_name,
        sources,
        settings,
        out,
        model_argument.revision,
        console=progress_console,
        command=options.typed,
    )
    compare_page.write_model(measurements, out)
    return measurements


def _compute_similarities(
    measured_models: Sequence["MeasuredModel"],
    sources: Sequence["Source"],
    options: argparse.Namespace,
    progress_console: "Console",
) -> list["Similarity"]:
    """Return the CKA between the layers of each pair of models over documents of the texts; [] without texts."""
    if not sources or not options.documents:
        return []
    from istar.geometry.collect import similarity
    from istar.records.config import ModelConfig

    documents = similarity.read_first_documents([source.path for source in sources], options.documents)
    labels_and_configs = [
        (
            measured_model.label,
            ModelConfig(
                name=measured_model.measurements.model["name"], revision=measured_model.measurements.model["revision"]
            ),
        )
        for measured_model in measured_models
    ]
    return similarity.compute_similarities(labels_and_configs, documents, options.length, progress_console)
