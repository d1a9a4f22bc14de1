"""What each task is: one table of frozen specs, read by everything that loads, trains or scores."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["classification", "regression", "span"]
Files = Literal["", "tsv", "trees", "squad"]


@dataclass(frozen=True)
class Split:
    """A validation or test set.

    Attributes:
        name: the hub's name of the split, e.g. `validation_matched`.
        suffix: stands behind a metric's name where a task has several sets: `accuracy_mismatched`.
        submission: official file name of the GLUE submission for a test set, `""` where there is none.
    """

    name: str
    suffix: str = ""
    submission: str = ""


@dataclass(frozen=True)
class GlueTsv:
    """How the benchmark ships a task as tab-separated files.

    Attributes:
        columns: the hub's column name -> the file's column name.
        header: column names of files that ship without a header line (training and validation files only;
            the test files always have one).
    """

    columns: Mapping[str, str]
    header: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskSpec:
    """One task, complete.

    Attributes:
        name: as in `task=<name>`.
        kind: `classification`, `regression` or `span` (extractive question answering).
        text_columns: the hub's names of one or two text columns; question and context for spans.
        labels: class names in the order of their ids; empty for regression and spans.
        metrics: names in `istar.tasks.metrics.METRICS`.
        headline: the metric that chooses the best epoch and stands in tables; higher is better.
        hub: data set and configuration on the Hugging Face hub; None for generated tasks.
        label_column: the hub's name of the label column.
        train: the hub's name of the training split.
        validation: validation sets; the first one's headline metric counts.
        test: unlabelled sets for submissions.
        files: format in which the task's authors ship it: GLUE's TSV, PTB trees, SQuAD's JSON.
        folders: subfolders of `task.data_dir` in which these files may stand.
        tsv: the columns of GLUE's files.
        max_length: default sequence length in tokens.
        submit_labels: whether a GLUE submission wants class names rather than ids.
    """

    name: str
    kind: Kind
    text_columns: tuple[str, ...]
    metrics: tuple[str, ...]
    headline: str
    labels: tuple[str, ...] = ()
    hub: tuple[str, str | None] | None = None
    label_column: str = "label"
    train: str = "train"
    validation: tuple[Split, ...] = (Split("validation"),)
    test: tuple[Split, ...] = ()
    files: Files = ""
    folders: tuple[str, ...] = ()
    tsv: GlueTsv | None = field(default=None, repr=False)
    max_length: int = 128
    submit_labels: bool = False


_GLUE = "nyu-mll/glue"
_ENTAILMENT = ("entailment", "not_entailment")


def _columns(*same: str, **renamed: str) -> dict[str, str]:
    return {**{name: name for name in same}, **renamed}


_SPECS = (
    TaskSpec(
        name="cola",
        kind="classification",
        text_columns=("sentence",),
        labels=("unacceptable", "acceptable"),
        metrics=("matthews_correlation", "accuracy"),
        headline="matthews_correlation",
        hub=(_GLUE, "cola"),
        test=(Split("test", submission="CoLA.tsv"),),
        files="tsv",
        folders=("CoLA", "glue_data/CoLA"),
        tsv=GlueTsv(_columns("sentence", "label"), header=("source", "label", "mark", "sentence")),
    ),
    TaskSpec(
        name="sst2",
        kind="classification",
        text_columns=("sentence",),
        labels=("negative", "positive"),
        metrics=("accuracy",),
        headline="accuracy",
        hub=(_GLUE, "sst2"),
        test=(Split("test", submission="SST-2.tsv"),),
        files="tsv",
        folders=("SST-2", "glue_data/SST-2"),
        tsv=GlueTsv(_columns("sentence", "label")),
    ),
    TaskSpec(
        name="mrpc",
        kind="classification",
        text_columns=("sentence1", "sentence2"),
        labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        headline="accuracy",
        hub=(_GLUE, "mrpc"),
        test=(Split("test", submission="MRPC.tsv"),),
        files="tsv",
        folders=("MRPC", "glue_data/MRPC"),
        tsv=GlueTsv({"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"}),
    ),
    TaskSpec(
        name="stsb",
        kind="regression",
        text_columns=("sentence1", "sentence2"),
        metrics=("pearson", "spearman"),
        headline="pearson",
        hub=(_GLUE, "stsb"),
        test=(Split("test", submission="STS-B.tsv"),),
        files="tsv",
        folders=("STS-B", "glue_data/STS-B"),
        tsv=GlueTsv(_columns("sentence1", "sentence2", label="score")),
    ),
    TaskSpec(
        name="qqp",
        kind="classification",
        text_columns=("question1", "question2"),
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
        headline="accuracy",
        hub=(_GLUE, "qqp"),
        test=(Split("test", submission="QQP.tsv"),),
        files="tsv",
        folders=("QQP", "glue_data/QQP"),
        tsv=GlueTsv(_columns("question1", "question2", label="is_duplicate")),
    ),
    TaskSpec(
        name="mnli",
        kind="classification",
        text_columns=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        headline="accuracy",
        hub=(_GLUE, "mnli"),
        validation=(Split("validation_matched"), Split("validation_mismatched", suffix="mismatched")),
        test=(
            Split("test_matched", submission="MNLI-m.tsv"),
            Split("test_mismatched", suffix="mismatched", submission="MNLI-mm.tsv"),
        ),
        files="tsv",
        folders=("MNLI", "glue_data/MNLI"),
        tsv=GlueTsv({"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}),
        submit_labels=True,
    ),
    TaskSpec(
        name="qnli",
        kind="classification",
        text_columns=("question", "sentence"),
        labels=_ENTAILMENT,
        metrics=("accuracy",),
        headline="accuracy",
        hub=(_GLUE, "qnli"),
        test=(Split("test", submission="QNLI.tsv"),),
        files="tsv",
        folders=("QNLI", "glue_data/QNLI"),
        tsv=GlueTsv(_columns("question", "sentence", "label")),
        submit_labels=True,
    ),
    TaskSpec(
        name="rte",
        kind="classification",
        text_columns=("sentence1", "sentence2"),
        labels=_ENTAILMENT,
        metrics=("accuracy",),
        headline="accuracy",
        hub=(_GLUE, "rte"),
        test=(Split("test", submission="RTE.tsv"),),
        files="tsv",
        folders=("RTE", "glue_data/RTE"),
        tsv=GlueTsv(_columns("sentence1", "sentence2", "label")),
        max_length=256,
        submit_labels=True,
    ),
    TaskSpec(
        name="wnli",
        kind="classification",
        text_columns=("sentence1", "sentence2"),
        labels=("not_entailment", "entailment"),
        metrics=("accuracy",),
        headline="accuracy",
        hub=(_GLUE, "wnli"),
        test=(Split("test", submission="WNLI.tsv"),),
        files="tsv",
        folders=("WNLI", "glue_data/WNLI"),
        tsv=GlueTsv(_columns("sentence1", "sentence2", "label")),
    ),
    TaskSpec(
        name="sst5",
        kind="classification",
        text_columns=("text",),
        labels=("very negative", "negative", "neutral", "positive", "very positive"),
        metrics=("accuracy",),
        headline="accuracy",
        hub=("SetFit/sst5", None),
        test=(Split("test"),),
        files="trees",
        folders=("trees", "sst/trees"),
    ),
    TaskSpec(
        name="squad",
        kind="span",
        text_columns=("question", "context"),
        metrics=("squad",),
        headline="f1",
        hub=("rajpurkar/squad", None),
        files="squad",
        label_column="answers",
        max_length=384,
    ),
    TaskSpec(
        name="demo",
        kind="classification",
        text_columns=("sentence1", "sentence2"),
        labels=("disagree", "agree"),
        metrics=("accuracy", "f1"),
        headline="accuracy",
        test=(Split("test"),),
        max_length=64,
    ),
    TaskSpec(
        name="demo_sentence",
        kind="classification",
        text_columns=("sentence",),
        labels=("negative", "positive"),
        metrics=("accuracy", "matthews_correlation"),
        headline="accuracy",
        test=(Split("test"),),
        max_length=64,
    ),
    TaskSpec(
        name="demo_regression",
        kind="regression",
        text_columns=("sentence1", "sentence2"),
        metrics=("pearson", "spearman"),
        headline="pearson",
        test=(Split("test"),),
        max_length=64,
    ),
    TaskSpec(
        name="demo_span",
        kind="span",
        text_columns=("question", "context"),
        metrics=("squad",),
        headline="f1",
        label_column="answers",
        max_length=64,
    ),
)

TASKS: dict[str, TaskSpec] = {spec.name: spec for spec in _SPECS}
