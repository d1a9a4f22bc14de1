"""Extractive question answering: overlapping windows over long contexts, and the way back to answer texts.

An offset is a token's character range in the context; tokens that are not of the context (the question,
special tokens) have the offset (-1, -1). Indices count the tokens of an unpadded feature.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot tell where in the text its tokens stand.

    Raises:
        UserError: for a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which knows no offsets; "
            "choose a model that has a fast one (a tokenizer.json)"
        )


def training_features(
    questions: Sequence[str],
    contexts: Sequence[str],
    answers: Sequence[Mapping[str, Sequence[Any]]],
    ids: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int = 128,
) -> dict[str, list[Any]]:
    """Windows with the token positions of the first gold answer.

    Args:
        questions: one a row; white space around a question is dropped.
        contexts: one a row.
        answers: `{"text": [...], "answer_start": [...]}` a row; a row without an answer is unanswerable.
        ids: names of the questions, for messages.
        tokenizer: a fast one.
        max_length: longest feature, in tokens.
        stride: tokens that neighbouring windows share; see `windows`.

    Returns:
        The columns of `windows` without the offsets, and `start_positions` and `end_positions` (inclusive),
        both 0 where the window does not hold the whole answer.

    Raises:
        UserError: where an answer is not at its `answer_start`, naming the question, or for a slow tokenizer.
    """
    ranges = [_answer_range(*row) for row in zip(contexts, answers, ids, strict=True)]
    features = windows(questions, contexts, tokenizer, max_length, stride)
    rows = zip(features.pop("offset_mapping"), features["example_id"], strict=True)
    positions = [answer_positions(offsets, *ranges[row]) for offsets, row in rows]
    features["start_positions"], features["end_positions"] = map(list, zip(*positions, strict=True))
    return features


def windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int = 128,
) -> dict[str, list[Any]]:
    """Features for evaluation: each question with every window of its context, unpadded.

    A window must leave room to advance. So neighbours share at most a third of `max_length` (which is the
    customary 128 of 384), and a question may fill half of a feature: a longer one is cut at a token's end.

    Returns:
        Lists of equal length: the tokenizer's inputs, `offset_mapping` (each an array (tokens, 2)) and
        `example_id`, the row of the question and context. Windows of a row stand together, in order.

    Raises:
        UserError: for a slow tokenizer, or where `max_length` has no room for a question and a context.
    """
    require_fast(tokenizer)
    content = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    if content < 2:
        raise UserError(f"max_length={max_length} has no room for a question and a context; raise it")
    longest_question = content // 2
    encoded = tokenizer(
        _fitting(questions, tokenizer, longest_question),
        list(contexts),
        truncation="only_second",
        max_length=max_length,
        stride=min(stride, max_length // 3, content - longest_question - 1),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=True,
    )
    features: dict[str, list[Any]] = {name: encoded[name] for name in INPUTS if name in encoded}
    features["offset_mapping"] = [
        _context_offsets(offsets, encoded.sequence_ids(row)) for row, offsets in enumerate(encoded["offset_mapping"])
    ]
    features["example_id"] = encoded["overflow_to_sample_mapping"]
    return features


def answer_positions(offsets: NDArray[np.integer], start: int, end: int) -> tuple[int, int]:
    """First and last token of the characters [start, end) of the context; (0, 0) where the window lacks some.

    Args:
        offsets: (tokens, 2), a window's.
        start: the answer's first character.
        end: the character behind its last.
    """
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    begins, ends = offsets[inside].T
    if end <= start or not len(inside) or start < begins[0] or end > ends[-1]:
        return 0, 0
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(begins, end, side="left")) - 1
    # The tokenizer may have dropped all characters of an answer, such as a lone control character.
    return (int(inside[first]), int(inside[last])) if first <= last else (0, 0)


def best_answer(
    context: str,
    candidates: Iterable[tuple[ArrayLike, ArrayLike, NDArray[np.integer]]],
    n_best: int = 20,
    max_answer_length: int = 30,
) -> str:
    """The answer text with the highest start logit + end logit over all windows of one context.

    Args:
        context: the text that offsets point into.
        candidates: start logits (tokens,), end logits (tokens,) and offsets (tokens, 2) of each window.
        n_best: see `best_span`.
        max_answer_length: see `best_span`.

    Returns:
        The text without surrounding white space; `""` where no window has a valid span. Of equal scores the
        first window wins, in it the earliest start, then the earliest end.
    """
    spans = (best_span(*window, n_best, max_answer_length) for window in candidates)
    found = [span for span in spans if span is not None]
    if not found:
        return ""
    _, start, end = max(found, key=lambda span: span[0])
    return context[start:end].strip()


def best_span(
    start_logits: ArrayLike,
    end_logits: ArrayLike,
    offsets: NDArray[np.integer],
    n_best: int = 20,
    max_answer_length: int = 30,
) -> tuple[float, int, int] | None:
    """The best span of a window that pairs one of its `n_best` starts with one of its `n_best` ends.

    Only tokens of the context count, and a span has 1 to `max_answer_length` of them.

    Returns:
        Its score and character range [start, end), or None where no pair is a valid span.
    """
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside):
        return None
    from_start = np.asarray(start_logits, dtype=np.float64)
    from_end = np.asarray(end_logits, dtype=np.float64)
    starts, ends = (inside[_top(logits[inside], n_best)] for logits in (from_start, from_end))
    width = ends[None, :] - starts[:, None] + 1
    scores = from_start[starts][:, None] + from_end[ends][None, :]
    scores[(width < 1) | (width > max_answer_length)] = -np.inf
    row, column = np.unravel_index(scores.argmax(), scores.shape)
    if scores[row, column] == -np.inf:
        return None
    return float(scores[row, column]), int(offsets[starts[row], 0]), int(offsets[ends[column], 1])


def _top(values: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Indices of the largest values, ascending; of equal values the earlier ones."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


def _answer_range(context: str, answer: Mapping[str, Sequence[Any]], name: str) -> tuple[int, int]:
    """Characters [start, end) of the first gold answer, white space trimmed; (0, 0) without one."""
    if not answer["text"]:
        return 0, 0
    text, start = answer["text"][0], answer["answer_start"][0]
    if start < 0 or not text.strip() or not context.startswith(text, start):
        raise UserError(
            f"question {name}: the answer {text!r} is not at character {start} of its context, "
            f"where {context[max(start, 0) :][: len(text)]!r} stands; mend or drop this question"
        )
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def _context_offsets(offsets: Sequence[tuple[int, int]], sequences: Sequence[int | None]) -> NDArray[np.int32]:
    in_context = np.array([sequence == 1 for sequence in sequences])
    return np.where(in_context[:, None], np.asarray(offsets, dtype=np.int32), np.int32(-1))


def _fitting(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[str]:
    # Some of SQuAD's questions start with so much white space that byte-level tokens of it fill a feature.
    stripped = [question.strip() for question in questions]
    encoded = tokenizer(stripped, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [
        question if len(offsets) <= limit else _cut(question, offsets, tokenizer, limit)
        for question, offsets in zip(stripped, encoded["offset_mapping"], strict=True)
    ]


def _cut(question: str, offsets: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, limit: int) -> str:
    # A word cut in its middle may fall into more tokens than it had there, so look before settling.
    for kept in range(limit, 0, -1):
        text = question[: offsets[kept - 1][1]]
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= limit:
            return text
    return ""
