"""Similarity of the layers of two models: CKA of their mean states of the same documents."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.drawing.terminal import make_progress
from istar.errors import UserError
from istar.geometry.collect.layer_outputs import BlockReader
from istar.geometry.collect.mean_states import MIN_EXAMPLES, Examples, Similarity, compare_examples
from istar.measures.numerics import accumulation_dtype, full_precision
from istar.models.model_source import ModelSource
from istar.models.pretrained import load_encoder, load_tokenizer
from istar.texts.corpus import Block, Blocks, Source, pad_batch, split_into_batches
from istar.texts.tokenizing import tokenize_parts


def read_first_documents(sources: Sequence[Source], count: int, shuffle_buffer: int = 0, seed: int = 0) -> list[str]:
    """Read `count` documents, taking one from the beginning of each text in turn; fewer if the texts have fewer.

    Each text is shuffled first, see `corpus.shuffle_documents`. Raises a `UserError` if a text cannot be read.
    """
    readers = [source.read_documents(shuffle_buffer, seed) for source in sources]
    documents: list[str] = []
    while readers and len(documents) < count:
        for reader in list(readers):
            if (document := next(reader, None)) is None:
                readers.remove(reader)
            elif len(documents) < count:
                documents.append(document)
    return documents


def compute_mean_states(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    length: int,
    batch_tokens: int | None = None,
    advance: Callable[[int], object] = lambda number: None,
) -> dict[str, Tensor]:
    """Compute each document's mean hidden state over its tokens, without special tokens, at every tap.

    The result is `(documents, d)` by tap, float32 on the CPU. `length` is the maximum number of tokens of a document,
    including special tokens; the rest is left out. `batch_tokens` is as for `corpus.split_into_batches`. `advance` is
    called with the documents of each batch.

    Raises a `UserError` if a document lacks tokens, because the rows of two models must belong to the same documents.
    """
    blocks = Blocks(tokenizer, length)
    first_blocks: list[Block] = []
    for number, document in enumerate(documents, start=1):
        first_block = next(blocks([document]), None)
        if first_block is None:
            raise UserError(f"document {number} has no tokens for this tokenizer; leave it out")
        first_blocks.append(first_block)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    block_reader = BlockReader(model, pad_id)
    # Batches of documents of similar length need little padding.
    sorted_indices = sorted(range(len(first_blocks)), key=lambda index: len(first_blocks[index].tokens))
    means: dict[str, Tensor] = {}
    for indices in split_into_batches(
        sorted_indices,
        lambda index: len(first_blocks[index].tokens),
        block_reader.device,
        batch_tokens,
        has_padding=not block_reader.sees_padding(),
    ):
        batch = [first_blocks[index] for index in indices]
        inputs = pad_batch([block.tokens for block in batch], pad_id)
        weights = _make_averaging_weights(batch, inputs["input_ids"].shape[1])
        inputs = {name: values.to(block_reader.device) for name, values in inputs.items()}
        with full_precision(block_reader.device), torch.inference_mode():
            for tap, states in block_reader(inputs).items():
                dtype = accumulation_dtype(states.device)  # the mean of equal states is equal to them
                pooled = (weights[:, None].to(states.device, dtype) @ states.to(dtype))[:, 0].float().cpu()
                means.setdefault(tap, pooled.new_empty(len(first_blocks), pooled.shape[1]))[list(indices)] = pooled
        advance(len(indices))
    return means


def _make_averaging_weights(blocks: Sequence[Block], width: int) -> Tensor:
    mask = torch.zeros(len(blocks), width, dtype=torch.float64, device="cpu")
    for index, block in enumerate(blocks):
        mask[index, : len(block.tokens)] = 1 - torch.tensor(block.is_special, device="cpu").double()
    return mask / mask.sum(1, keepdim=True)


def compute_similarities(
    models: Sequence[tuple[str, ModelSource]],
    documents: Sequence[str],
    length: int,
    device: str | Mapping[str, Any] = "auto",
    console: Console | None = None,
    dtype: str = "float32",
) -> list[Similarity]:
    """Compute CKA of all layers for each pair of labelled models. Only one model is in memory at a time.

    Each document is represented by its mean hidden state; see `compute_mean_states`. Documents that lack tokens for one
    of the models are left out. Raises a `UserError` if a model cannot be loaded, fewer than 4 documents are left, or
    CKA is undefined for all pairs of layers.
    """
    for _, source in models:
        tokenizer = load_tokenizer(source)
        documents = [text for text in documents if any(part.token_ids for part in tokenize_parts([text], tokenizer))]
    if len(documents) < MIN_EXAMPLES:
        raise UserError(
            f"the number of documents with tokens for all models is {len(documents)}; CKA needs at least "
            f"{MIN_EXAMPLES}; give more text"
        )
    examples_by_label: list[tuple[str, Examples]] = []
    ids = tuple(map(str, range(len(documents))))
    with make_progress(console) as progress:
        task = progress.add_task("similarity of layers", total=len(models) * len(documents))
        for label, source in models:
            tokenizer = load_tokenizer(source)
            model = load_encoder(source, tokenizer, dtype, device)
            states = compute_mean_states(
                model, tokenizer, documents, length, advance=lambda number: progress.advance(task, number)
            )
            examples_by_label.append((label, Examples(ids, ids, states)))
            del model
    similarities = [compare_examples(*first, *second) for first, second in itertools.combinations(examples_by_label, 2)]
    if all(math.isnan(value) for similarity in similarities for row in similarity.values for value in row):
        raise UserError(
            "CKA is undefined for all layers, because their states are equal or equally far apart for all documents, "
            "or not finite; give other texts"
        )
    return similarities
