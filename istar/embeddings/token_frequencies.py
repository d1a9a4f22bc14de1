"""Tokens and words of texts by frequency, and tokens that no text contains, for `istar embed`."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError
from istar.measures.numerics import unit_vectors, upcast_blocks
from istar.texts.corpus import Source
from istar.texts.tokenizing import tokenize_parts

_WORD_PATTERN = re.compile(r"\w+|[^\w\s]")
BIN_SIZE = 1_000
"""Number of tokens in a bin, as in Figure 3 of *Too Much in Common*."""


def count_tokens(texts: Iterable[Source], tokenizer: PreTrainedTokenizerBase, rows: int) -> np.ndarray:
    """Count how often each token occurs in texts, `(rows,)`; the special tokens around a text are not counted."""
    counts = np.zeros(rows, dtype=np.int64)
    for source in texts:
        for part in tokenize_parts(source.read_documents(), tokenizer):
            counts += np.bincount(np.asarray(part.token_ids, dtype=np.int64), minlength=rows)
    if not counts.any():
        raise UserError("--text: no file holds any text; expected at least one line that is not empty")
    return counts


def make_token_table(counts: np.ndarray, tokens: Sequence[str | None], norms: np.ndarray) -> pd.DataFrame:
    """Return a row for each token that occurs, the most frequent first, with its share and the cumulative share.

    All arguments are by token id: numbers of occurrences, tokens, and norms of the embeddings.
    """
    ids = sort_by_frequency(counts)
    names = {"id": ids, "token": [json.dumps(tokens[token_id]) for token_id in ids]}
    return _make_frequency_table(names, counts[ids]).assign(norm=norms[ids])


def count_words(texts: Iterable[Source]) -> pd.DataFrame:
    """Count the words of texts, and return a row for each word, the most frequent first.

    A word is a run of letters, digits and underscores, and any other character except whitespace is a word by itself.
    Words that differ only in case count as different words.
    """
    counter: Counter[str] = Counter()
    for source in texts:
        for document in source.read_documents():
            counter.update(match[0] for match in _WORD_PATTERN.finditer(document))
    words = sorted(counter, key=lambda word: (-counter[word], word))
    return _make_frequency_table({"word": words}, np.array([counter[word] for word in words], dtype=np.int64))


def _make_frequency_table(names: dict[str, Any], counts: np.ndarray) -> pd.DataFrame:
    shares = counts / max(1, counts.sum())
    ranks = np.arange(1, len(counts) + 1)
    return pd.DataFrame({"rank": ranks, **names, "count": counts, "share": shares, "cumulative_share": shares.cumsum()})


def sort_by_frequency(counts: np.ndarray) -> np.ndarray:
    """Return the indices of the counts that are not 0, the largest count first; equal counts keep their order."""
    return np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]


def count_needed(cumulative_share: pd.Series, share: float) -> int:
    """Return how many of the most frequent tokens or words make up at least this share of a text."""
    # The tolerance allows for rounding errors in the cumulative sum.
    return int(cumulative_share.to_numpy().searchsorted(share * (1 - 1e-12))) + 1


def find_unused_tokens(tokens: Sequence[str | None]) -> list[int]:
    """Return the ids of placeholder tokens that never occur in texts, such as BERT's `[unused0]`.

    A vocabulary without placeholders is represented by its last 1,000 tokens, as in *Too Much in Common*. If it has
    fewer than 2,000 tokens, the result is empty.
    """
    pattern = re.compile(r"[\[<]unused_?\d+[\]>]")
    placeholder_ids = [token_id for token_id, token in enumerate(tokens) if token and pattern.fullmatch(token)]
    known_ids = [token_id for token_id, token in enumerate(tokens) if token is not None]
    return placeholder_ids or (known_ids[-BIN_SIZE:] if len(known_ids) >= 2 * BIN_SIZE else [])


def make_bins(tokens: Sequence[str | None], special_ids: set[int], counts: np.ndarray | None) -> pd.DataFrame:
    """Divide the tokens that are neither unused nor special into bins of 1,000.

    The bins are by token id, as in the paper: vocabularies such as BERT's are ordered by frequency. If `counts` is
    given, there are also bins by rank of frequency, and one bin of the tokens that do not occur.

    Args:
        tokens: token of each row of the matrix; None for rows without a token.
        special_ids: ids of special tokens.
        counts: number of occurrences of each token, `(rows,)`; None if unknown.

    Returns:
        A row for each nonempty bin, with its token `ids`; no rows without unused tokens.
    """
    unused_ids = find_unused_tokens(tokens)
    excluded = special_ids.union(unused_ids)
    used_ids = [token_id for token_id, token in enumerate(tokens) if token is not None and token_id not in excluded]
    rows = []
    for order, first, last, ids in _iterate_bins(np.array(used_ids, dtype=int), counts) if unused_ids else ():
        if len(ids):
            occurrences = None if counts is None else int(counts[ids].sum())
            rows.append((order, first, last, len(ids), occurrences, ids))
    return pd.DataFrame(rows, columns=["order", "first", "last", "tokens", "occurrences", "ids"])


def _iterate_bins(
    token_ids: np.ndarray, counts: np.ndarray | None
) -> Iterator[tuple[str, int | None, int | None, np.ndarray]]:
    for start in range(0, int(token_ids.max(initial=-1)) + 1, BIN_SIZE):
        yield "index", start, start + BIN_SIZE - 1, token_ids[(token_ids >= start) & (token_ids < start + BIN_SIZE)]
    if counts is None:
        return
    ranked_ids = token_ids[sort_by_frequency(counts[token_ids])]
    for start in range(0, len(ranked_ids), BIN_SIZE):
        yield "frequency", start + 1, min(start + BIN_SIZE, len(ranked_ids)), ranked_ids[start : start + BIN_SIZE]
    yield "not in the text", None, None, token_ids[counts[token_ids] == 0]


def average_cosines(matrix: Tensor, unused_ids: Sequence[int], bins: pd.DataFrame) -> list[float]:
    """Return the mean cosine of the unused tokens with the tokens of each bin of `make_bins`."""
    mean_direction = unit_vectors(matrix[list(unused_ids)].double())[0].mean(0)
    cosines = torch.cat([unit_vectors(block)[0] @ mean_direction for block in upcast_blocks(matrix)]).numpy()
    return [float(cosines[ids].mean()) for ids in bins["ids"]]
