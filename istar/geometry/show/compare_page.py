"""The page of `istar measure` and `istar compare`: of a model, clouds, models, a training's checkpoints, or trainings.

All four have the same sections: flags, how to read the page, the main table, the figures over the layers, the relative
depth or the steps, the figures of single layers, and further tables. A model is a comparison of one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from istar.drawing import page_folder
from istar.drawing.page_folder import Page, PageKind, Section
from istar.drawing.page_tables import Sheet, fold_columns, make_markdown_table, number_entry
from istar.drawing.pictures import render_pictures
from istar.drawing.plot import Plot, evenly_spaced
from istar.files.outputs import Output
from istar.files.writing import to_csv
from istar.geometry.collect import measures_file, trajectory_file
from istar.geometry.collect.measures_file import Measurements, ModelName, t_quantile
from istar.geometry.collect.trajectory_file import TRAINING_KIND, Trajectory, TrajectoryPlan
from istar.geometry.show import (
    axis_figures,
    compare,
    findings,
    measured_training,
    model_figures,
    model_tables,
    terminal_tables,
)
from istar.geometry.show.axis_figures import Axis
from istar.geometry.show.compare import TEXTS, MeasuredModel, join_names, list_names
from istar.geometry.show.measured_training import ASSUMED_GROUPS, MeasuredTraining, list_last_checkpoints
from istar.measures.catalogue import MEASURES
from istar.models.saved_checkpoints import Checkpoint
from istar.runs.labels import shorten_model_name

if TYPE_CHECKING:
    from istar.geometry.collect.mean_states import Similarity

COMPARISON_FILE, TRAININGS_FILE = "comparison.csv", "trajectories.csv"
"""Tables of all measures of several models, and of several trainings."""
CARD_FILE = "card.md"
"""The main measures of a model, to paste into its page on the hub."""
MODEL_KIND = PageKind(
    "page of measures",
    "istar measure",
    (measures_file.JSON_FILE, measures_file.CSV_FILE, CARD_FILE, measures_file.EXAMPLES_FILE),
)
COMPARISON_KIND = PageKind("comparison", "istar compare", (COMPARISON_FILE,))
_OVERVIEW = "isotropy"
"""Name of the figure with which a page begins."""
_DEFINITIONS = ("Definitions of the measures", "#measures")
TRAININGS_KIND = PageKind("comparison of trainings", "istar compare, over trainings", (TRAININGS_FILE,))


@dataclass(frozen=True)
class PageContent:
    """What a page shows: models, or trainings with their checkpoints."""

    kind: PageKind
    models: Sequence[MeasuredModel]  # the models, the checkpoints of a training, or the last ones of several trainings
    trainings: Sequence[MeasuredTraining] = ()
    command: str = ""
    similarities: Sequence["Similarity"] | None = None  # None leaves out their section
    notes: Sequence[str] = ()  # paragraphs before those on how to read the page

    @property
    def labels(self) -> list[str]:
        """Names of the trainings or of the models."""
        return [subject.label for subject in self.trainings or self.models]

    @cached_property
    def axis(self) -> Axis:
        """The x axis of the figures: layers, relative depth or steps."""
        if self.trainings:
            return axis_figures.make_step_axis(self.trainings)
        return axis_figures.make_layer_axis(self.models)

    @property
    def words(self) -> Mapping[str, str]:
        """Words for what was measured, for the names in braces in texts."""
        return self.models[0].words if self.models else TEXTS["words"]["tokens" if self.is_of_texts else "places"]

    @property
    def is_of_texts(self) -> bool:
        """Whether models of texts were measured, so that the page says what is missing."""
        is_of_texts = all(model.measurements.kind == "tokens" for model in self.models)
        return is_of_texts and not any(training.is_monitored for training in self.trainings)

    @property
    def detailed_models(self) -> Sequence[MeasuredModel]:
        """The models with all figures and tables; of the checkpoints of a training, some from the first to the last."""
        return evenly_spaced(self.models) if self.axis.ordered else self.models


def write_model(measured: Measurements, out: Path, label: str = "", examples: bytes | None = None) -> Path:
    """Write the page of a model with its figures, tables and measures in place of an earlier one, and return its path.

    The page calls the model by `label`, or else by the last part of its name. `examples` is the content of the file of
    examples, if there is one. Raises a `UserError` for the measures of another model, and as
    `istar.drawing.page_folder.write` does.
    """
    name, revision = measured.model["name"], measured.model["revision"]
    measures_file.read_earlier(out, ModelName(name, revision), measured.identity)
    label = label or compare.name_measured(measured)
    contents = {name: text.encode() for name, text in measures_file.file_contents(measured).items()}
    contents[CARD_FILE] = _make_card(label, measured).encode()
    if examples is not None:
        contents[measures_file.EXAMPLES_FILE] = examples
    # The measures, which may have taken hours, are saved before anything is drawn.
    Output(out, MODEL_KIND.noun).write(contents)
    measures_file.discard_state(out)
    model = MeasuredModel(label, measured)
    return _write(PageContent(MODEL_KIND, [model], command=measured.command), out, contents)


def _make_card(label: str, measured: Measurements) -> str:
    settings, words = measured.settings, TEXTS["words"][measured.kind]
    headers = terminal_tables.choose_main_measures(measured)
    rows = [
        [state, *(number_entry(measures.get(name, math.nan)).text for name in headers)]
        for state, measures in measured.all_texts.items()
    ]
    subject = terminal_tables.make_title(MeasuredModel(label, measured))
    if measured.kind == "tokens":
        subject += (
            f" of {', '.join(settings['texts'])}: {settings['documents']} documents of at most {settings['length']} "
            f"tokens, special tokens {settings['special_tokens']}d, weights in {measured.model['dtype']}"
        )
    intra_sim = ", IntraSim of the same token in different places" if "intra_sim" in headers else ""
    return (
        f"## Geometry of the {words['vectors']}\n\n{subject}. Measured by istar {version('istar')}.\n\n"
        f"{make_markdown_table([[words['state'], *headers.values()], *rows])}\n\n"
        f"IsoScore is 1 if the {words['vectors']} vary equally in all directions, and 0 if they vary in one. InterSim "
        f"is the average cosine of different {words['units']}{intra_sim}, TwoNN an intrinsic dimension, the rank an "
        "effective rank.\n"
    )


def write_comparison(
    models: Sequence[MeasuredModel], out: Path, similarities: Sequence["Similarity"] = (), command: str = ""
) -> Path:
    """Write the page that compares models, with its figures, tables and `comparison.csv`, and return its path."""
    notes = compare.describe_other_settings(models)
    content = PageContent(COMPARISON_KIND, models, command=command, similarities=similarities, notes=notes)
    frame = pd.DataFrame(compare.make_layer_rows(models))
    return _write(content, out, {COMPARISON_FILE: to_csv(frame).encode()})


def write_training(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], measured: Trajectory) -> Path:
    """Write the page of a training with its figures and `trajectory.csv`, and return the page's path."""
    training = measured_training.make_training(shorten_model_name(plan.model), checkpoints, measured.measurements)
    failures = [f"Not measured: {label}: {reason}" for label, reason in measured.failures.items()]
    content = PageContent(TRAINING_KIND, training.checkpoints, [training], plan.command, notes=failures)
    table = trajectory_file.make_csv(plan, checkpoints, measured)
    return _write(content, plan.out, {measures_file.TRAJECTORY_FILE: table})


def write_trainings(trainings: Sequence[MeasuredTraining], out: Path, command: str = "") -> Path:
    """Write the page that compares trainings, with its figures and `trajectories.csv`, and return the page's path."""
    notes = describe_other_training_settings(trainings)
    without_folder = [training.label for training in trainings if not (training.checkpoints or training.is_monitored)]
    if without_folder:
        note = TEXTS["reading"]["assumed_groups"]
        notes.append(note.format(labels=list_names(without_folder), groups=ASSUMED_GROUPS))
    content = PageContent(TRAININGS_KIND, list_last_checkpoints(trainings), trainings, command, notes=notes)
    frame = pd.concat([training.table.assign(model=training.label) for training in trainings])
    return _write(content, out, {TRAININGS_FILE: to_csv(frame).encode()})


def describe_other_training_settings(trainings: Sequence[MeasuredTraining]) -> list[str]:
    """Return a sentence for each training measured over other texts or with other settings than the first.

    The last checkpoints are compared. The list is empty if one of their folders has been deleted.
    """
    models = list_last_checkpoints(trainings)
    return compare.describe_other_settings(models) if len(models) == len(trainings) else []


def _write(content: PageContent, out: Path, contents: Mapping[str, bytes]) -> Path:
    sheets = {sheet.name: sheet for sheet in _build_sheets(content)}
    over_training = " over training" if content.trainings else ""
    labels = content.labels
    noun = content.words["subject"].capitalize() + ("" if len(labels) == 1 else "s")
    page = Page(
        title=f"Geometry of {join_names(labels)}{over_training}",
        subject_line=(noun, ", ".join(labels), f"by istar {version('istar')}"),
        generator=content.kind.generator,
        summary=_count(content),
        sections=_make_sections(content, sheets, out),
    )
    return page_folder.write(out, {**contents, **page_folder.page_files(page, sheets)}, content.kind)


def _count(content: PageContent) -> list[tuple[str, str]]:
    """Return the key figures of a page; those that differ between models are left out."""
    numbers = {f"{content.words['subject']}s": len(content.labels)} if len(content.labels) > 1 else {}
    if content.trainings:
        noun = "readings" if any(training.is_monitored for training in content.trainings) else "checkpoints"
        numbers[noun] = sum(len(training.steps) for training in content.trainings)
    numbers_of_models = [
        {
            model.words["units"]: model.num_points,
            "texts": len(model.measurements.settings.get("texts", {})),
            model.words["states"]: len(model.layers) - 1 if content.is_of_texts else len(model.measurements.all_texts),
            "dimensions": model.width,
            "tokens in the vocabulary": model.measurements.matrices.get("input", {}).get("raw", {}).get("rows", 0),
        }
        for model in content.models
    ]
    if numbers_of_models:
        first, *others = numbers_of_models
        numbers |= {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
    if not content.is_of_texts:
        numbers = {name: value for name, value in numbers.items() if value}
    return [(f"{number:,}", noun.removesuffix("s") if number == 1 else noun) for noun, number in numbers.items()]


def _build_sheets(content: PageContent) -> list[Sheet]:
    models, detailed, sheets = content.models, content.detailed_models, []
    if len(content.trainings) > 1:
        sheets.append(model_tables.build_training_sheet(content.trainings))
    elif content.kind is not MODEL_KIND and content.is_of_texts:
        sheets.append(model_tables.build_model_sheet(models, "checkpoint" if content.trainings else "model"))
    if not content.trainings:
        sheets.append(model_tables.build_layer_sheet(models))
    if len(models) > 1:
        sheets.append(model_tables.build_difference_sheet(detailed))
    if content.similarities:
        sheets.append(model_tables.build_similarity_sheet(content.similarities, content.words))
    if models:
        sheets += [model_tables.join_sheets(detailed, build) for build in model_tables.MODEL_SHEET_BUILDERS]
    # The page of a text model names what is missing. Other models cannot have it.
    shown = [sheet for sheet in sheets if sheet.rows or (content.is_of_texts and sheet.name != "gaps")]
    return [fold_columns(sheet) if sheet.name in ("models", "layers", "differences") else sheet for sheet in shown]


def _make_plots(content: PageContent) -> list[Plot]:
    models, detailed = content.models, content.detailed_models
    width = max((model.measurements.width for model in models), default=0)
    plots = [model_figures.plot_differences(detailed)] if len(models) > 1 else []
    plots += axis_figures.plot_measures(content.axis, width)
    plots += model_figures.plot_states(detailed, content.axis.ordered)
    plots += axis_figures.plot_parameters(models, content.trainings, content.axis)
    if content.kind is MODEL_KIND:
        plots += model_figures.plot_matrices(models[0].measurements)
    if content.similarities is not None:
        plots.append(model_figures.plot_similarity(content.similarities, content.words))
    return [plot for plot in plots if plot.panels or content.is_of_texts]


def _make_sections(content: PageContent, sheets: Mapping[str, Sheet], out: Path) -> list[Section]:
    remaining = dict(sheets)
    described_models = list_last_checkpoints(content.trainings) if content.trainings else content.models
    tables = [_make_table_section(remaining.pop(name)) for name in ("models", "layers") if name in remaining]
    figures: dict[str, Section] = {}
    plots = _make_plots(content)
    pictures = render_pictures(plots, out / page_folder.FIGURES)
    for plot in plots:
        about = [plot.caption]
        if plot.name == "differences":
            about += describe_error_methods(content.detailed_models)
        # The table of the matrices belongs to the figure of I(W), but has more measures.
        sheet = remaining.pop("matrices" if plot.name == "partition" else plot.name, None)
        note = _explain_missing_panels(plot) if content.is_of_texts else ""
        figures[plot.name] = Section(plot.name, plot.title, (), sheet, pictures[plot.name], note, about=about)
    overview = [figures.pop(_OVERVIEW)] if _OVERVIEW in figures else []
    sections = [
        Section("findings", "What stands out", findings.describe_findings(described_models, content.trainings)),
        *overview,
        Section("reading", "How to read this", content.notes, about=_explain_page(content), link=_DEFINITIONS),
        *tables,
        *figures.values(),
    ]
    sections += map(_make_table_section, remaining.values())
    sections.append(Section("measures", "Definitions of the measures", about=_define_measures(content.models)))
    if content.command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[content.command]))
    return sections


def _make_table_section(sheet: Sheet) -> Section:
    empty_note = "" if sheet.rows else f"{TEXTS['missing'].get(sheet.name, 'Not measured')}."
    return Section(f"table-{sheet.name}", sheet.title, (), sheet, empty_note=empty_note, is_wide=True)


def _explain_missing_panels(plot: Plot) -> str:
    missing = ", ".join(model_figures.find_missing_measures(plot))
    if plot.panels and not missing:
        return ""
    text = TEXTS["missing"].get(
        plot.name, "Not measured, which may need the setting measures=all, or not defined in any layer"
    )
    return f"{text}: {missing}." if missing else f"{text}."


def _explain_page(content: PageContent) -> list[str]:
    texts, paragraphs = TEXTS["reading"], []
    if content.models and content.is_of_texts:
        settings = content.models[0].measurements.settings
        documents, tokens = settings["documents"], settings["special_tokens"]
        paragraphs.append(f"{texts[f'documents_{documents}']} {texts[f'tokens_{tokens}']}")
    axis_note = texts.get(content.axis.name.replace(" ", "_"), texts["step"])
    isotropy = texts["isotropy"].format_map(content.words)
    return [*paragraphs, axis_note, isotropy, _explain_intervals(content)]


def _define_measures(models: Sequence[MeasuredModel]) -> list[str]:
    names = set().union(*(model.last_layer_measures for model in models))
    names |= set().union(*(forms["raw"] for model in models for forms in model.measurements.matrices.values()))
    return [
        f"{measure.title}, {measure.range}: {measure.formula}; {measure.convention}. Blind to {measure.blind_to}."
        + (f" {measure.paper[0].upper()}{measure.paper[1:]}." if measure.paper else "")
        for measure in MEASURES
        if measure.name in names or not models
    ]


def _explain_intervals(content: PageContent) -> str:
    if content.models and not any(model.has_errors for model in content.models):
        return str(TEXTS["reading"]["no_intervals"]).format_map(content.words)
    if any(training.is_monitored for training in content.trainings):
        return str(TEXTS["reading"]["intervals_monitored"])
    groups = {model.num_groups for model in content.models} - {0} or {ASSUMED_GROUPS}
    quantiles = list_names([f"{t_quantile(count - 1):.2f} for {count} groups" for count in sorted(groups)])
    return str(TEXTS["reading"]["intervals"].format(**content.words, quantiles=quantiles))


def describe_error_methods(models: Sequence[MeasuredModel]) -> list[str]:
    """Return sentences on how the differences from the first model got their errors, or why there are none."""
    first, *others = models
    labels_by_method: dict[str, list[str]] = {}
    sentences = []
    for other in others:
        if reason := compare.explain_no_differences(first, other):
            sentences.append(reason)
        else:
            method = compare.choose_error_method(first, other)
            has_ids = compare.have_same_texts(first, other)
            labels_by_method.setdefault(method if has_ids else "no_ids", []).append(other.label)
    return sentences + [
        TEXTS["reading"][method].format(**first.words, others=list_names(labels), first=first.label)
        for method, labels in labels_by_method.items()
    ]
