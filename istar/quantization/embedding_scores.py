"""`istar quantize --embeddings`: sentence embeddings in float32, int8 and one bit on pairs with similarity scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from istar.config import ModelConfig
from istar.errors import UserError, did_you_mean
from istar.measures import isoscore
from istar.models import load_encoder, load_tokenizer
from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Section
from istar.pages.sheets import Entry, Sheet
from istar.quantization.sentence_codes import (
    dimension_ranges,
    hamming_distance,
    int8_codes,
    int8_values,
    mean_pooled,
    signs,
)
from istar.tasks.features import max_length_for
from istar.tasks.loading import load_splits
from istar.tasks.metrics import spearman
from istar.tasks.specs import TASKS, TaskSpec

KIND = PageKind("page of quantized embeddings", "istar quantize --embeddings")
FORMS = {"float32": 32, "int8": 8, "binary": 1}
"""Forms of embeddings, and their bits for each dimension."""
_BATCH = 64
_READING = (
    "An embedding is the mean of the last hidden states of a sentence's tokens. The score is Spearman's rank "
    "correlation of the similarity of two embeddings with the similarity that people gave them.",
    "int8 has 256 levels between the smallest and the largest value of each dimension over training sentences; its "
    "similarity is the cosine of the values of these levels. binary is the sign of each dimension; its similarity is "
    "the number of equal bits.",
)


@dataclass(frozen=True)
class EmbeddingScores:
    """Scores of one encoder.

    Attributes:
        name: the encoder, as it was given.
        dimensions: width of its embeddings.
        pairs: number of pairs of sentences.
        scores: Spearman's correlation by the form's name, in [-1, 1].
        isoscore: IsoScore of the validation sentences' embeddings in float32; None if they are all equal.
    """

    name: str
    dimensions: int
    pairs: int
    scores: dict[str, float]
    isoscore: float | None


def task_of(name: str) -> TaskSpec:
    """Return a task of pairs of sentences with similarity scores.

    Raises:
        UserError: if there is no such task, or it is of another kind.
    """
    spec = TASKS.get(name)
    if spec is None:
        raise UserError(f"--task {name} is not known{did_you_mean(name, TASKS)}; expected stsb for --embeddings")
    if spec.kind != "regression" or len(spec.text_columns) != 2:
        raise UserError(f"--task {name} has no pairs of sentences with similarity scores; expected stsb")
    return spec


def score_embeddings(
    encoder: Path, spec: TaskSpec, data_dir: Path | None, calibration: int, seed: int, console: Console | None = None
) -> EmbeddingScores:
    """Score the embeddings of an encoder on the validation pairs of a task.

    Args:
        encoder: folder of a model that `save_pretrained` wrote, or of a run; a head is left out.
        spec: the task, see `task_of`.
        data_dir: folder of its data; None for the hub, or generated data.
        calibration: number of training pairs, drawn at random, that give the ranges of int8.
        seed: seed of this choice.
        console: shows progress; None shows none.

    Raises:
        UserError: if the model or the data cannot be loaded.
    """
    name = encoder / "model" if (encoder / "model" / "config.json").is_file() else encoder
    splits = load_splits(spec, data_dir, [spec.train, spec.validation[0].name])
    train, validation = splits[spec.train], splits[spec.validation[0].name]
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:calibration]
    train = train.select(sorted(chosen.tolist()))
    config = ModelConfig(name=str(name))
    tokenizer = load_tokenizer(config)
    model = load_encoder(config, tokenizer, torch.float32)
    length = max_length_for(tokenizer, model.config, spec.max_length)

    def embed(examples: Any, description: str) -> list[Tensor]:
        columns = [list(examples[column]) for column in spec.text_columns]
        points = _embeddings(model, tokenizer, [*columns[0], *columns[1]], length, description, console)
        return list(points.split(len(columns[0])))

    ranges = dimension_ranges(torch.cat(embed(train, "training sentences")))
    first, second = embed(validation, "validation sentences")
    levels = [int8_values(int8_codes(points, ranges), ranges) for points in (first, second)]
    similarity = {
        "float32": _cosines(first, second),
        "int8": _cosines(levels[0], levels[1]),
        "binary": -hamming_distance(signs(first), signs(second)).double(),
    }
    gold = [float(score) for score in validation[spec.label_column]]
    scores = {form: spearman(values.tolist(), gold)["spearman"] for form, values in similarity.items()}
    try:
        score = float(isoscore(torch.cat([first, second])))
    except UserError:
        score = None
    return EmbeddingScores(str(encoder), first.shape[1], len(first), scores, score)


def _cosines(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine of each pair of rows, `(n,)`; those that differ by rounding errors only are equal.

    Pairs of equal sentences, of which STS-B has some, would otherwise have ranks at random.
    """
    return functional.cosine_similarity(first, second, dim=1).round(decimals=9)


@torch.inference_mode()
def _embeddings(
    model: Any, tokenizer: Any, texts: Sequence[str], length: int, description: str, console: Console | None
) -> Tensor:
    """Return the mean-pooled embedding of each text in float64, `(n, d)`, in the order of the texts."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    starts = range(0, len(texts), _BATCH)
    is_hidden = console is None or not console.is_terminal
    parts = []
    for start in track(starts, description, console=console, transient=True, disable=is_hidden):
        chosen = [texts[number] for number in order[start : start + _BATCH]]
        inputs = tokenizer(chosen, padding=True, truncation=True, max_length=length, return_tensors="pt")
        states = model(**inputs).last_hidden_state
        parts.append(mean_pooled(states.double(), inputs["attention_mask"]))
    points = torch.cat(parts)
    result = torch.empty_like(points)
    result[order] = points
    return result


def sheet(scored: Sequence[EmbeddingScores], spec: TaskSpec) -> Sheet:
    """Return a row for each encoder and form."""
    records = [
        {
            "model": item.name, "form": form, "bits": FORMS[form] * item.dimensions, "pairs": item.pairs,
            "spearman": 100 * value, "drop": 100 * (item.scores["float32"] - value), "isoscore": item.isoscore,
        }
        for item in scored
        for form, value in item.scores.items()
    ]  # fmt: skip
    groups: dict[str, list[list[Entry]]] = {}
    for record in records:
        groups.setdefault(str(record["model"]), []).append(_entries(record))
    return Sheet(
        "embeddings",
        "Sentence embeddings",
        f"Spearman's correlation (times 100) with the scores of the validation set of {spec.name}, and the drop from "
        "float32. Bits: of one embedding. IsoScore: of the float32 embeddings of the validation sentences.",
        ("form", "bits", "pairs", "Spearman", "drop", "IsoScore"),
        groups,
        pd.DataFrame(records),
    )


def _entries(record: Mapping[str, Any]) -> list[Entry]:
    score = "-" if record["isoscore"] is None else f"{record['isoscore']:.4f}"
    numbers = [str(record["bits"]), str(record["pairs"]), f"{record['spearman']:.2f}", f"{record['drop']:+.2f}", score]
    return [Entry(str(record["form"])), *(Entry(number, number=True) for number in numbers)]


def check(out: Path) -> None:
    """Refuse a folder that `write` would refuse, before models are computed.

    Raises:
        UserError: if the folder holds anything but an earlier page.
    """
    folder.check_replaceable(out, KIND)


def write(table: Sheet, out: Path, command: str = "") -> Path:
    """Write the page with its table as CSV, Markdown and LaTeX; returns the page's path.

    Raises:
        UserError: if the folder holds anything but an earlier page, or cannot be written.
    """
    sections = [
        Section("reading", "How to read this", _READING),
        Section("embeddings", table.title, (), table),
    ]
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    head = ("Models", ", ".join(table.rows_by_group), f"computed by istar {version('istar')}")
    page = Page("Quantized embeddings", head, KIND.generator, [(str(len(table.rows_by_group)), "models")], sections)
    folder.replace_folder(out, folder.page_files(page, {table.name: table}), KIND)
    return out / folder.INDEX
