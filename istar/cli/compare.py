"""Implements `istar compare`: a page with the geometry of several models."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from istar.cli.options import find_placement
from istar.drawing import page_folder
from istar.drawing.page_tables import print_json
from istar.drawing.terminal import make_console, with_wide_text
from istar.errors import UserError, shorten
from istar.geometry import compared_geometries
from istar.geometry.collect import measures_file
from istar.geometry.geometry import Geometry, load
from istar.geometry.show import compare, compare_page, measured_training, model_tables, terminal_tables
from istar.models import saved_checkpoints
from istar.models.saved_checkpoints import ModelArgument

if TYPE_CHECKING:
    from istar.texts.corpus import Source


def run(options: argparse.Namespace) -> None:
    """Measure the models that are not measured yet, print a table that compares all models, and write the page."""
    options.device = find_placement(options)
    model_arguments = saved_checkpoints.parse_models(options.models)
    if len(model_arguments) < 2:
        raise UserError("a comparison needs two models or more; give their names, or folders of istar measure")
    if any(measured_training.find_trajectory(argument.name) for argument in model_arguments):
        _compare_trajectories(options, model_arguments)
        return
    sources = _parse_texts(options.text)
    inputs: list[str | Path] = [*(argument.name for argument in model_arguments), *(source.path for source in sources)]
    page_folder.check(options.out, compare_page.COMPARISON_KIND, inputs)
    geometries = _measure_models(model_arguments, sources, options)
    warnings = []
    try:
        comparison = compared_geometries.compare(geometries, similarity=bool(sources and options.cka_documents))
    except UserError as error:  # measuring the models may have taken hours
        comparison = compared_geometries.compare(geometries, similarity=False)
        warnings.append(f"the page lacks the similarity of layers: {shorten(error)}")
    warnings += compare.describe_other_settings(comparison.models)
    page_path = compare_page.write_comparison(comparison.models, options.out, comparison.similarities, options.typed)
    is_of_texts = all(model.measurements.kind == "tokens" for model in comparison.models)
    if options.json:
        models = model_tables.build_model_sheet(comparison.models).frame
        print_json({"models": models} if is_of_texts else {"differences": comparison.table})
    else:
        table = terminal_tables.make_comparison_table(comparison.models) if is_of_texts else repr(comparison)
        make_console().print(table)
    files = f"{page_path}, and figures, tables, {compare_page.COMPARISON_FILE}"
    _print_lines(options, warnings, files)


def _parse_texts(texts: Sequence[str]) -> list["Source"]:
    if not texts:
        return []  # without torch, which takes seconds to import
    from istar.texts import corpus

    return corpus.parse_sources(texts)


def _compare_trajectories(options: argparse.Namespace, model_arguments: Sequence[ModelArgument]) -> None:
    if options.text:
        raise UserError("--text does not go with folders of trainings, which are measured already; leave it out")
    page_folder.check(options.out, compare_page.TRAININGS_KIND, [argument.name for argument in model_arguments])
    trajectories = measured_training.read_trainings(model_arguments)
    page_path = compare_page.write_trainings(trajectories, options.out, options.typed)
    if options.json:
        print_json({training.label: training.table for training in trajectories})
    else:
        make_console().print(with_wide_text(terminal_tables.make_training_table(trajectories)))
    files = f"{page_path}, and figures, tables, {compare_page.TRAININGS_FILE}"
    _print_lines(options, compare_page.describe_other_training_settings(trajectories), files)


def _print_lines(options: argparse.Namespace, warnings: Sequence[str], files: str) -> None:
    """Print warnings and where the files are; with `--json`, standard output has nothing but the JSON."""
    for sentence in warnings:
        make_console(stderr=True).print(f"warning: {sentence}", soft_wrap=True)
    make_console(stderr=options.json).out(f"{files} next to it", highlight=False)


def _measure_models(
    model_arguments: Sequence[ModelArgument], sources: Sequence["Source"], options: argparse.Namespace
) -> dict[str, Geometry]:
    """Return the geometries of all models by label; new models are measured into the folder `models` in `--out`."""
    file_name, folder = measures_file.JSON_FILE, options.out / "models"
    measured_paths = {model: Path(model.name, file_name) for model in model_arguments}
    new_models = {model: folder / model.default_label for model, path in measured_paths.items() if not path.is_file()}
    if files := [model.name for model in new_models if Path(model.name).is_file()]:
        raise UserError(
            f"{files[0]} is a file; expected what `istar measure {files[0]} --out <folder>` wrote: the folder"
        )
    if new_models and not sources:
        name = next(iter(new_models)).name
        raise UserError(f"{name} holds no {file_name}; give a folder of istar measure, or --text to measure it")
    saved_checkpoints.check_distinct_labels([model.default_label for model in new_models])
    measured = {model: load(path) for model, path in measured_paths.items() if model not in new_models}
    models = [measured[model].measurements.model if model in measured else vars(model) for model in model_arguments]
    compare.choose_labels(model_arguments, list(map(compare.name_model, models)))  # refuses labels that collide
    if new_models:
        from istar.cli.measure import make_measure_settings, measure_models

        settings = make_measure_settings(options)
        results = measure_models(options, new_models, sources, settings, options.cka_documents)
        measured |= {model: geometry for model, geometry, _ in results}
    geometries = [measured[model] for model in model_arguments]
    labels = compare.choose_labels(model_arguments, [geometry.label for geometry in geometries])
    return dict(zip(labels, geometries, strict=True))
