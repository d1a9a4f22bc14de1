"""Frequencies of tokens and words in texts, for `istar embed`."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError
from istar.inputs.corpus import Source
from istar.inputs.documents import read_documents
from istar.inputs.tokenizing import tokenize

TEXT_SHARES = (0.3, 0.5, 0.98)
"""Shares of a text for which *Too Much in Common* counts the tokens that make them up, in section 2.2."""
_WORD_PATTERN = re.compile(r"\w+|[^\w\s]")


def count_tokens(texts: Iterable[Source], tokenizer: PreTrainedTokenizerBase, rows: int) -> np.ndarray:
    """Count how often each token occurs in texts, `(rows,)`; the special tokens around a text are not counted.

    Raises:
        UserError: if a file cannot be read, or the texts have no tokens.
    """
    counts = np.zeros(rows, dtype=np.int64)
    for source in texts:
        for ids in tokenize(read_documents(source.path), tokenizer):
            counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=rows)
    if not counts.any():
        raise UserError("--text: no file holds any text; expected at least one line that is not empty")
    return counts


def make_token_table(counts: np.ndarray, tokens: Sequence[str | None], norms: np.ndarray) -> pd.DataFrame:
    """Return a row for each token that occurs, the most frequent first, with its share and the cumulative share.

    Args:
        counts: number of occurrences by token id.
        tokens: tokens by token id.
        norms: norms of the tokens' embeddings by token id.
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
        for document in read_documents(source.path):
            counter.update(_WORD_PATTERN.findall(document))
    words = sorted(counter, key=lambda word: (-counter[word], word))
    return _make_frequency_table({"word": words}, np.array([counter[word] for word in words], dtype=np.int64))


def _make_frequency_table(names: dict[str, Any], counts: np.ndarray) -> pd.DataFrame:
    """Return a table with the rank, the names, the count, the share and the cumulative share of each token or word."""
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
