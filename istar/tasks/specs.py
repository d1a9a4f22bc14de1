"""Specifications of all tasks: their data, labels and metrics, in the table `TASKS`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["classification", "regression", "span"]
Files = Literal["", "tsv", "trees", "squad"]


@dataclass(frozen=True)
class Split:
    """A validation or test set.

    Attributes:
        name: name of the split on the hub, e.g. `validation_matched`.
        suffix: appended to metric names if a task has several such sets, e.g. `accuracy_mismatched`.
        submission: file name of the GLUE submission for a test set; empty if there is none.
    """

    name: str
    suffix: str = ""
    submission: str = ""


@dataclass(frozen=True)
class GlueTsv:
    """Columns of a task's tab-separated files as the GLUE benchmark ships them.

    Attributes:
        columns: column name in the file, by column name on the hub.
        header: column names of training and validation files without a header line. Test files always have one.
    """

    columns: Mapping[str, str]
    header: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskSpec:
    """Specification of one task.

    Attributes:
        name: value of `task` on the command line.
        kind: `classification`, `regression` or `span` (extractive question answering).
        text_columns: names on the hub of the one or two text columns; question and context for spans.
        labels: class names in the order of their ids; empty for regression and spans.
        metrics: keys of `istar.tasks.metrics.METRICS`.
        headline: metric that selects the best epoch and is reported in tables; higher is better.
        hub: data set and configuration on the Hugging Face hub; None for generated tasks.
        label_column: name of the label column on the hub.
        train: name of the training split on the hub.
        validation: validation sets; the headline metric is that of the first set.
        test: test sets, without labels, for submissions.
        files: format in which the authors of the task ship it: GLUE's TSV, Penn Treebank trees or SQuAD's JSON.
        folders: subfolders of `task.data_dir` that may contain these files.
        tsv: columns of GLUE's files.
        max_length: default sequence length in tokens.
        submit_labels: whether a GLUE submission contains class names instead of ids.
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

    @property
    def splits(self) -> list[str]:
        """Names of all splits: training, validation and test."""
        return [self.train, *(split.name for split in (*self.validation, *self.test))]

    def is_test(self, split: str) -> bool:
        """Return whether a split is a test set, which may lack labels."""
        return any(split == test.name for test in self.test)


def _glue(
    name: str, folder: str, columns: Mapping[str, str], header: tuple[str, ...] = (), **settings: Any
) -> TaskSpec:
    """Return the specification of a GLUE task.

    Args:
        name: name of the task.
        folder: folder of its files, which is also the name of its submission file.
        columns: see `GlueTsv`.
        header: see `GlueTsv`.
        **settings: further fields of `TaskSpec`.
    """
    defaults = {"kind": "classification", "test": (Split("test", submission=f"{folder}.tsv"),)}
    return TaskSpec(
        name=name,
        hub=("nyu-mll/glue", name),
        files="tsv",
        folders=(folder, f"glue_data/{folder}"),
        tsv=GlueTsv(columns, header),
        **{**defaults, **settings},
    )


_ENTAILMENT = ("entailment", "not_entailment")

_SPECS = (
    _glue(
        "cola",
        "CoLA",
        {"sentence": "sentence", "label": "label"},
        header=("source", "label", "mark", "sentence"),
        text_columns=("sentence",),
        labels=("unacceptable", "acceptable"),
        metrics=("matthews_correlation", "accuracy"),
        headline="matthews_correlation",
    ),
    _glue(
        "sst2",
        "SST-2",
        {"sentence": "sentence", "label": "label"},
        text_columns=("sentence",),
        labels=("negative", "positive"),
        metrics=("accuracy",),
        headline="accuracy",
    ),
    _glue(
        "mrpc",
        "MRPC",
        {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
        text_columns=("sentence1", "sentence2"),
        labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        headline="accuracy",
    ),
    _glue(
        "stsb",
        "STS-B",
        {"sentence1": "sentence1", "sentence2": "sentence2", "label": "score"},
        kind="regression",
        text_columns=("sentence1", "sentence2"),
        metrics=("pearson", "spearman"),
        headline="pearson",
    ),
    _glue(
        "qqp",
        "QQP",
        {"question1": "question1", "question2": "question2", "label": "is_duplicate"},
        text_columns=("question1", "question2"),
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
        headline="accuracy",
    ),
    _glue(
        "mnli",
        "MNLI",
        {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
        text_columns=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        headline="accuracy",
        validation=(Split("validation_matched"), Split("validation_mismatched", suffix="mismatched")),
        test=(
            Split("test_matched", submission="MNLI-m.tsv"),
            Split("test_mismatched", suffix="mismatched", submission="MNLI-mm.tsv"),
        ),
        submit_labels=True,
    ),
    _glue(
        "qnli",
        "QNLI",
        {"question": "question", "sentence": "sentence", "label": "label"},
        text_columns=("question", "sentence"),
        labels=_ENTAILMENT,
        metrics=("accuracy",),
        headline="accuracy",
        submit_labels=True,
    ),
    _glue(
        "rte",
        "RTE",
        {"sentence1": "sentence1", "sentence2": "sentence2", "label": "label"},
        text_columns=("sentence1", "sentence2"),
        labels=_ENTAILMENT,
        metrics=("accuracy",),
        headline="accuracy",
        max_length=256,
        submit_labels=True,
    ),
    _glue(
        "wnli",
        "WNLI",
        {"sentence1": "sentence1", "sentence2": "sentence2", "label": "label"},
        text_columns=("sentence1", "sentence2"),
        labels=("not_entailment", "entailment"),
        metrics=("accuracy",),
        headline="accuracy",
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
