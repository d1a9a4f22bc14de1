"""Implements `istar measure`: measures the geometry of models' layers on texts, also at several checkpoints."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from istar.cli.options import find_placement, make_parser
from istar.drawing import page_folder
from istar.drawing.page_tables import print_json
from istar.drawing.terminal import make_console, with_wide_text
from istar.errors import UserError
from istar.files.folders import split_label
from istar.geometry.checks import Checks, read_checks
from istar.geometry.collect import measure, measures_file, stream, trajectory, trajectory_file
from istar.geometry.collect.measures_file import ModelName
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.geometry.geometry import Geometry, load
from istar.geometry.measuring import measure as measure_points
from istar.geometry.show import compare_page, terminal_tables
from istar.models import saved_checkpoints
from istar.models.saved_checkpoints import ModelArgument
from istar.texts import corpus
from istar.texts.corpus import Source
from istar.vectors.vector_files import is_vector_file, open_clouds, split_key

_FILES = f"{measures_file.CSV_FILE} and {measures_file.JSON_FILE}"
_OPTIONS_OF_MODELS = (
    *("text", "length", "documents", "special_tokens", "batch_tokens", "max_tokens", "shuffle_buffer", "groups"),
    *("no_intra", "dtype", "device_map", "max_memory", "offload_folder", "revisions", "checkpoints", "steps"),
    "examples",
)
"""Options that do not go with files of vectors."""


class BeyondBounds(UserError):  # noqa: N818
    """Raised at the end if measures are beyond their bounds."""

    exit_code = 1


def run(options: argparse.Namespace) -> None:
    """Measure models, or several revisions or checkpoints of each, and write pages, figures and tables.

    The results of a single model are in `--out`, and of several in subfolders with their labels.
    """
    checks = None if options.check is None else read_checks(options.check)
    if any(is_vector_file(split_label(name)[1]) for name in options.models):
        _print_points(options, checks)
        return
    if not options.text:
        raise UserError("--text is missing; expected a file or folder of text, or --list to see the measures")
    settings = make_measure_settings(options)
    options.device = find_placement(options)
    if options.device_map and (options.revisions or options.checkpoints is not None):
        raise UserError("--device-map does not go with --revisions or --checkpoints; measure <model>@<revision> each")
    models = saved_checkpoints.parse_models(options.models)
    sources = corpus.parse_sources(options.text)
    with stream.join_process_group() as rank:
        if not options.revisions and options.checkpoints is None:
            _print_models(options, models, sources, settings, rank, checks)
        elif rank == 0 and "WORLD_SIZE" not in os.environ:
            _print_trajectory(options, models, sources, settings)
            if checks:
                _check(load(options.out), checks)
        else:
            raise UserError("--revisions and --checkpoints are measured by one process; call them without torchrun")


def _print_points(options: argparse.Namespace, checks: Checks | None) -> None:
    """Measure files of vectors, print their table, and write their page."""
    defaults = vars(make_parser().parse_args(["measure"]))
    for name in _OPTIONS_OF_MODELS:
        if getattr(options, name) != defaults[name]:
            raise UserError(f"--{name.replace('_', '-')} does not go with files of vectors; leave it out")
    sources = {label or Path(path).stem: path for label, path in map(split_label, options.models)}
    if len(sources) < len(options.models):
        raise UserError("several files have the same name; give them names, as in first=<file>")
    open_clouds(sources)  # refuses missing files before a folder of other measures
    page_folder.check(options.out, compare_page.MODEL_KIND, [split_key(path)[0] for path in sources.values()])
    files = list(sources.values())
    measures_file.read_earlier(options.out, ModelName(", ".join(files)), "")  # refuses a page of other files
    has_labels = any(label for label, _ in map(split_label, options.models))
    geometry = measure_points(
        sources if has_labels or len(files) > 1 else files[0],
        measures=options.measures,
        sample=options.sample,
        seed=options.seed,
        device=None if options.device == "auto" else options.device,
        progress=True,
    )
    geometry = Geometry(replace(geometry.measurements, command=options.typed))
    console = make_console(stderr=options.json)
    if options.json:
        print_json({geometry.label: measures_file.layer_frame(geometry.measurements)})
    else:
        console.print(with_wide_text(terminal_tables.make_model_table(geometry.label, geometry.measurements)))
    console.out(f"{geometry.save(options.out)}, and figures, tables, {_FILES} next to it", highlight=False)
    _check(geometry, checks)


def _check(geometry: Geometry, checks: Checks | None) -> None:
    """Print a line for each measure that is beyond its bounds, and raise `BeyondBounds` if there are any."""
    violations = geometry.check(checks) if checks else []
    for violation in violations:
        make_console(stderr=True).print(f"{geometry.label}: {violation}", highlight=False, soft_wrap=True)
    if violations:
        verb = "measure is" if len(violations) == 1 else "measures are"
        raise BeyondBounds(f"{len(violations)} {verb} beyond the bounds of --check")


def make_measure_settings(options: argparse.Namespace) -> MeasureSettings:
    """Return the settings in the parsed options of `istar measure` or `istar compare`."""
    if options.groups == 1:
        raise UserError("--groups 1 gives no standard errors; expected at least 2, or 0 to compute none")
    same_names = {field.name for field in fields(MeasureSettings)} - {"limit", "intra"}
    settings = {name: getattr(options, name) for name in same_names}
    return MeasureSettings(limit=options.max_tokens, intra=not options.no_intra, **settings)


def measure_models(
    options: argparse.Namespace,
    folders: Mapping[ModelArgument, Path],
    sources: Sequence[Source],
    settings: MeasureSettings,
    num_examples: int,
    rank: int = 0,
) -> Iterator[tuple[ModelArgument, Geometry, Path]]:
    """Measure each model into its folder; on rank 0, yield it with what was measured and the path of its page."""
    texts = [source.path for source in sources]
    for model, folder in folders.items():
        page_folder.check(folder, compare_page.MODEL_KIND, (model.source.name, *texts))
    stream.wait_for_all_processes()  # a process that still checks the folder would remove another one's files
    console = make_console(stderr=True) if rank == 0 else None
    for model, folder in folders.items():
        if console is not None and len(folders) > 1:
            console.print(f"measuring {model.default_label}", soft_wrap=True)
        opened_model = measure.open_model(model.source, options.dtype, options.device)
        text_pass = measure.plan_pass(opened_model, sources, settings)
        measurements, examples = measure.measure_texts(text_pass, folder, console, num_examples)
        measurements = replace(measurements, command=options.typed)
        del opened_model, text_pass  # the model's memory is needed for the next one
        if rank == 0:
            content = None if examples is None else examples.to_bytes()
            page_path = compare_page.write_model(measurements, folder, model.label, content)
            yield model, Geometry(measurements, examples), page_path


def _print_models(
    options: argparse.Namespace,
    models: Sequence[ModelArgument],
    sources: Sequence[Source],
    settings: MeasureSettings,
    rank: int,
    checks: Checks | None,
) -> None:
    if not models:
        raise UserError("model is missing; expected a hub id, a folder or a run, or --checkpoints")
    if options.steps is not None:
        raise UserError("--steps is for several checkpoints; expected --checkpoints or --revisions with it")
    saved_checkpoints.check_distinct_labels([model.default_label for model in models])
    folders = {model: options.out / model.default_label if len(models) > 1 else options.out for model in models}
    console = make_console(stderr=options.json)
    frames = {}
    geometries = []
    for model, geometry, page_path in measure_models(options, folders, sources, settings, options.examples, rank):
        frames[model.default_label] = measures_file.layer_frame(geometry.measurements)
        geometries.append(geometry)
        if not options.json:
            table = terminal_tables.make_model_table(model.default_label, geometry.measurements)
            console.print(with_wide_text(table))
        console.out(f"{page_path}, and figures, tables, {_FILES} next to it", highlight=False)
    if options.json and rank == 0:
        print_json(frames)
    for geometry in geometries:
        _check(geometry, checks)


def _print_trajectory(
    options: argparse.Namespace,
    models: Sequence[ModelArgument],
    sources: Sequence[Source],
    settings: MeasureSettings,
) -> None:
    if len(models) > 1 or any(model.revision for model in models) or (options.revisions and options.checkpoints):
        raise UserError(
            "--revisions, --checkpoints and <model>@<revision> do not go together, nor do several models; call istar "
            "measure for each training"
        )
    steps = None if options.steps is None else trajectory.read_steps(options.steps)
    if options.checkpoints is not None:
        checkpoints = saved_checkpoints.find_checkpoints(options.checkpoints, steps)
    elif not models:
        raise UserError("--revisions are of a model, which is missing; expected a hub id")
    else:
        checkpoints = saved_checkpoints.find_revisions(models[0].name, options.revisions, steps)
    name = models[0].name if models else saved_checkpoints.common_name(checkpoints)
    plan = trajectory_file.TrajectoryPlan(
        name, sources, settings, options.out, options.dtype, options.device, options.typed
    )
    trajectory.check_training_folder(plan, checkpoints)
    measured_trajectory = trajectory.measure_checkpoints(plan, checkpoints, make_console(stderr=True))
    if measured_trajectory.measurements:
        console = make_console(stderr=options.json)
        if options.json:
            print_json({"checkpoints": trajectory_file.make_trajectory_table(plan, checkpoints, measured_trajectory)})
        else:
            table = terminal_tables.make_checkpoint_table(plan, checkpoints, measured_trajectory)
            console.print(with_wide_text(table))
        page_path = compare_page.write_training(plan, checkpoints, measured_trajectory)
        console.out(f"{page_path}, and figures, {measures_file.TRAJECTORY_FILE} next to it", highlight=False)
    trajectory.raise_on_failures(measured_trajectory)
