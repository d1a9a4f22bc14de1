"""Similarity of the tokens that no text contains with the other tokens, after Figure 3 of *Too Much in Common*."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from istar.embeddings.token_counts import sort_by_frequency
from istar.measures.numerics import unit_vectors, upcast_blocks

BIN_SIZE = 1_000
"""Number of tokens in a bin, as in Figure 3 of *Too Much in Common*."""


def find_unused_tokens(tokens: Sequence[str | None]) -> list[int]:
    """Return the ids of placeholder tokens such as BERT's `[unused0]`, which no text contains.

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
        A row for each bin that has tokens, with its token `ids`; no rows if there are no unused tokens.
    """
    unused_ids = find_unused_tokens(tokens)
    excluded = special_ids.union(unused_ids)
    used_ids = [token_id for token_id, token in enumerate(tokens) if token is not None and token_id not in excluded]
    rows: list[dict[str, Any]] = []
    for order, first, last, ids in _iterate_bins(np.array(used_ids, dtype=int), counts) if unused_ids else ():
        if len(ids):
            occurrences = None if counts is None else int(counts[ids].sum())
            row = {"order": order, "first": first, "last": last, "tokens": len(ids), "occurrences": occurrences}
            rows.append({**row, "ids": ids})
    return pd.DataFrame(rows)


def _iterate_bins(
    token_ids: np.ndarray, counts: np.ndarray | None
) -> Iterator[tuple[str, int | None, int | None, np.ndarray]]:
    """Yield for each bin what it is ordered by, its first and last position in that order, and its token ids."""
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
