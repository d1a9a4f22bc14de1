"""Tokenized features of a split, with a cache that runs share, and their collation into padded batches.

The cache stores each feature set in an Arrow file, named by a hash of all that determines the features.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import torch
import transformers
from datasets.table import InMemoryTable
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from istar.errors import UserError, shorten
from istar.files.writing import atomic_write
from istar.finetune.tasks import squad
from istar.finetune.tasks.loading import fingerprint
from istar.models.architectures import find_max_input_length
from istar.runs.tasks import TaskSpec
from istar.texts.tokenizing import convert_tokenizer_errors

MIN_LENGTH = 8  # smallest accepted maximum length of a feature, in tokens

_CACHE_VERSION = 2  # increase when the format or the features of the same inputs change
_BATCH_ROWS = 1_000
_COLUMN_TYPES: dict[str, Any] = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "attention_mask": datasets.List(datasets.Value("int8")),
    "token_type_ids": datasets.List(datasets.Value("int8")),
    "feature_id": datasets.Value("int64"),
    "example_id": datasets.Value("int64"),
    "length": datasets.Value("int32"),
    "start_positions": datasets.Value("int32"),
    "end_positions": datasets.Value("int32"),
    "offset_mapping": datasets.List(datasets.List(datasets.Value("int32"))),
}
_BATCH_COLUMNS = (*squad.INPUTS, "labels", "start_positions", "end_positions", "feature_id")

logger = logging.getLogger(__name__)


def featurize(
    spec: TaskSpec,
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    training: bool,
    doc_stride: int = 128,
    cache_dir: Path | None,
) -> datasets.Dataset:
    """Tokenize a split of a task, or load the features from the cache if an earlier run has stored them.

    Args:
        spec: specification of the task.
        dataset: the split, with the task's text columns, and labels if there are any.
        tokenizer: a fast tokenizer.
        max_length: maximum length of a feature in tokens. Longer texts are truncated, or for spans split into windows.
        training: for spans only, whether features contain answer positions; otherwise they contain offsets.
        doc_stride: for spans only, number of tokens shared by neighbouring windows; see `tokenize_windows`.
        cache_dir: folder of the cache; None keeps the features in memory.

    Returns:
        A data set with one unpadded feature per row, and the columns `input_ids`, `attention_mask`,
        `token_type_ids` (if the tokenizer produces them), `feature_id` (the row number), `example_id` (the row in
        `dataset`) and `length`. Labelled data add `labels`. Spans add `start_positions` and `end_positions` for
        training; otherwise `offset_mapping`, (-1, -1) outside the context.

    Raises a `UserError` if a gold answer does not occur at its position, or the tokenizer makes no token of a text.
    """
    rows = dataset.with_format(None).select_columns(_list_used_columns(spec, dataset, training))
    encode_batch = partial(_encode_batch, spec, tokenizer, max_length, doc_stride, training)
    if cache_dir is None:
        return _tokenize_split(spec, rows, encode_batch)
    parameters: dict[str, Any] = {"kind": spec.kind, "labels": len(spec.labels), "max_length": max_length}
    if spec.kind == "span":
        parameters |= {"training": training, "doc_stride": doc_stride}
    path = cache_dir / "features" / f"{_compute_cache_key(rows, tokenizer, parameters)}.arrow"
    return _load_or_build(path, lambda: _tokenize_split(spec, rows, encode_batch))


def limit_max_length(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, requested: int | None, default: int
) -> int:
    """Return the maximum length in tokens: `requested`, or without it `default`, lowered to what the model accepts.

    A warning is logged if the default is lowered. Raises a `UserError` if the model or the tokenizer accepts less than
    `requested`, or if the result is less than `MIN_LENGTH`.
    """
    length = default if requested is None else requested
    if length < MIN_LENGTH:
        raise UserError(f"task.max_length={length} is too short for a text; set it to at least {MIN_LENGTH} tokens")
    limit = int(min(length, tokenizer.model_max_length, find_max_input_length(config) or length))
    if limit == length:
        return length
    reason = (
        f"the model accepts at most {limit} tokens (max_position_embeddings in its config.json, model_max_length in "
        "its tokenizer_config.json)"
    )
    if limit < MIN_LENGTH:
        raise UserError(f"{reason}; at least {MIN_LENGTH} are needed")
    if requested is not None:
        raise UserError(f"task.max_length={requested}: {reason}; lower task.max_length, or leave it out")
    logger.warning("the task's default of %d tokens is lowered to %d, the most that the model accepts", default, limit)
    return limit


class TokenizedRows(Protocol):
    """Map-style dataset of the tokenized rows of a split."""

    @property
    def lengths(self) -> NDArray[Any]:
        """Number of tokens of each row: integers, `(rows,)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the features of a row by name, as used in validation."""

    def training_row(self, index: int, epoch: int) -> dict[str, Any]:
        """Return the features of a row by name, as used in training, where they may differ between epochs."""


class FeatureRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of the features that `featurize` returns, for a `DataLoader` with a `Collator`.

    Tokens are returned as NumPy views of the memory-mapped file, without the Python lists that a `datasets.Dataset`
    creates. Columns that batches do not contain are omitted.
    """

    def __init__(self, features: datasets.Dataset) -> None:
        names = [name for name in _BATCH_COLUMNS if name in features.column_names]
        # The cache stores a single chunk, so `combine_chunks` does not copy.
        table = features.select_columns(names).with_format("arrow")[:].combine_chunks()
        self._scalars = {name: table[name].to_numpy() for name in names if name not in squad.INPUTS}
        # The concatenated tokens of all rows, and the start position of each row.
        list_columns = {name: table[name].chunk(0) for name in names if name in squad.INPUTS}
        self._token_columns = {
            name: (column.values.to_numpy(), column.offsets.to_numpy()) for name, column in list_columns.items()
        }

    @property
    def lengths(self) -> NDArray[Any]:
        return np.diff(self._token_columns["input_ids"][1])

    def __len__(self) -> int:
        return len(self._scalars["feature_id"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        features = {name: scalars[index] for name, scalars in self._scalars.items()}
        for name, (tokens, starts) in self._token_columns.items():
            features[name] = tokens[starts[index] : starts[index + 1]]
        return features

    def training_row(self, index: int, epoch: int) -> dict[str, Any]:
        return self[index]


class Collator:
    """Collator that pads features to the length of the longest one, on the tokenizer's padding side, and makes tensors.

    It stores padding ids instead of the tokenizer, to be fast to pickle and safe in forked `DataLoader` workers. With
    `with_positions`, batches with padding on the left contain `position_ids`. Decoders need them, because otherwise
    they count positions from the left edge of the batch.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, with_positions: bool = False) -> None:
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"{type(tokenizer).__name__} has no padding token; set pad_token in the model's tokenizer_config.json"
            )
        self.pads_left = tokenizer.padding_side == "left"
        self.with_positions = with_positions and self.pads_left
        self.padding_ids = {
            "input_ids": int(tokenizer.pad_token_id),
            "attention_mask": 0,
            "token_type_ids": int(tokenizer.pad_token_type_id),
        }

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate feature rows into a batch.

        Returns:
            The tensors `input_ids`, `attention_mask`, `token_type_ids`, (batch, tokens) long; `labels`, (batch,)
            long or float32; `start_positions`, `end_positions`, `feature_id`, (batch,) long; each only if the rows
            contain it. Start and end positions are shifted by the padding on the left. With `with_positions`, also
            `position_ids`, (batch, tokens) long.
        """
        first_row = rows[0]
        lengths = np.array([len(row["input_ids"]) for row in rows])
        max_length = lengths.max()
        shifts = max_length - lengths if self.pads_left else np.zeros_like(lengths)
        batch = {}
        for name, padding_id in self.padding_ids.items():
            if name in first_row:
                padded = np.full((len(rows), max_length), padding_id, dtype=np.int64)
                for padded_row, row, shift, length in zip(padded, rows, shifts, lengths, strict=True):
                    padded_row[shift : shift + length] = row[name]
                batch[name] = torch.from_numpy(padded)
        if self.with_positions:
            batch["position_ids"] = make_position_ids(batch["attention_mask"])
        for name in ("start_positions", "end_positions"):
            if name in first_row:
                batch[name] = torch.from_numpy(shifts + [row[name] for row in rows])
        if "labels" in first_row:
            dtype = torch.float32 if isinstance(first_row["labels"], float | np.floating) else torch.long
            batch["labels"] = torch.tensor([row["labels"] for row in rows], dtype=dtype)
        batch["feature_id"] = torch.tensor([row["feature_id"] for row in rows], dtype=torch.long)
        return batch


def make_position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the position of each token, counted from 0 at the first token that is not padding, (batch, tokens) long.

    Padding on the left has position 0, and padding on the right the position of the last token.
    """
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def _list_used_columns(spec: TaskSpec, dataset: datasets.Dataset, training: bool) -> list[str]:
    """Return the columns that determine the features and are hashed into the cache key."""
    columns = list(spec.text_columns)
    if spec.kind == "span":
        columns += [spec.label_column, "id"] if training else []
    elif spec.label_column in dataset.column_names:
        columns.append(spec.label_column)
    return columns


def _encode_batch(
    spec: TaskSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    doc_stride: int,
    training: bool,
    examples: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    texts = [list(examples[name]) for name in spec.text_columns]
    columns: dict[str, Any]
    if spec.kind != "span":
        encoded = tokenizer(*texts, truncation=True, max_length=max_length, return_attention_mask=True)
        columns = {name: encoded[name] for name in squad.INPUTS if name in encoded}
        columns["example_id"] = np.arange(len(encoded["input_ids"]))
        if spec.label_column in examples:
            columns["labels"] = examples[spec.label_column]
    elif training:
        answers, ids = examples[spec.label_column], examples["id"]
        columns = squad.make_training_features(texts[0], texts[1], answers, ids, tokenizer, max_length, doc_stride)
    else:
        columns = squad.tokenize_windows(texts[0], texts[1], tokenizer, max_length, doc_stride)
        columns["offset_mapping"] = [offsets.tolist() for offsets in columns["offset_mapping"]]
    return columns


def _tokenize_split(
    spec: TaskSpec, rows: datasets.Dataset, encode_batch: Callable[[Mapping[str, Sequence[Any]]], dict[str, Any]]
) -> datasets.Dataset:
    """Encode the rows of a split batch by batch, number the features, check their lengths, and return the features."""
    tables: list[pa.Table] = []
    num_features = 0
    progress = datasets.utils.tqdm(
        total=len(rows), desc=f"Tokenizing {spec.name}", unit=" rows", delay=1.0, disable=None
    )
    with progress:
        for start in range(0, len(rows), _BATCH_ROWS):
            with convert_tokenizer_errors():
                columns = encode_batch(rows[start : start + _BATCH_ROWS])
            columns["length"] = [len(ids) for ids in columns["input_ids"]]
            columns["example_id"] = np.asarray(columns["example_id"]) + start
            if 0 in columns["length"]:
                row = int(columns["example_id"][columns["length"].index(0)])
                texts = ", ".join(f"{name} {shorten(repr(rows[row][name]), 60)}" for name in spec.text_columns)
                raise UserError(
                    f"split {rows.split}, example {row + 1} of {len(rows)}: the tokenizer makes no token of {texts}; "
                    "remove this example from the data"
                )
            columns["feature_id"] = np.arange(num_features, num_features + len(columns["length"]))
            types = {**_COLUMN_TYPES, "labels": datasets.Value("int64" if spec.labels else "float32")}
            features = datasets.Features({name: type_ for name, type_ in types.items() if name in columns})
            tables.append(pa.Table.from_pydict(columns, schema=features.arrow_schema))
            num_features += len(columns["length"])
            progress.update(min(_BATCH_ROWS, len(rows) - start))
    return datasets.Dataset(InMemoryTable(pa.concat_tables(tables)))


def _compute_cache_key(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, parameters: Mapping[str, Any]
) -> str:
    description = {
        "format": _CACHE_VERSION,
        "versions": [library.__version__ for library in (transformers, tokenizers, datasets)],
        "parameters": dict(parameters),
        "tokenizer": describe_tokenizer(tokenizer),
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    digest.update(fingerprint(rows).encode())
    return digest.hexdigest()


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return everything that determines how a fast tokenizer splits texts, as plain data."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These reflect the latest call of the tokenizer; the next call overwrites them.
    for state in ("truncation", "padding"):
        backend.pop(state, None)
    settings = ("model_input_names", "truncation_side", "split_special_tokens")
    return [type(tokenizer).__name__, backend, {name: getattr(tokenizer, name) for name in settings}]


def _load_or_build(path: Path, build: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    """Return the memory-mapped features from a file of the cache; if it is missing or damaged, build and store them.

    Several processes may do so at once: they write equal files, and atomically.
    """
    with suppress(OSError, pa.ArrowException):
        return datasets.Dataset.from_file(str(path))
    features = build()
    try:
        table = features.data.table.combine_chunks()
        with atomic_write(path) as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    except OSError as error:
        logger.warning("the features stay in memory, because %s could not be written: %s", path, error)
        return features
    return datasets.Dataset.from_file(str(path))
