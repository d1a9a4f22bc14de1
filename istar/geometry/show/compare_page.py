"""The page of `istar measure` and `istar compare`: of a model, models, the checkpoints of a training, or trainings.

All four have the same sections: flags, how to read the page, the main table, the figures over the layers, the relative
depth or the steps, the figures of single layers, and further tables. A model is a comparison of one.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from istar.drawing import page_folder
from istar.drawing.page_folder import Page, PageKind, Section
from istar.drawing.page_tables import Sheet
from istar.drawing.plot import Plot, evenly_spaced
from istar.files.writing import to_csv
from istar.geometry.collect import measures_file, trajectory
from istar.geometry.collect.measure import ModelName, load_and_hash_weights, make_other_model_error
from istar.geometry.collect.measures_file import JACKKNIFE_MEASURES, Measurements, t_quantile
from istar.geometry.collect.trajectory import CHECKPOINT_FILES, Trajectory, TrajectoryPlan, checkpoint_output
from istar.geometry.show import (
    axis_figures,
    compare,
    findings,
    measured_training,
    model_figures,
    model_tables,
)
from istar.geometry.show.axis_figures import Axis
from istar.geometry.show.compare import TEXTS, MeasuredModel, join_names, list_names
from istar.geometry.show.measured_training import ASSUMED_GROUPS, MeasuredTraining, list_last_checkpoints
from istar.inputs.saved_checkpoints import Checkpoint

if TYPE_CHECKING:
    from istar.geometry.collect.similarity import Similarity

COMPARISON_FILE, TRAININGS_FILE = "comparison.csv", "trajectories.csv"
"""Tables of all measures of several models, and of several trainings."""
MODEL_KIND = PageKind("page of measures", "istar measure", (measures_file.JSON_FILE, measures_file.CSV_FILE))
COMPARISON_KIND = PageKind("comparison", "istar compare", (COMPARISON_FILE,))
TRAINING_KIND = trajectory.KIND
TRAININGS_KIND = PageKind("comparison of trainings", "istar compare, over trainings", (TRAININGS_FILE,))


@dataclass(frozen=True)
class PageContent:
    """What a page shows."""

    kind: PageKind
    title: str
    subject: tuple[str, str, str]  # line below the title
    axis: Axis
    models: Sequence[MeasuredModel]  # the model, the compared models, or checkpoints
    flags: Sequence[str]  # lines at the beginning of the page
    command: str
    summary: Sequence[tuple[str, str]]  # key figures
    trainings: Sequence[MeasuredTraining] = ()
    similarities: Sequence["Similarity"] | None = None  # None leaves out their section
    notes: Sequence[str] = ()  # further paragraphs on how to read the page

    @property
    def detailed_models(self) -> Sequence[MeasuredModel]:
        """The models with all figures and tables; of the checkpoints of a training, some from the first to the last."""
        return evenly_spaced(self.models) if self.axis.ordered else self.models

    @property
    def is_single(self) -> bool:
        """Whether the page is of one model, without a training."""
        return self.kind is MODEL_KIND


def check_model_folder(out: Path, name: str, revision: str | None = None, texts: Sequence[Path] = ()) -> None:
    """Raise a `UserError` before the model is measured if `write_model` would refuse the output folder."""
    page_folder.check(out, MODEL_KIND, (name, *texts))
    _refuse_other_model(out, ModelName(name, revision))


def _refuse_other_model(out: Path, model: ModelName, weights: str = "") -> None:
    """Refuse a folder with the measures of another model. Computes the hash of the weights if needed."""
    if not (out / measures_file.JSON_FILE).exists():
        return
    earlier = measures_file.read_measurement(out / measures_file.JSON_FILE)
    earlier_model = ModelName(earlier.model["name"], earlier.model["revision"])
    if earlier_model == model or earlier.weights == weights:
        return
    if load_and_hash_weights(model, earlier.model["dtype"]) != earlier.weights:
        raise make_other_model_error(out, earlier_model, model)


def check_training_folder(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse an output folder with another page or another model, before anything is measured.

    Measurements of further checkpoints of the same model are kept, so that they need not be measured again.

    Raises a `UserError` if the folder contains another model, and as `istar.drawing.page_folder.check` does.
    """
    inputs: list[str | Path] = [*(checkpoint.name for checkpoint in checkpoints), *(text.path for text in plan.texts)]
    page_folder.check(plan.out, TRAINING_KIND, inputs)
    for checkpoint in checkpoints:
        checkpoint_output(plan, checkpoint).check(CHECKPOINT_FILES, inputs)
    trajectory.refuse_other_checkpoints(plan, checkpoints)


def write_model(measured: Measurements, out: Path, label: str = "") -> Path:
    """Write the page of a model with its figures, tables and measures in place of an earlier one, and return its path.

    The page calls the model by `label`, or else by the last part of its name. Raises a `UserError` for the measures of
    another model, and as `istar.drawing.page_folder.write` does.
    """
    name, revision = measured.model["name"], measured.model["revision"]
    _refuse_other_model(out, ModelName(name, revision), measured.weights)
    contents = {name: text.encode() for name, text in measures_file.file_contents(measured).items()}
    # The measures, which may have taken hours, are saved before anything is drawn.
    page_folder.page_output(out, MODEL_KIND).write(contents)
    model = MeasuredModel(label or compare.shorten_model_name(name), measured)
    texts = measured.settings["texts"]
    arguments = " ".join(f"--text {shlex.quote(f'{text}={path}')}" for text, path in texts.items())
    details = f"weights {measured.weights}, measured by istar {version('istar')}"
    page = PageContent(
        kind=MODEL_KIND,
        title=f"Geometry of {model.label}",
        subject=("Model", name, f"at revision {revision}, {details}" if revision else details),
        axis=axis_figures.make_layer_axis([model]),
        models=[model],
        flags=findings.describe_model(measured),
        command=measured.command or f"istar measure {shlex.quote(name)} {arguments}",
        summary=[
            (f"{model.last_layer_measures['tokens']:,.0f}", "tokens"),
            _count(len(texts), "text"),
            (str(sum(tap.startswith("layer_") for tap in measured.all_texts)), "layers"),
            (f"{measured.width:,}", "dimensions"),
            (f"{measured.matrices['input']['raw']['rows']:,}", "tokens in the vocabulary"),
        ],
    )
    return _write(page, out, contents)


def write_comparison(
    models: Sequence[MeasuredModel], out: Path, similarities: Sequence["Similarity"] = (), command: str = ""
) -> Path:
    """Write the page that compares models, with its figures, tables and `comparison.csv`, and return the page's path.

    Differences are from the first model. An earlier result in the folder is replaced. Raises a `UserError` as
    `istar.drawing.page_folder.write` does.
    """
    labels = [model.label for model in models]
    tokens = sorted({int(model.last_layer_measures["tokens"]) for model in models})
    token_range = f"{tokens[0]:,}" + (f" to {tokens[-1]:,}" if len(tokens) > 1 else "")
    page = PageContent(
        kind=COMPARISON_KIND,
        title=f"Geometry of {join_names(labels)}",
        subject=("Models", ", ".join(labels), f"compared by istar {version('istar')}"),
        axis=axis_figures.make_layer_axis(models),
        models=models,
        flags=findings.describe_models(models),
        command=command,
        summary=[(str(len(labels)), "models"), (token_range, "tokens")],
        similarities=similarities,
        notes=compare.describe_other_settings(models),
    )
    frame = pd.DataFrame(compare.make_layer_rows(models))
    return _write(page, out, {COMPARISON_FILE: to_csv(frame).encode()})


def write_training(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], measured: Trajectory) -> Path:
    """Write the page of a training with its figures and `trajectory.csv`, and return the page's path."""
    training = measured_training.make_training(Path(plan.model).name, checkpoints, measured.measurements)
    failures = [f"Not measured: {label}: {reason}" for label, reason in measured.failures.items()]
    page = PageContent(
        kind=TRAINING_KIND,
        title=f"Geometry of {training.label} over its training",
        subject=("Model", plan.model, f"over its training, measured by istar {version('istar')}"),
        axis=axis_figures.make_step_axis([training]),
        models=training.checkpoints,
        flags=findings.describe_trainings([training]),
        command=plan.command,
        summary=[_count(len(training.checkpoints), "checkpoint"), _count(len(plan.texts), "text")],
        trainings=[training],
        notes=failures,
    )
    return _write(page, plan.out, {measures_file.TRAJECTORY_FILE: trajectory.make_csv(plan, checkpoints, measured)})


def write_trainings(trainings: Sequence[MeasuredTraining], out: Path, command: str = "") -> Path:
    """Write the page that compares trainings, with its figures and `trajectories.csv`, and return the page's path.

    Raises a `UserError` as `istar.drawing.page_folder.write` does.
    """
    labels = [training.label for training in trainings]
    without_folder = [training.label for training in trainings if not training.checkpoints]
    notes = describe_other_training_settings(trainings)
    if without_folder:
        notes.append(
            TEXTS["reading"]["assumed_groups"].format(labels=list_names(without_folder), groups=ASSUMED_GROUPS)
        )
    page = PageContent(
        kind=TRAININGS_KIND,
        title=f"Geometry of {join_names(labels)} over their training",
        subject=("Models", ", ".join(labels), f"over their training, compared by istar {version('istar')}"),
        axis=axis_figures.make_step_axis(trainings),
        models=list_last_checkpoints(trainings),
        flags=findings.describe_trainings(trainings),
        command=command,
        summary=[
            (str(len(labels)), "models"),
            (f"{sum(len(training.steps) for training in trainings):,}", "checkpoints"),
        ],
        trainings=trainings,
        notes=notes,
    )
    frame = pd.concat([training.table.assign(model=training.label) for training in trainings])
    return _write(page, out, {TRAININGS_FILE: to_csv(frame).encode()})


def describe_other_training_settings(trainings: Sequence[MeasuredTraining]) -> list[str]:
    """Return a sentence for each training measured over other texts or with other settings than the first.

    The last checkpoints are compared. The list is empty if one of their folders has been deleted.
    """
    models = list_last_checkpoints(trainings)
    return compare.describe_other_settings(models) if len(models) == len(trainings) else []


def _count(number: int, noun: str) -> tuple[str, str]:
    """Return a key figure, such as ("1", "text")."""
    return str(number), noun if number == 1 else f"{noun}s"


def _write(content: PageContent, out: Path, contents: Mapping[str, bytes]) -> Path:
    """Write a page with its figures, tables and the further files `contents`, and return its path."""
    sheets = {sheet.name: sheet for sheet in _build_sheets(content)}
    page = Page(
        content.title, content.subject, content.kind.generator, content.summary, _make_sections(content, sheets)
    )
    return page_folder.write(out, {**contents, **page_folder.page_files(page, sheets)}, content.kind)


def _build_sheets(content: PageContent) -> list[Sheet]:
    models, detailed, sheets = content.models, content.detailed_models, []
    if len(content.trainings) > 1:
        sheets.append(model_tables.build_training_sheet(content.trainings))
    elif not content.is_single:
        sheets.append(model_tables.build_model_sheet(models))
    if not content.trainings:
        sheets.append(model_tables.build_layer_sheet(models))
    if len(models) > 1:
        sheets.append(model_tables.build_difference_sheet(detailed))
    if content.similarities:
        sheets.append(model_tables.build_similarity_sheet(content.similarities))
    if models:
        sheets += [model_tables.join_sheets(detailed, build) for build in model_tables.MODEL_SHEET_BUILDERS]
    if content.is_single:
        sheets.append(model_tables.build_sphere_sheet())
    return sheets


def _make_plots(content: PageContent) -> list[Plot]:
    models, detailed = content.models, content.detailed_models
    width = max((model.measurements.width for model in models), default=0)
    plots = [model_figures.plot_differences(detailed)] if len(models) > 1 else []
    plots += axis_figures.plot_measures(content.axis, width)
    plots += model_figures.plot_states(detailed, content.axis.ordered)
    plots += axis_figures.plot_parameters(models, content.trainings, content.axis)
    if content.is_single:
        plots += [*model_figures.plot_matrices(models[0].measurements), model_figures.plot_spheres()]
    if content.similarities is not None:
        plots.append(model_figures.plot_similarity(content.similarities))
    return plots


def _make_sections(content: PageContent, sheets: Mapping[str, Sheet]) -> list[Section]:
    """Return the sections of a page: the main tables, each figure with the table of its name, and the other tables."""
    remaining = dict(sheets)
    sections = [
        Section("findings", "What stands out", content.flags),
        Section("reading", "How to read this", _explain_page(content)),
    ]
    sections += [_make_table_section(remaining.pop(name)) for name in ("models", "layers") if name in remaining]
    for plot in _make_plots(content):
        paragraphs = [plot.caption]
        if plot.name == "differences":
            paragraphs += _describe_error_methods(content.detailed_models)
        # The table of the matrices belongs to the figure of I(W), but has more measures.
        sheet = remaining.pop("matrices" if plot.name == "partition" else plot.name, None)
        pictures = page_folder.render_pictures(plot)
        sections.append(
            Section(plot.name, plot.title, paragraphs, sheet, pictures, _explain_missing_panels(content, plot))
        )
    sections += map(_make_table_section, remaining.values())
    if content.command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[content.command]))
    return sections


def _make_table_section(sheet: Sheet) -> Section:
    """Return the section of a table without a figure; an empty table has a sentence on why it is empty."""
    empty_note = "" if sheet.rows else TEXTS["missing"].get(sheet.name, "Not measured.")
    return Section(f"table-{sheet.name}", sheet.title, (), sheet, empty_note=empty_note, is_wide=True)


def _explain_missing_panels(content: PageContent, plot: Plot) -> str:
    """Return a sentence on why a figure, or some of its panels, are missing; empty if none is."""
    if plot.name in ("similarity", "final_norm"):
        return "" if plot.panels else str(TEXTS["missing"][plot.name])
    measured_all = all(model.measurements.settings.get("measures") == "all" for model in content.models)
    hint = "" if measured_all else " Some measures need --measures all."
    if missing := model_figures.find_missing_measures(plot):
        return f"Not measured, or not defined in any layer: {', '.join(missing)}.{hint}"
    return "" if plot.panels else f"Not measured, or not defined.{hint}"


def _explain_page(content: PageContent) -> list[str]:
    """Return the paragraphs on how to read a page."""
    texts, paragraphs = TEXTS["reading"], []
    if content.models:
        settings = content.models[0].measurements.settings
        documents, tokens = settings["documents"], settings["special_tokens"]
        paragraphs.append(f"{texts[f'documents_{documents}']} {texts[f'tokens_{tokens}']}")
    axis_note = texts.get(content.axis.name.replace(" ", "_"), texts["step"])
    return [*paragraphs, axis_note, texts["isotropy"], _explain_intervals(content), *content.notes]


def _explain_intervals(content: PageContent) -> str:
    """Return sentences on what the bands in figures and the ± in tables are."""
    names = [f"{name}_error" for name in JACKKNIFE_MEASURES]
    has_error = {
        model.label: any(math.isfinite(measures.get(name, math.nan)) for measures in taps.values() for name in names)
        for model in content.models
        for taps in model.measurements.sources.values()
    }
    if content.models and not any(has_error.values()):
        return str(TEXTS["reading"]["no_intervals"])
    groups = {model.num_groups for model in content.models} - {0} or {ASSUMED_GROUPS}
    quantiles = list_names([f"{t_quantile(count - 1):.2f} for {count} groups" for count in sorted(groups)])
    without = [label for label, has in has_error.items() if not has]
    missing = f" {list_names(without)}: none, with fewer documents than groups." if without else ""
    return TEXTS["reading"]["intervals"].format(quantiles=quantiles) + missing


def _describe_error_methods(models: Sequence[MeasuredModel]) -> list[str]:
    """Return sentences on how the errors of differences from the first model are computed, or why there are none."""
    first, *others = models
    labels_by_method: dict[str, list[str]] = {}
    sentences = []
    for other in others:
        if reason := compare.explain_no_differences(first, other):
            sentences.append(reason)
        else:
            labels_by_method.setdefault(compare.choose_error_method(first, other), []).append(other.label)
    return sentences + [
        TEXTS["reading"][method].format(others=list_names(labels), first=first.label)
        for method, labels in labels_by_method.items()
    ]
