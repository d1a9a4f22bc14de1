"""Overlapping windows over long contexts for extractive question answering, and decoding of logits to answer texts.

An offset is the character range of a token in the context. Tokens of the question and special tokens have the offset
(-1, -1). Token indices refer to the unpadded feature.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def make_training_features(
    questions: Sequence[str],
    contexts: Sequence[str],
    answers: Sequence[Mapping[str, Sequence[Any]]],
    ids: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int = 128,
) -> dict[str, list[Any]]:
    """Tokenize questions with windows of their contexts, and find the first gold answer in each window, for training.

    The other arguments are as in `tokenize_windows`.

    Args:
        answers: `{"text": [...], "answer_start": [...]}` of each example, with at least one answer.
        ids: id of each example, for error messages.

    Returns:
        The columns of `tokenize_windows` except the offsets, and the tokens `start_positions` and `end_positions`
        (inclusive) of the answer. Both are 0 if the window does not contain the whole answer.

    Raises a `UserError` if an answer does not occur at its `answer_start`; the message names the question.
    """
    answer_ranges = [_find_answer_range(*example) for example in zip(contexts, answers, ids, strict=True)]
    features = tokenize_windows(questions, contexts, tokenizer, max_length, stride)
    windows = zip(features.pop("offset_mapping"), features["example_id"], strict=True)
    positions = [find_answer_tokens(offsets, *answer_ranges[example_index]) for offsets, example_index in windows]
    features["start_positions"], features["end_positions"] = map(list, zip(*positions, strict=True))
    return features


def tokenize_windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int = 128,
) -> dict[str, list[Any]]:
    """Tokenize each question with every window of its context, without padding.

    Each window must contain new tokens. Therefore, neighbouring windows share at most a third of `max_length`, and a
    question that fills more than half of a window is truncated. White space around a question is removed.

    Args:
        questions: question of each example.
        contexts: context of each example.
        tokenizer: a fast tokenizer.
        max_length: maximum number of tokens of a window with its question; 384 is customary.
        stride: number of tokens that neighbouring windows share.

    Returns:
        Lists of equal length with one entry per window: the tokenizer's outputs, `offset_mapping` (arrays of shape
        (tokens, 2)) and `example_id`, the index of the example. The windows of an example are consecutive and in order.
    """
    max_text_tokens = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    max_question_tokens = max_text_tokens // 2
    encoded = tokenizer(
        _truncate_questions(questions, tokenizer, max_question_tokens),
        list(contexts),
        truncation="only_second",
        max_length=max_length,
        stride=min(stride, max_length // 3, max_text_tokens - max_question_tokens - 1),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=True,
    )
    features: dict[str, list[Any]] = {name: encoded[name] for name in INPUTS if name in encoded}
    features["offset_mapping"] = []
    for row, offsets in enumerate(encoded["offset_mapping"]):
        in_context = np.array([sequence == 1 for sequence in encoded.sequence_ids(row)])
        features["offset_mapping"].append(np.where(in_context[:, None], np.asarray(offsets, np.int32), np.int32(-1)))
    features["example_id"] = encoded["overflow_to_sample_mapping"]
    return features


def find_answer_tokens(offsets: NDArray[np.integer], start: int, end: int) -> tuple[int, int]:
    """Return the first and the last token of an answer, or (0, 0) if a window does not contain the whole answer.

    `offsets` are the window's, (tokens, 2). The answer consists of the characters [start, end) of the context.
    """
    in_context = np.flatnonzero(offsets[:, 0] >= 0)
    starts, ends = offsets[in_context].T
    if not len(in_context) or start < starts[0] or end > ends[-1]:
        return 0, 0
    first_index = int(np.searchsorted(ends, start, side="right"))
    last_index = int(np.searchsorted(starts, end, side="left")) - 1
    # No token remains if the tokenizer drops all characters of an answer, e.g. a single control character.
    return (int(in_context[first_index]), int(in_context[last_index])) if first_index <= last_index else (0, 0)


def best_answer(
    context: str,
    windows: Iterable[tuple[ArrayLike, ArrayLike, NDArray[np.integer]]],
    n_best: int = 20,
    max_answer_length: int = 30,
) -> str:
    """Return the answer text with the highest sum of start and end logit over all windows of a context.

    `windows` contains start logits, end logits and offsets of each window, as for `best_span`. Ties are resolved in
    favour of the first window, then the earliest start, then the earliest end. The text is stripped of white space, and
    "" if no window has a valid span.
    """
    scored_spans = [span for window in windows if (span := best_span(*window, n_best, max_answer_length)) is not None]
    if not scored_spans:
        return ""
    _, start, end = max(scored_spans, key=itemgetter(0))
    return context[start:end].strip()


def best_span(
    start_logits: ArrayLike,
    end_logits: ArrayLike,
    offsets: NDArray[np.integer],
    n_best: int = 20,
    max_answer_length: int = 30,
) -> tuple[float, int, int] | None:
    """Return the best answer span of a window: the sum of its start and end logit, and its characters [start, end).

    The logits have the shape (tokens,) and the offsets (tokens, 2). The candidates combine the `n_best` start tokens
    with the `n_best` end tokens. A valid span has between 1 and `max_answer_length` tokens; without any, None.
    """
    in_context = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(in_context):
        return None
    start_scores = np.asarray(start_logits, dtype=np.float64)
    end_scores = np.asarray(end_logits, dtype=np.float64)
    # Equal logits are ranked by position, and the candidates are in ascending order, so that ties have a fixed result.
    starts, ends = (
        in_context[np.sort(np.argsort(-scores[in_context], kind="stable")[:n_best])]
        for scores in (start_scores, end_scores)
    )
    lengths = ends[None, :] - starts[:, None] + 1
    scores = start_scores[starts][:, None] + end_scores[ends][None, :]
    scores[(lengths < 1) | (lengths > max_answer_length)] = -np.inf
    start_index, end_index = np.unravel_index(scores.argmax(), scores.shape)
    if scores[start_index, end_index] == -np.inf:
        return None
    return float(scores[start_index, end_index]), int(offsets[starts[start_index], 0]), int(offsets[ends[end_index], 1])


def _find_answer_range(context: str, answer: Mapping[str, Sequence[Any]], id_: str) -> tuple[int, int]:
    text, start = answer["text"][0], answer["answer_start"][0]
    if not text.strip() or not context.startswith(text, start):
        raise UserError(
            f"question {id_}: the answer {text!r} is not at character {start} of its context, "
            f"which has {context[start : start + len(text)]!r} there; correct or remove this question"
        )
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def _truncate_questions(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[str]:
    # Some of SQuAD's questions start with so much white space that its byte-level tokens would fill a window.
    stripped_questions = [question.strip() for question in questions]
    encoded = tokenizer(stripped_questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [
        question if len(offsets) <= max_tokens else _cut_question(question, offsets, tokenizer, max_tokens)
        for question, offsets in zip(stripped_questions, encoded["offset_mapping"], strict=True)
    ]


def _cut_question(
    question: str, offsets: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> str:
    # A word that is cut in the middle may have more tokens than before, so the shortened text is tokenized again.
    for num_kept_tokens in range(max_tokens, 0, -1):
        text = question[: offsets[num_kept_tokens - 1][1]]
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= max_tokens:
            return text
    return ""
