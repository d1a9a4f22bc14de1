"""From text to padded batches: tokenization that runs share through a cache, and the collator.

A cached feature set is a folder named by the hash of all that decides its content. It is written beside its
place and renamed, with a checksum of every file, so that a reader sees a whole one or none.
"""

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
_FORMAT = 1  # raise it when features come out otherwise than before
_MANIFEST = "checksums.json"
_BATCH = 1_000
_QUIET_ROWS = 4_000  # fewer rows are ready before a progress bar is worth its line
# Models in RoBERTa's way: the first position is pad_token_id + 1, so that many entries of the table are lost.
_POSITIONS_BEHIND_PADDING = {
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
_Columns = dict[str, Any]
_Encode = Callable[[Mapping[str, Sequence[Any]]], _Columns]


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
    """Tokenize a split, or open what an earlier run made of the same split.

    Args:
        spec: the task.
        dataset: a split with the task's text columns, and its labels where it has some.
        tokenizer: a fast one.
        max_length: longest feature in tokens; longer texts are cut (spans: fall into several windows).
        training: whether spans get answer positions (else offsets); other tasks are the same for both.
        doc_stride: tokens shared by neighbouring windows, spans only; see `istar.tasks.squad.windows`.
        cache_dir: folder of the feature sets that runs share; None keeps the features in memory.

    Returns:
        One row a feature, unpadded: `input_ids`, `attention_mask`, `token_type_ids` (if the tokenizer makes
        them), `feature_id` (the row's number), `example_id` (the row in `dataset`), `length`, and
        `labels` where there are labels, or `start_positions` and `end_positions` (spans for training), or
        `offset_mapping`, (-1, -1) outside the context, and `left_padded`, the side that the collator will
        pad (spans for evaluation).

    Raises:
        UserError: for an empty split, absent columns, a label out of range, a slow tokenizer or a
            `max_length` below `MIN_LENGTH`.
    """
    _check_length(max_length)
    squad.require_fast(tokenizer)
    if not len(dataset):
        raise UserError(f"task {spec.name}: this split has no rows")
    rows = dataset.with_format(None).select_columns(_used_columns(spec, dataset, training))
    encode = _encoder(spec, tokenizer, max_length, training, doc_stride)

    def build() -> datasets.Dataset:
        return _tokenize(spec, rows, encode)

    if cache_dir is None:
        return build()
    parameters: dict[str, Any] = {"kind": spec.kind, "labels": len(spec.labels), "max_length": max_length}
    if spec.kind == "span":
        parameters |= {"training": training, "doc_stride": doc_stride, "padding_side": tokenizer.padding_side}
    return _cached(Path(cache_dir) / _key(rows, tokenizer, parameters), build)


def max_length_for(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, wanted: int) -> int:
    """The longest feature that is wanted and that both tokenizer and model can take, in tokens.

    Raises:
        UserError: where that is below `MIN_LENGTH`.
    """
    _check_length(wanted)
    positions = getattr(config, "max_position_embeddings", None) or 0
    if config.model_type in _POSITIONS_BEHIND_PADDING:
        positions -= (config.pad_token_id or 0) + 1
    # Models with relative positions name none, or -1, and take any length.
    possible = int(min(wanted, tokenizer.model_max_length, positions if positions > 0 else wanted))
    if possible < MIN_LENGTH:
        raise UserError(
            f"the model takes no more than {possible} tokens at a time (max_position_embeddings in its config.json, "
            f"model_max_length in its tokenizer_config.json); at least {MIN_LENGTH} are needed"
        )
    return possible


class FeatureRows(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of a feature set as the `Collator` takes them, tokens as views of the mapped file.

    A `datasets.Dataset` makes Python lists of every token of a row, also of columns that no batch has use for.

    Args:
        features: what `featurize` gave, or a selection of it.
    """

    def __init__(self, features: datasets.Dataset) -> None:
        present = [name for name in _BATCH_COLUMNS if name in features.column_names]
        table = features.select_columns(present).with_format("arrow")[:]
        self._tokens = {name: _chunks(table[name]) for name in present if name in squad.INPUTS}
        self._numbers = {name: table[name].to_numpy() for name in present if name not in squad.INPUTS}
        # Of the row that each chunk begins with; all columns of a table that was written have the same chunks.
        self._first = np.cumsum([0, *(len(borders) - 1 for _, borders in self._tokens["input_ids"])])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Those of a batch, as a `DataLoader` asks for them."""
        chunks = np.searchsorted(self._first, rows, side="right") - 1
        places = (np.asarray(rows) - self._first[chunks]).tolist()
        found: list[dict[str, Any]] = [{} for _ in rows]
        for name, numbers in self._numbers.items():
            for target, number in zip(found, numbers[rows], strict=True):
                target[name] = number
        for name, tokens in self._tokens.items():
            for target, chunk, place in zip(found, chunks.tolist(), places, strict=True):
                values, borders = tokens[chunk]
                target[name] = values[borders[place] : borders[place + 1]]
        return found


def _chunks(column: pa.ChunkedArray) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each chunk of lists all its values, and where each list begins and the last one ends; nothing is copied."""
    return [(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in column.chunks]


class Collator:
    """Pads feature rows to the longest of their batch, on the tokenizer's side, and makes tensors of them.

    It keeps a few numbers of the tokenizer rather than the tokenizer: quick to pickle, and safe in the forked
    workers of a `DataLoader`.

    Raises:
        UserError: for a tokenizer without a padding token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"{type(tokenizer).__name__} has no padding token; name one as pad_token in the model's "
                "tokenizer_config.json"
            )
        self.left = tokenizer.padding_side == "left"
        self.padding = {
            "input_ids": int(tokenizer.pad_token_id),
            "attention_mask": 0,
            "token_type_ids": int(tokenizer.pad_token_type_id),
        }

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """One batch.

        Args:
            rows: rows of a feature set.

        Returns:
            `input_ids`, `attention_mask`, `token_type_ids`: (batch, tokens) long, as far as the rows have
            them; `labels`: (batch,) long or float32; `start_positions`, `end_positions`, `feature_id`:
            (batch,) long. Positions count the padding on the left.
        """
        lengths = [len(row["input_ids"]) for row in rows]
        width = max(lengths)
        first = rows[0]
        batch = {name: self._padded(name, rows, width) for name in self.padding if name in first}
        shifts = np.array([width - length if self.left else 0 for length in lengths])
        for name in ("start_positions", "end_positions"):
            if name in first:
                batch[name] = torch.from_numpy(shifts + [row[name] for row in rows])
        if "labels" in first:
            kind = torch.float32 if isinstance(first["labels"], float | np.floating) else torch.long
            batch["labels"] = torch.tensor([row["labels"] for row in rows], dtype=kind)
        batch["feature_id"] = torch.tensor([row["feature_id"] for row in rows], dtype=torch.long)
        return batch

    def _padded(self, name: str, rows: Sequence[Mapping[str, Any]], width: int) -> torch.Tensor:
        padded = np.full((len(rows), width), self.padding[name], dtype=np.int64)
        for target, row in zip(padded, rows, strict=True):
            values = row[name]
            target[width - len(values) if self.left else 0 :][: len(values)] = values
        return torch.from_numpy(padded)


def _check_length(max_length: int) -> None:
    if max_length < MIN_LENGTH:
        raise UserError(f"max_length={max_length} is too short for a text; give at least {MIN_LENGTH} tokens")


def _used_columns(spec: TaskSpec, dataset: datasets.Dataset, training: bool) -> list[str]:
    """The columns that features are made from, and no others: what they hold is hashed."""
    wanted = list(spec.text_columns)
    if spec.kind == "span":
        wanted += [spec.label_column, "id"] if training else []
    elif spec.label_column in dataset.column_names:
        wanted.append(spec.label_column)
    missing = [name for name in wanted if name not in dataset.column_names]
    if missing:
        raise UserError(f"task {spec.name}: the data lack the columns {missing}; they have {dataset.column_names}")
    return wanted


# --- encoding -----------------------------------------------------------------------------------------------


def _encoder(
    spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, max_length: int, training: bool, doc_stride: int
) -> _Encode:
    """What turns rows into columns, `example_id` counting the rows that it was given."""

    def texts(rows: Mapping[str, Sequence[Any]]) -> _Columns:
        encoded = tokenizer(
            *(list(rows[name]) for name in spec.text_columns),
            truncation=True,
            max_length=max_length,
            return_attention_mask=True,
        )
        columns = {name: encoded[name] for name in squad.INPUTS if name in encoded}
        if spec.label_column in rows:
            columns["labels"] = rows[spec.label_column]
        return columns | {"example_id": np.arange(len(encoded["input_ids"]))}

    def training_spans(rows: Mapping[str, Sequence[Any]]) -> _Columns:
        questions, contexts = (rows[name] for name in spec.text_columns)
        answers, names = rows[spec.label_column], rows["id"]
        return squad.training_features(questions, contexts, answers, names, tokenizer, max_length, doc_stride)

    def evaluation_spans(rows: Mapping[str, Sequence[Any]]) -> _Columns:
        questions, contexts = (rows[name] for name in spec.text_columns)
        columns = squad.windows(questions, contexts, tokenizer, max_length, doc_stride)
        columns["offset_mapping"] = [offsets.tolist() for offsets in columns["offset_mapping"]]
        return columns | {"left_padded": [tokenizer.padding_side == "left"] * len(columns["input_ids"])}

    if spec.kind == "span":
        return training_spans if training else evaluation_spans
    return texts


def _tokenize(spec: TaskSpec, rows: datasets.Dataset, encode: _Encode) -> datasets.Dataset:
    tables: list[pa.Table] = []
    count = 0
    bar = datasets.utils.tqdm(
        total=len(rows), desc=f"Tokenizing {spec.name}", unit=" rows", disable=len(rows) < _QUIET_ROWS or None
    )
    with bar:
        for first in range(0, len(rows), _BATCH):
            batch = rows[first : first + _BATCH]
            columns = encode(batch)
            columns["length"] = [len(ids) for ids in columns["input_ids"]]
            columns["example_id"] = np.asarray(columns["example_id"]) + first
            columns["feature_id"] = np.arange(count, count + len(columns["length"]))
            if "labels" in columns:
                _check_labels(spec, columns["labels"], first)
            tables.append(_table(spec, columns))
            count += len(columns["length"])
            bar.update(min(_BATCH, len(rows) - first))
    return datasets.Dataset(InMemoryTable(pa.concat_tables(tables)))


def _table(spec: TaskSpec, columns: _Columns) -> pa.Table:
    types = _COLUMN_TYPES | ({"labels": _LABEL_TYPES[spec.kind]} if "labels" in columns else {})
    schema = datasets.Features({name: kind for name, kind in types.items() if name in columns}).arrow_schema
    return pa.Table.from_pydict(columns, schema=schema)


def _check_labels(spec: TaskSpec, labels: Sequence[Any], first: int) -> None:
    values = np.asarray(labels, dtype=np.float64)  # None becomes nan
    known = np.isin(values, range(len(spec.labels))) if spec.labels else np.isfinite(values)
    if not known.all():
        row = int(np.flatnonzero(~known)[0])
        wanted = f"an id below {len(spec.labels)}" if spec.labels else "a finite number"
        raise UserError(f"task {spec.name}: row {first + row} has the label {labels[row]!r}, not {wanted}")


# --- cache --------------------------------------------------------------------------------------------------


def _key(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, parameters: Mapping[str, Any]) -> str:
    """sha256 over the content of the rows, however they are chunked, and over all that acts on them."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # left over from the latest call, set anew by the next
        backend.pop(state, None)
    settings = ("model_input_names", "truncation_side", "split_special_tokens")
    description = {
        "format": _FORMAT,
        "versions": [library.__version__ for library in (transformers, tokenizers, datasets)],
        "parameters": dict(parameters),
        "tokenizer": [
            type(tokenizer).__name__,
            backend,
            {name: getattr(tokenizer, name) for name in settings},
        ],
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    digest.update(fingerprint(rows).encode())
    return digest.hexdigest()


def _cached(folder: Path, build: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    stored = _read(folder)
    if stored is not None:
        return stored
    built = build()
    try:
        _write(built, folder)
    except OSError as error:
        logger.warning("features stay in memory, as %s could not be written: %s", folder, error)
    # What another process is replacing just now may be missing for a moment.
    stored = _read(folder)
    return built if stored is None else stored


def _read(folder: Path) -> datasets.Dataset | None:
    """The feature set in a folder, memory-mapped; None where there is none or a damaged one."""
    if not folder.exists():
        return None
    try:
        if json.loads((folder / _MANIFEST).read_text()) == _checksums(folder):
            return datasets.Dataset.load_from_disk(str(folder), keep_in_memory=False)
    except (OSError, ValueError) as error:
        logger.debug("%s: %s", folder, error)
    logger.warning("the cached features in %s are damaged and will be made anew", folder)
    return None


def _write(features: datasets.Dataset, folder: Path) -> None:
    """Put a feature set in its place at once, unless another process was first."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    damaged = draft.with_name(f"{draft.name}.damaged")
    try:
        with _no_progress_bars():
            features.save_to_disk(str(draft))
        (draft / _MANIFEST).write_text(json.dumps(_checksums(draft)))
        if _read(folder) is None:
            with suppress(FileNotFoundError):
                folder.rename(damaged)
        draft.rename(folder)
    except OSError:
        if _read(folder) is None:
            raise
    finally:
        for leftover in (draft, damaged):
            shutil.rmtree(leftover, ignore_errors=True)


def _checksums(folder: Path) -> dict[str, str]:
    sums = {}
    for path in sorted(folder.iterdir()):
        if path.name != _MANIFEST:
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    # An environment variable has priority over the calls below, which then do nothing but warn.
    changeable = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None and datasets.is_progress_bar_enabled()
    if not changeable:
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
