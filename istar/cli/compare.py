"""Implements `istar compare`: a page with the geometry of several models."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.cli.console import check_minima, make_console
from istar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from istar.geometry.compare import MeasuredModel, ModelArgument
    from istar.geometry.corpus import Source
    from istar.geometry.measures_file import Measurements
    from istar.geometry.similarity import Similarity


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    parser = commands.add_parser("compare", help="compare the geometry of several models on one page")
    add = parser.add_argument
    models = (
        "folder of istar measure, model, or run, as [label=]<folder or hub id>[@revision]; two or more; or folders of "
        "istar measure --revisions or --checkpoints alone, which are compared over their training"
    )
    add("models", nargs="+", help=models)
    text = "text to measure models over that are no folders of istar measure, and for CKA; repeatable"
    add("--text", action="append", default=[], help=text)
    add("--length", type=int, default=128, help="maximum tokens per block, the same for all models (default: 128)")
    add("--max-tokens", type=int, help="maximum number of tokens of each text")
    add("--documents", type=int, default=1_000, help="documents for CKA; 0 leaves CKA out (default: 1000)")
    add("--out", type=Path, default=Path("comparison"), help="output folder (default: comparison)")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Measure the models that are not measured yet, print a table that compares all models, and write the page."""
    check_minima(options, documents=0, length=1, max_tokens=1)
    from istar.geometry import compare, compare_page, corpus

    choices = compare.parse_compared_models(options.models)
    if any(choice.has_trajectory for choice in choices):
        _compare_trajectories(options, choices)
        return
    compare_page.check_output_folder(options.out)
    sources = corpus.parse_sources(options.text)
    console, progress = make_console(), make_console(stderr=True)
    subjects = _measure_models(choices, sources, options, progress)
    similarities = _compute_similarities(subjects, sources, options, progress)
    page = compare_page.write_page(subjects, options.out, similarities, options.typed)
    console.print(compare.make_terminal_table(subjects))
    for sentence in compare.describe_differences(subjects):
        console.print(f"warning: {sentence}", highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page}, and figures, tables, {compare.TABLE_FILE} beside it", highlight=False)


def _compare_trajectories(options: argparse.Namespace, choices: Sequence["ModelArgument"]) -> None:
    """Compare models over their training: print the table of their trajectories, and write the page."""
    from istar.geometry import trajectory_comparison

    if options.text:
        raise UserError("--text does not go with folders of trainings, which are measured already; leave it out")
    trajectory_comparison.check_output_folder(options.out)
    trajectories = trajectory_comparison.read_trainings(choices)
    page = trajectory_comparison.write_page(trajectories, options.out, options.typed)
    console = make_console()
    console.print(trajectory_comparison.make_terminal_table(trajectories))
    for sentence in trajectory_comparison.describe_differences(trajectories):
        console.print(f"warning: {sentence}", highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page}, and figures, tables, {trajectory_comparison.TABLE_FILE} beside it", highlight=False)


def _measure_models(
    choices: Sequence["ModelArgument"], sources: Sequence["Source"], options: argparse.Namespace, progress: "Console"
) -> list["MeasuredModel"]:
    """Read the measures of models that are measured already, and measure the others into folders beside `--out`."""
    from istar.geometry import compare, measures_file

    file_name = measures_file.JSON_FILE
    unmeasured = [choice for choice in choices if not choice.is_measured]
    if unmeasured and not sources:
        raise UserError(
            f"{unmeasured[0].name} holds no {file_name}; give a folder of istar measure, or --text to measure it"
        )
    measurements = [
        measures_file.read(Path(choice.name) / file_name)
        if choice.is_measured
        else _measure_model(choice, sources, options, progress)
        for choice in choices
    ]
    return compare.label_models(choices, measurements)


def _measure_model(
    choice: "ModelArgument", sources: Sequence["Source"], options: argparse.Namespace, progress: "Console"
) -> "Measurements":
    """Measure a model, and write its page into a folder beside `--out`."""
    # These need transformers, which takes seconds to import, and finished folders do not need them.
    from istar.geometry import measure, model_page
    from istar.geometry.stream import Pass

    out = options.out.with_name(f"{options.out.name}-measures") / choice.default_label
    model_page.check_output_folder(out, choice.model_name, choice.revision)
    progress.print(f"measuring {choice.model_name}", highlight=False, soft_wrap=True, markup=False)
    settings = Pass(options.length, limit=options.max_tokens)
    measured = measure.measure_model(
        choice.model_name, sources, settings, out, choice.revision, console=progress, command=options.typed
    )
    model_page.write(measured, out)
    return measured


def _compute_similarities(
    subjects: Sequence["MeasuredModel"], sources: Sequence["Source"], options: argparse.Namespace, progress: "Console"
) -> list["Similarity"]:
    """Compute CKA between the layers of each pair of models over documents of the texts; return [] without texts."""
    if not sources or not options.documents:
        return []
    from istar.config import ModelConfig
    from istar.geometry import similarity

    documents = similarity.read_first_documents([source.path for source in sources], options.documents)
    models = [
        (
            subject.label,
            ModelConfig(name=subject.measurements.model["name"], revision=subject.measurements.model["revision"]),
        )
        for subject in subjects
    ]
    return similarity.compute_similarities(models, documents, options.length, progress)
