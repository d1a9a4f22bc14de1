"""Specifications of all tasks: their data, labels and metrics, in the table `TASKS`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["classification", "regression", "span", "causal_lm", "masked_lm"]
Files = Literal["", "tsv", "trees", "squad", "text"]


@dataclass(frozen=True)
class Split:
    """A validation or test set."""

    name: str  # name of the split on the hub, e.g. `validation_matched`
    suffix: str = ""  # appended to metric names if a task has several such sets, e.g. `accuracy_mismatched`
    submission: str = ""  # file name of the GLUE submission for a test set; empty if there is none
    # For a set shipped separately from the others: its paths without suffix relative to their folder, and its
    # configuration and split on the hub. If such a set is missing, a submission omits it with a warning.
    stems: tuple[str, ...] = ()
    hub: tuple[str, str] | None = None

    @property
    def is_shipped_separately(self) -> bool:
        return bool(self.stems)


HELD_OUT = Split("held_out", suffix="held_out")
"""The held-out part of the training data that selects the best epoch if `task.validation_fraction` is set."""


@dataclass(frozen=True)
class TaskSpec:
    """Specification of one task."""

    name: str  # value of `task` on the command line
    text_columns: tuple[str, ...]  # names on the hub of the one or two text columns; question and context for spans
    kind: Kind = "classification"  # `span` is extractive question answering, `_lm` is language modelling
    metrics: tuple[str, ...] = ("accuracy",)  # keys of `istar.finetune.tasks.metrics.METRICS`
    headline: str = "accuracy"  # metric that is reported in tables, see also `selection_metric`
    labels: tuple[str, ...] = ()  # class names in the order of their ids; empty for regression and spans
    hub: tuple[str, str | None] | None = None  # data set and configuration on the hub; None for generated tasks
    label_column: str = "label"  # name on the hub
    train: str = "train"  # name of the training split on the hub
    validation: tuple[Split, ...] = (Split("validation"),)  # the headline metric uses the first set
    test: tuple[Split, ...] = ()  # test sets, without labels, for submissions
    files: Files = ""  # format of local files: GLUE's TSV, Penn Treebank trees, SQuAD's JSON or plain text
    folders: tuple[str, ...] = ()  # subfolders of `task.data_dir` that may contain these files
    tsv_columns: Mapping[str, str] = field(default_factory=dict)  # names on the hub -> names in GLUE's TSV files
    tsv_header: tuple[str, ...] = ()  # columns of training and validation TSV files without a header line
    max_length: int = 128  # default sequence length in tokens
    submit_labels: bool = False  # whether a GLUE submission contains class names instead of ids

    @property
    def is_language_modelling(self) -> bool:
        """Whether the model predicts tokens of the text itself."""
        return self.kind in ("causal_lm", "masked_lm")

    @property
    def splits(self) -> list[str]:
        return [self.train, *(split.name for split in (*self.validation, *self.test))]

    @property
    def selection_set(self) -> Split:
        """The set that selects the best epoch: the held-out data if any, else the first validation set."""
        return HELD_OUT if HELD_OUT in self.validation else self.validation[0]

    @property
    def selection_metric(self) -> str:
        """Name of the metric that selects the best epoch: the headline metric on `selection_set`."""
        return "_".join(filter(None, (self.headline, self.selection_set.suffix)))

    def stems(self, split: str) -> tuple[str, ...]:
        """Return the file names without suffix that a split may have; `dev` may stand for `validation`."""
        separate_stems = [stem for test in self.test if test.name == split for stem in test.stems]
        return tuple(dict.fromkeys((split, split.replace("validation", "dev"), *separate_stems)))

    def is_test(self, split: str) -> bool:
        """Return whether a split is a test set, which may lack labels."""
        return any(split == test.name for test in self.test)


def _make_glue_spec(
    name: str, folder: str, text_columns: Mapping[str, str], label: str = "label", **settings: Any
) -> TaskSpec:
    settings.setdefault("test", (Split("test", submission=f"{folder}.tsv"),))
    return TaskSpec(
        name, hub=("nyu-mll/glue", name), text_columns=tuple(text_columns), files="tsv",
        folders=(folder, f"glue_data/{folder}"), tsv_columns={**text_columns, "label": label}, **settings,
    )  # fmt: skip


_SPECS = (
    _make_glue_spec(
        "cola", "CoLA", {"sentence": "sentence"}, tsv_header=("source", "label", "mark", "sentence"),
        labels=("unacceptable", "acceptable"), metrics=("matthews_correlation", "accuracy"),
        headline="matthews_correlation",
    ),
    _make_glue_spec("sst2", "SST-2", {"sentence": "sentence"}, labels=("negative", "positive")),
    _make_glue_spec(
        "mrpc", "MRPC", {"sentence1": "#1 String", "sentence2": "#2 String"}, label="Quality",
        labels=("not_equivalent", "equivalent"), metrics=("accuracy", "f1"),
    ),
    _make_glue_spec(
        "stsb", "STS-B", {"sentence1": "sentence1", "sentence2": "sentence2"}, label="score", kind="regression",
        metrics=("pearson", "spearman"), headline="pearson",
    ),
    _make_glue_spec(
        "qqp", "QQP", {"question1": "question1", "question2": "question2"}, label="is_duplicate",
        labels=("not_duplicate", "duplicate"), metrics=("accuracy", "f1"),
    ),
    _make_glue_spec(
        "mnli", "MNLI", {"premise": "sentence1", "hypothesis": "sentence2"}, label="gold_label",
        labels=("entailment", "neutral", "contradiction"), submit_labels=True,
        validation=(Split("validation_matched"), Split("validation_mismatched", suffix="mismatched")),
        test=(
            Split("test_matched", submission="MNLI-m.tsv"),
            Split("test_mismatched", suffix="mismatched", submission="MNLI-mm.tsv"),
            # GLUE's diagnostic set, for models that were trained on MNLI.
            Split(
                "ax", suffix="ax", submission="AX.tsv", stems=("AX", "../AX/AX", "../diagnostic/diagnostic"),
                hub=("ax", "test"),
            ),
        ),
    ),
    _make_glue_spec(
        "qnli", "QNLI", {"question": "question", "sentence": "sentence"}, labels=("entailment", "not_entailment"),
        submit_labels=True,
    ),
    _make_glue_spec(
        "rte", "RTE", {"sentence1": "sentence1", "sentence2": "sentence2"}, labels=("entailment", "not_entailment"),
        max_length=256, submit_labels=True,
    ),
    _make_glue_spec(
        "wnli", "WNLI", {"sentence1": "sentence1", "sentence2": "sentence2"}, labels=("not_entailment", "entailment")
    ),
    TaskSpec(
        "sst5", text_columns=("text",), labels=("very negative", "negative", "neutral", "positive", "very positive"),
        hub=("SetFit/sst5", None), test=(Split("test"),), files="trees", folders=("trees", "sst/trees"),
    ),
    TaskSpec(
        "squad", kind="span", text_columns=("question", "context"), metrics=("squad",), headline="f1",
        hub=("rajpurkar/squad", None), files="squad", label_column="answers", max_length=384,
    ),
    TaskSpec(
        "demo", text_columns=("sentence1", "sentence2"), labels=("disagree", "agree"), metrics=("accuracy", "f1"),
        test=(Split("test"),), max_length=64,
    ),
    TaskSpec(
        "demo_sentence", text_columns=("sentence",), labels=("negative", "positive"),
        metrics=("accuracy", "matthews_correlation"), test=(Split("test"),), max_length=64,
    ),
    TaskSpec(
        "demo_regression", kind="regression", text_columns=("sentence1", "sentence2"), metrics=("pearson", "spearman"),
        headline="pearson", test=(Split("test"),), max_length=64,
    ),
    TaskSpec(
        "demo_span", kind="span", text_columns=("question", "context"), metrics=("squad",), headline="f1",
        label_column="answers", max_length=64,
    ),
)  # fmt: skip


def _make_language_modelling_specs(name: str, kind: Kind, metrics: tuple[str, ...]) -> list[TaskSpec]:
    task = TaskSpec(
        name, text_columns=("text",), kind=kind, metrics=metrics, headline="perplexity", files="text", max_length=128
    )
    hub = "Salesforce/wikitext"
    wikitext2 = replace(task, name=f"{name}_wikitext2", hub=(hub, "wikitext-2-raw-v1"))
    return [task, wikitext2, replace(task, name=f"{name}_wikitext103", hub=(hub, "wikitext-103-raw-v1"))]


_LANGUAGE_MODELLING_SPECS = (
    *_make_language_modelling_specs("clm", "causal_lm", ("perplexity", "loss")),
    *_make_language_modelling_specs("mlm", "masked_lm", ("perplexity", "loss", "accuracy")),
)

TASKS: dict[str, TaskSpec] = {spec.name: spec for spec in (*_SPECS, *_LANGUAGE_MODELLING_SPECS)}
