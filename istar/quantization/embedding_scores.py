"""`istar quantize --embeddings`: sentence embeddings in float32, int8 and one bit on pairs with similarity scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from istar.drawing import page_folder
from istar.drawing.page import Page, Section
from istar.drawing.page_folder import PageKind
from istar.drawing.page_tables import Entry, Sheet, numeric_entries
from istar.errors import UserError, did_you_mean
from istar.finetune.tasks.features import limit_max_length
from istar.finetune.tasks.loading import load_splits
from istar.finetune.tasks.metrics import spearman
from istar.inputs.pretrained import load_encoder, load_tokenizer
from istar.measures import isoscore
from istar.quantization.sentence_codes import (
    dimension_ranges,
    hamming_distance,
    int8_codes,
    int8_values,
    mean_pooled,
    signs,
)
from istar.records.config import ModelConfig
from istar.records.task_specs import TASKS, TaskSpec

KIND = PageKind("page of quantized embeddings", "istar quantize --embeddings")
BITS_PER_DIMENSION = {"float32": 32, "int8": 8, "binary": 1}
"""Number of bits per dimension by the precision of the embeddings."""
_BATCH_SIZE = 64
_HOW_TO_READ = (
    "An embedding is the mean of the last hidden states of a sentence's tokens. The score is Spearman's rank "
    "correlation of the similarity of two embeddings with the similarity that people gave them.",
    "int8 has 256 levels between the smallest and the largest value of each dimension over training sentences; its "
    "similarity is the cosine of the values of these levels. binary is the sign of each dimension; its similarity is "
    "the number of equal bits.",
)


@dataclass(frozen=True)
class EmbeddingScores:
    """How well an encoder's sentence embeddings predict human similarity scores, at each precision.

    Attributes:
        encoder_name: path of the encoder's folder, as it was given.
        num_dimensions: width of its embeddings.
        num_pairs: number of pairs of sentences.
        spearman_by_precision: Spearman's correlation, in [-1, 1], for each key of `BITS_PER_DIMENSION`.
        isoscore: IsoScore of the validation sentences' embeddings in float32; None if they are all equal.
    """

    encoder_name: str
    num_dimensions: int
    num_pairs: int
    spearman_by_precision: dict[str, float]
    isoscore: float | None


def get_similarity_task(name: str) -> TaskSpec:
    """Return the named task, whose examples must be pairs of sentences with similarity scores.

    Raises:
        UserError: if there is no such task, or its examples are of another kind.
    """
    spec = TASKS.get(name)
    if spec is None:
        raise UserError(f"--task {name} is not known{did_you_mean(name, TASKS)}; expected stsb for --embeddings")
    if spec.kind != "regression" or len(spec.text_columns) != 2:
        raise UserError(f"--task {name} has no pairs of sentences with similarity scores; expected stsb")
    return spec


def score_embeddings(
    encoder_folder: Path,
    spec: TaskSpec,
    data_dir: Path | None,
    num_calibration_pairs: int,
    seed: int,
    console: Console | None = None,
) -> EmbeddingScores:
    """Score the sentence embeddings of an encoder in float32, int8 and one bit on the validation pairs of a task.

    Args:
        encoder_folder: folder of a training run, or of a model that `save_pretrained` wrote; a head is ignored.
        spec: a task that `get_similarity_task` accepts.
        data_dir: folder of the task's data; None for the Hugging Face hub, or generated data.
        num_calibration_pairs: number of random training pairs from which the int8 ranges are computed.
        seed: random seed for the choice of these pairs.
        console: shows a progress bar; None shows none.

    Raises:
        UserError: if the model or the data cannot be loaded.
    """
    has_run_layout = (encoder_folder / "model" / "config.json").is_file()
    model_folder = encoder_folder / "model" if has_run_layout else encoder_folder
    splits = load_splits(spec, data_dir, [spec.train, spec.validation[0].name])
    train_pairs, validation_pairs = splits[spec.train], splits[spec.validation[0].name]
    shuffled_indices = torch.randperm(len(train_pairs), generator=torch.Generator().manual_seed(seed))
    calibration_pairs = train_pairs.select(sorted(shuffled_indices[:num_calibration_pairs].tolist()))
    config = ModelConfig(name=str(model_folder))
    tokenizer = load_tokenizer(config)
    model = load_encoder(config, tokenizer, torch.float32)
    max_length = limit_max_length(tokenizer, model.config, spec.max_length)

    def embed_pairs(examples: Any, description: str) -> list[Tensor]:
        """Return the embeddings of the first sentences and those of the second sentences."""
        first_sentences, second_sentences = (list(examples[column]) for column in spec.text_columns)
        embeddings = _embed_texts(
            model, tokenizer, [*first_sentences, *second_sentences], max_length, description, console
        )
        return list(embeddings.split(len(first_sentences)))

    ranges = dimension_ranges(torch.cat(embed_pairs(calibration_pairs, "training sentences")))
    first, second = embed_pairs(validation_pairs, "validation sentences")
    int8_first, int8_second = (int8_values(int8_codes(embeddings, ranges), ranges) for embeddings in (first, second))
    similarities_by_precision = {
        "float32": _compute_rounded_cosines(first, second),
        "int8": _compute_rounded_cosines(int8_first, int8_second),
        "binary": -hamming_distance(signs(first), signs(second)).double(),
    }
    human_scores = [float(score) for score in validation_pairs[spec.label_column]]
    spearman_by_precision = {
        precision: spearman(similarities.tolist(), human_scores)["spearman"]
        for precision, similarities in similarities_by_precision.items()
    }
    try:
        isoscore_value = float(isoscore(torch.cat([first, second])))
    except UserError:
        # All embeddings are equal.
        isoscore_value = None
    return EmbeddingScores(str(encoder_folder), first.shape[1], len(first), spearman_by_precision, isoscore_value)


def _compute_rounded_cosines(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine similarity of each pair of rows, `(n,)`, rounded to 9 decimals.

    Rounding makes the cosines of identical sentences equal. STS-B has several such pairs, whose ranks would otherwise
    depend on rounding errors.
    """
    return functional.cosine_similarity(first, second, dim=1).round(decimals=9)


@torch.inference_mode()
def _embed_texts(
    model: Any, tokenizer: Any, texts: Sequence[str], max_length: int, description: str, console: Console | None
) -> Tensor:
    """Return the mean-pooled embedding of each text in float64, `(n, d)`, in the order of the texts."""
    longest_first_indices = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    starts = range(0, len(texts), _BATCH_SIZE)
    is_hidden = console is None or not console.is_terminal
    batches = []
    for start in track(starts, escape(description), console=console, transient=True, disable=is_hidden):
        batch_texts = [texts[index] for index in longest_first_indices[start : start + _BATCH_SIZE]]
        inputs = tokenizer(batch_texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        states = model(**inputs).last_hidden_state
        batches.append(mean_pooled(states.double(), inputs["attention_mask"]))
    sorted_embeddings = torch.cat(batches)
    embeddings = torch.empty_like(sorted_embeddings)
    embeddings[longest_first_indices] = sorted_embeddings
    return embeddings


def build_embedding_sheet(encoder_scores: Sequence[EmbeddingScores], spec: TaskSpec) -> Sheet:
    """Return a table with one row per encoder and precision, grouped by encoder."""
    records = [
        {
            "model": scores.encoder_name, "form": precision,
            "bits": BITS_PER_DIMENSION[precision] * scores.num_dimensions, "pairs": scores.num_pairs,
            "spearman": 100 * correlation, "drop": 100 * (scores.spearman_by_precision["float32"] - correlation),
            "isoscore": scores.isoscore,
        }
        for scores in encoder_scores
        for precision, correlation in scores.spearman_by_precision.items()
    ]  # fmt: skip
    rows_by_encoder: dict[str, list[list[Entry]]] = {}
    for record in records:
        rows_by_encoder.setdefault(str(record["model"]), []).append(_format_row(record))
    return Sheet(
        "embeddings",
        "Sentence embeddings",
        f"Spearman's correlation (times 100) with the scores of the validation set of {spec.name}, and the drop from "
        "float32. Bits: of one embedding. IsoScore: of the float32 embeddings of the validation sentences.",
        ("form", "bits", "pairs", "Spearman", "drop", "IsoScore"),
        rows_by_encoder,
        pd.DataFrame(records),
    )


def _format_row(record: Mapping[str, Any]) -> list[Entry]:
    """Return the cells of a table row with the scores of one encoder at one precision."""
    isoscore_text = "-" if record["isoscore"] is None else f"{record['isoscore']:.4f}"
    number_texts = [
        str(record["bits"]), str(record["pairs"]), f"{record['spearman']:.2f}", f"{record['drop']:+.2f}", isoscore_text
    ]  # fmt: skip
    return [Entry(str(record["form"])), *numeric_entries(number_texts)]


def write_page(table: Sheet, out: Path, command: str = "") -> Path:
    """Write an HTML page with the table, and the table as CSV, Markdown and LaTeX; return the path of the page.

    Args:
        table: result of `build_embedding_sheet`.
        out: output folder, whose contents are replaced.
        command: command line, to show on the page.

    Raises:
        UserError: see `istar.drawing.page_folder.write`.
    """
    sections = [
        Section("reading", "How to read this", _HOW_TO_READ),
        Section("embeddings", table.title, (), table),
    ]
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    head = ("Models", ", ".join(table.rows_by_group), f"computed by istar {version('istar')}")
    page = Page("Quantized embeddings", head, KIND.generator, [(str(len(table.rows_by_group)), "models")], sections)
    return page_folder.write(out, page_folder.page_files(page, {table.name: table}), KIND)
