"""Tokenized features of a split, with a cache that runs share, and their collation into padded batches.

The cache stores each feature set in a folder that is named by a hash of everything that determines the features. A
folder is written under a temporary name, with a checksum of every file, and then renamed, so that readers never see
an incomplete one.
"""

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import torch
import transformers
from datasets.table import InMemoryTable
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from istar.errors import UserError
from istar.tasks import squad
from istar.tasks.loading import fingerprint
from istar.tasks.specs import Kind, TaskSpec

MIN_LENGTH = 8
"""Smallest accepted maximum length of a feature, in tokens."""

_CACHE_VERSION = 1  # increase when the features of the same inputs change
_CHECKSUMS = "checksums.json"
_BATCH_ROWS = 1_000
_PROGRESS_MIN_ROWS = 4_000  # smaller splits are tokenized too quickly for a progress bar
# Like RoBERTa, these models number positions from pad_token_id + 1, so that the first entries of the position
# embedding are unused.
_POSITIONS_START_AFTER_PADDING = {
    "altclip_text_model", "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer",
    "luke", "markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
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
    "left_padded": datasets.Value("bool"),
}
_BATCH_COLUMNS = (*squad.INPUTS, "labels", "start_positions", "end_positions", "feature_id")
_LABEL_TYPES: dict[Kind, Any] = {
    "classification": datasets.Value("int64"),
    "regression": datasets.Value("float32"),
}

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
    """Tokenize a split, or load the features from the cache if an earlier run stored them.

    Args:
        spec: the task.
        dataset: a split with the task's text columns, and labels if it has any.
        tokenizer: a fast tokenizer.
        max_length: maximum length of a feature in tokens. Longer texts are truncated; for spans, they are split into
            several windows.
        training: whether features for spans contain answer positions (otherwise, offsets). Features of other tasks
            do not depend on it.
        doc_stride: number of tokens shared by neighbouring windows, for spans only; see `istar.tasks.squad.windows`.
        cache_dir: folder of the cache; None keeps the features in memory.

    Returns:
        A data set with one unpadded feature per row, and the columns `input_ids`, `attention_mask`,
        `token_type_ids` (if the tokenizer produces them), `feature_id` (the row number), `example_id` (the row in
        `dataset`) and `length`. Labelled data add `labels`. Spans add `start_positions` and `end_positions` for
        training; otherwise `offset_mapping`, (-1, -1) outside the context, and `left_padded`, whether the collator
        pads on the left.

    Raises:
        UserError: if the split is empty, a column is missing, a label is out of range, the tokenizer is slow or
            `max_length` is below `MIN_LENGTH`.
    """
    _check_length(max_length)
    squad.require_fast(tokenizer)
    if not len(dataset):
        raise UserError(f"task {spec.name}: this split has no rows")
    rows = dataset.with_format(None).select_columns(_used_columns(spec, dataset, training))
    if spec.kind == "span":
        encode = partial(_encode_spans, spec, tokenizer, max_length, doc_stride, training)
    else:
        encode = partial(_encode_texts, spec, tokenizer, max_length)
    if cache_dir is None:
        return _tokenize(spec, rows, encode)
    parameters: dict[str, Any] = {"kind": spec.kind, "labels": len(spec.labels), "max_length": max_length}
    if spec.kind == "span":
        parameters |= {"training": training, "doc_stride": doc_stride, "padding_side": tokenizer.padding_side}
    folder = Path(cache_dir) / _cache_key(rows, tokenizer, parameters)
    return _load_or_build(folder, lambda: _tokenize(spec, rows, encode))


def max_length_for(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, requested: int) -> int:
    """Return the requested maximum length, reduced to what both the tokenizer and the model accept, in tokens.

    Raises:
        UserError: if the result is below `MIN_LENGTH`.
    """
    _check_length(requested)
    # Models with relative positions have no `max_position_embeddings`, or -1; their input length is unlimited.
    positions = getattr(config, "max_position_embeddings", None) or 0
    if config.model_type in _POSITIONS_START_AFTER_PADDING:
        positions -= (config.pad_token_id or 0) + 1
    length = int(min(requested, tokenizer.model_max_length, positions if positions > 0 else requested))
    if length < MIN_LENGTH:
        raise UserError(
            f"the model accepts at most {length} tokens (max_position_embeddings in its config.json, "
            f"model_max_length in its tokenizer_config.json); at least {MIN_LENGTH} are needed"
        )
    return length


class FeatureRows(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of a feature set for a `DataLoader` with a `Collator`.

    Tokens are returned as NumPy views of the memory-mapped file, without the Python lists that a `datasets.Dataset`
    creates. Columns that batches do not contain are omitted.

    Args:
        features: the result of `featurize`, or a selection of its rows.
    """

    def __init__(self, features: datasets.Dataset) -> None:
        names = [name for name in _BATCH_COLUMNS if name in features.column_names]
        table = features.select_columns(names).with_format("arrow")[:]
        self._tokens = {name: _values_and_offsets(table[name]) for name in names if name in squad.INPUTS}
        self._numbers = {name: table[name].to_numpy() for name in names if name not in squad.INPUTS}
        # The row at which each chunk starts, and the number of rows. All columns of a table have the same chunks.
        self._starts = np.cumsum([0, *(len(offsets) - 1 for _, offsets in self._tokens["input_ids"])])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a batch. A `DataLoader` prefers this method to `__getitem__`."""
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        indices = np.asarray(rows) - self._starts[chunks]
        batch: list[dict[str, Any]] = [{} for _ in rows]
        for name, numbers in self._numbers.items():
            for features, number in zip(batch, numbers[rows], strict=True):
                features[name] = number
        for name, tokens in self._tokens.items():
            for features, chunk, index in zip(batch, chunks.tolist(), indices.tolist(), strict=True):
                values, offsets = tokens[chunk]
                features[name] = values[offsets[index] : offsets[index + 1]]
        return batch


def _values_and_offsets(column: pa.ChunkedArray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each chunk of a list column, the concatenated lists and their offsets, without copying."""
    return [(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in column.chunks]


class Collator:
    """Pads the features of a batch to their maximum length, on the tokenizer's padding side, and converts to tensors.

    A collator stores the padding ids instead of the tokenizer, so that it is fast to pickle and safe in forked
    `DataLoader` workers.

    Raises:
        UserError: if the tokenizer has no padding token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"{type(tokenizer).__name__} has no padding token; set pad_token in the model's tokenizer_config.json"
            )
        self.left = tokenizer.padding_side == "left"
        self.padding = {
            "input_ids": int(tokenizer.pad_token_id),
            "attention_mask": 0,
            "token_type_ids": int(tokenizer.pad_token_type_id),
        }

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate feature rows into a batch.

        Args:
            rows: rows of a feature set.

        Returns:
            The tensors `input_ids`, `attention_mask`, `token_type_ids`, (batch, tokens) long; `labels`, (batch,)
            long or float32; `start_positions`, `end_positions`, `feature_id`, (batch,) long; each only if the rows
            contain it. Positions are shifted by the padding on the left.
        """
        lengths = [len(row["input_ids"]) for row in rows]
        width = max(lengths)
        first = rows[0]
        batch = {name: self._pad(name, rows, width) for name in self.padding if name in first}
        shifts = np.array([width - length if self.left else 0 for length in lengths])
        for name in ("start_positions", "end_positions"):
            if name in first:
                batch[name] = torch.from_numpy(shifts + [row[name] for row in rows])
        if "labels" in first:
            dtype = torch.float32 if isinstance(first["labels"], float | np.floating) else torch.long
            batch["labels"] = torch.tensor([row["labels"] for row in rows], dtype=dtype)
        batch["feature_id"] = torch.tensor([row["feature_id"] for row in rows], dtype=torch.long)
        return batch

    def _pad(self, name: str, rows: Sequence[Mapping[str, Any]], width: int) -> torch.Tensor:
        padded = np.full((len(rows), width), self.padding[name], dtype=np.int64)
        for line, row in zip(padded, rows, strict=True):
            values = row[name]
            line[width - len(values) if self.left else 0 :][: len(values)] = values
        return torch.from_numpy(padded)


def _check_length(max_length: int) -> None:
    if max_length < MIN_LENGTH:
        raise UserError(f"max_length={max_length} is too short for a text; set it to at least {MIN_LENGTH} tokens")


def _used_columns(spec: TaskSpec, dataset: datasets.Dataset, training: bool) -> list[str]:
    """Return the columns that determine the features. Their content is part of the cache key; other columns are not."""
    columns = list(spec.text_columns)
    if spec.kind == "span":
        columns += [spec.label_column, "id"] if training else []
    elif spec.label_column in dataset.column_names:
        columns.append(spec.label_column)
    missing = [name for name in columns if name not in dataset.column_names]
    if missing:
        raise UserError(f"task {spec.name}: the data lack the columns {missing}; they have {dataset.column_names}")
    return columns


# --- tokenization -------------------------------------------------------------------------------------------

# Both encoders tokenize a batch of examples and return the columns of their features. `example_id` counts the
# examples from the start of the batch.


def _encode_texts(
    spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, max_length: int, examples: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    encoded = tokenizer(
        *(list(examples[name]) for name in spec.text_columns),
        truncation=True,
        max_length=max_length,
        return_attention_mask=True,
    )
    columns = {name: encoded[name] for name in squad.INPUTS if name in encoded}
    if spec.label_column in examples:
        columns["labels"] = examples[spec.label_column]
    return columns | {"example_id": np.arange(len(encoded["input_ids"]))}


def _encode_spans(
    spec: TaskSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    doc_stride: int,
    training: bool,
    examples: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    questions, contexts = (examples[name] for name in spec.text_columns)
    if training:
        answers, ids = examples[spec.label_column], examples["id"]
        return squad.training_features(questions, contexts, answers, ids, tokenizer, max_length, doc_stride)
    columns = squad.windows(questions, contexts, tokenizer, max_length, doc_stride)
    columns["offset_mapping"] = [offsets.tolist() for offsets in columns["offset_mapping"]]
    return columns | {"left_padded": [tokenizer.padding_side == "left"] * len(columns["input_ids"])}


def _tokenize(
    spec: TaskSpec, rows: datasets.Dataset, encode: Callable[[Mapping[str, Sequence[Any]]], dict[str, Any]]
) -> datasets.Dataset:
    """Encode a split batch by batch, number the features and check the labels."""
    tables: list[pa.Table] = []
    feature_count = 0
    progress = datasets.utils.tqdm(
        total=len(rows), desc=f"Tokenizing {spec.name}", unit=" rows", disable=len(rows) < _PROGRESS_MIN_ROWS or None
    )
    with progress:
        for first in range(0, len(rows), _BATCH_ROWS):
            columns = encode(rows[first : first + _BATCH_ROWS])
            columns["length"] = [len(ids) for ids in columns["input_ids"]]
            columns["example_id"] = np.asarray(columns["example_id"]) + first
            columns["feature_id"] = np.arange(feature_count, feature_count + len(columns["length"]))
            if "labels" in columns:
                _check_labels(spec, columns["labels"], first)
            types = {**_COLUMN_TYPES, "labels": _LABEL_TYPES.get(spec.kind)}
            features = datasets.Features({name: type_ for name, type_ in types.items() if name in columns})
            tables.append(pa.Table.from_pydict(columns, schema=features.arrow_schema))
            feature_count += len(columns["length"])
            progress.update(min(_BATCH_ROWS, len(rows) - first))
    return datasets.Dataset(InMemoryTable(pa.concat_tables(tables)))


def _check_labels(spec: TaskSpec, labels: Sequence[Any], first_row: int) -> None:
    """Check that the labels of a batch are class ids or finite numbers.

    Raises:
        UserError: names the row, counted from `first_row`, and its label.
    """
    values = np.asarray(labels, dtype=np.float64)  # None becomes NaN
    is_valid = np.isin(values, range(len(spec.labels))) if spec.labels else np.isfinite(values)
    if not is_valid.all():
        row = int(np.flatnonzero(~is_valid)[0])
        expected = f"an id below {len(spec.labels)}" if spec.labels else "a finite number"
        raise UserError(f"task {spec.name}: row {first_row + row} has the label {labels[row]!r}, not {expected}")


# --- cache --------------------------------------------------------------------------------------------------


def _cache_key(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, parameters: Mapping[str, Any]) -> str:
    """Return a SHA-256 digest of the content of the rows, the tokenizer, the parameters and library versions."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These reflect the latest call of the tokenizer; the next call overwrites them.
    for state in ("truncation", "padding"):
        backend.pop(state, None)
    settings = ("model_input_names", "truncation_side", "split_special_tokens")
    description = {
        "format": _CACHE_VERSION,
        "versions": [library.__version__ for library in (transformers, tokenizers, datasets)],
        "parameters": dict(parameters),
        "tokenizer": [type(tokenizer).__name__, backend, {name: getattr(tokenizer, name) for name in settings}],
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    digest.update(fingerprint(rows).encode())
    return digest.hexdigest()


def _load_or_build(folder: Path, build: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    """Return the features in a folder of the cache; if there are none, build and store them first."""
    cached = _load(folder)
    if cached is not None:
        return cached
    features = build()
    try:
        _store(features, folder)
    except OSError as error:
        logger.warning("the features stay in memory, because %s could not be written: %s", folder, error)
    # The folder may be missing for a moment while another process replaces it.
    cached = _load(folder)
    return features if cached is None else cached


def _load(folder: Path) -> datasets.Dataset | None:
    """Return the memory-mapped features in a folder, or None if the folder is missing or damaged."""
    if not folder.exists():
        return None
    try:
        if json.loads((folder / _CHECKSUMS).read_text()) == _checksums(folder):
            return datasets.Dataset.load_from_disk(str(folder), keep_in_memory=False)
    except (OSError, ValueError) as error:
        logger.debug("%s: %s", folder, error)
    logger.warning("the cached features in %s are damaged and will be rebuilt", folder)
    return None


def _store(features: datasets.Dataset, folder: Path) -> None:
    """Write features to a temporary folder and rename it to `folder`, replacing a damaged one.

    If another process has stored intact features in the meantime, those remain.
    """
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    damaged = draft.with_name(f"{draft.name}.damaged")
    try:
        with _no_progress_bars():
            features.save_to_disk(str(draft))
        (draft / _CHECKSUMS).write_text(json.dumps(_checksums(draft)))
        if _load(folder) is None:
            with suppress(FileNotFoundError):
                folder.rename(damaged)
        draft.rename(folder)
    except OSError:
        if _load(folder) is None:
            raise
    finally:
        for leftover in (draft, damaged):
            shutil.rmtree(leftover, ignore_errors=True)


def _checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digest of each file in a folder, by name."""
    checksums = {}
    for path in sorted(folder.iterdir()):
        if path.name != _CHECKSUMS:
            with path.open("rb") as file:
                checksums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of `datasets` in this block."""
    # If the environment variable is set, it takes precedence, and the calls below would only emit a warning.
    if datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is not None or not datasets.is_progress_bar_enabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
