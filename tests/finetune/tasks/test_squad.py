import json
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from istar.errors import UserError
from istar.finetune.tasks.squad import (
    best_answer,
    best_span,
    find_answer_tokens,
    make_training_features,
    tokenize_windows,
)
from tests.finetune.tasks.builders import make_tokenizer


def make_byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's: bytes, no special tokens, no token types, padding on the left."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: index for index, character in enumerate(["<pad>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


TOKENIZERS = {"letters": make_tokenizer(), "byte_level": make_byte_level_tokenizer()}


def make_examples(count: int, seed: int = 0):
    """Return random questions, contexts, answers that begin and end with words, and ids."""
    random = np.random.default_rng(seed)
    lexicon = ["cat", "dogs", "4.5", "r2d2", "café", "6½", "(so)", "umbrella", "x"]
    questions, contexts, answers = [], [], []
    for _ in range(count):
        words = random.choice(lexicon, random.integers(3, 60)).tolist()
        first = int(random.integers(len(words)))
        last = min(len(words) - 1, first + int(random.integers(4)))
        start = len(" ".join([*words[:first], ""]))
        questions.append(" ".join(random.choice(lexicon, random.integers(1, 4))))
        contexts.append(" ".join(words))
        answers.append({"text": [" ".join(words[first : last + 1])], "answer_start": [start]})
    return questions, contexts, answers, [f"q{row}" for row in range(count)]


@pytest.mark.parametrize(
    ("name", "max_length", "stride"),
    [("letters", 64, 16), ("letters", 40, 0), ("letters", 8, 128), ("byte_level", 64, 128), ("byte_level", 9, 3)],
)
def test_windows_cover_the_context_and_overlap_by_the_stride(name, max_length, stride):
    tokenizer = TOKENIZERS[name]
    questions, contexts, *_ = make_examples(8)
    features = tokenize_windows(questions, contexts, tokenizer, max_length, stride)
    assert max(map(len, features["input_ids"])) <= max_length
    assert ("token_type_ids" in features) == (name == "letters")
    content_length = max_length - tokenizer.num_special_tokens_to_add(True)
    overlap = min(stride, max_length // 3, content_length - content_length // 2 - 1)
    for row, context in enumerate(contexts):
        context_offsets = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        window_offsets = [
            offsets[offsets[:, 0] >= 0]
            for offsets, example in zip(features["offset_mapping"], features["example_id"], strict=True)
            if example == row
        ]
        for window, next_window in pairwise(window_offsets):
            np.testing.assert_array_equal(window[len(window) - overlap :], next_window[:overlap])
        assert {tuple(pair) for part in window_offsets for pair in part.tolist()} == set(context_offsets)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_positions_decode_to_the_answer_in_every_window_that_holds_it(name):
    questions, contexts, answers, ids = make_examples(60)
    arguments = TOKENIZERS[name], 48, 16
    training = make_training_features(questions, contexts, answers, ids, *arguments)
    evaluation = tokenize_windows(questions, contexts, *arguments)
    assert training["input_ids"] == evaluation["input_ids"]
    assert "offset_mapping" not in training
    num_answers = 0
    positions = zip(training["start_positions"], training["end_positions"], strict=True)
    for (first, last), row, offsets in zip(
        positions, evaluation["example_id"], evaluation["offset_mapping"], strict=True
    ):
        text, start = answers[row]["text"][0], answers[row]["answer_start"][0]
        context_offsets = offsets[offsets[:, 0] >= 0]
        if context_offsets[0, 0] <= start and start + len(text) <= context_offsets[-1, 1]:
            num_answers += 1
            assert contexts[row][offsets[first, 0] : offsets[last, 1]].strip() == text
        else:
            assert (first, last) == (0, 0)
    assert num_answers >= 30


@pytest.mark.parametrize(("start", "end"), [(first, last) for first in range(6) for last in range(first + 1, 7)])
def test_tokens_that_touch_an_answer_are_not_of_it(start, end):
    offsets = np.array([[-1, -1], *([position, position + 1] for position in range(6)), [-1, -1]])
    assert find_answer_tokens(offsets, start, end) == (start + 1, end)


def test_white_space_around_an_answer():
    context = "one two three"
    answers = [{"text": [" two "], "answer_start": [3]}, {"text": ["three"], "answer_start": [8]}]
    features = make_training_features(["q"] * 2, [context] * 2, answers, list("ab"), make_tokenizer(), 64)
    assert features["start_positions"] == [6, 9]
    assert features["end_positions"] == [8, 13]


@pytest.mark.parametrize(("text", "start"), [("two", 5), ("Two", 4), ("three four", 8), (" ", 3), ("two", 400)])
def test_a_misplaced_answer_names_its_question(text, start):
    answers = [{"text": [text], "answer_start": [start]}]
    with pytest.raises(UserError, match="question 57ab:"):
        make_training_features(["q"], ["one two three"], answers, ["57ab"], make_tokenizer(), 64)


def test_white_space_around_a_question_takes_no_tokens():
    features, padded_features = (
        tokenize_windows([question], ["x y z"], make_byte_level_tokenizer(), 32)
        for question in ("who?", " \n" * 5000 + "who?  ")
    )
    assert features["input_ids"] == padded_features["input_ids"]
    assert len(features["input_ids"]) == 1


@pytest.mark.parametrize("max_length", [8, 16, 64])
def test_a_long_question_is_cut_to_half_of_a_feature(max_length):
    features = tokenize_windows(["abc def " * 40], ["uvw " * 30], make_tokenizer(), max_length)
    limit = (max_length - 3) // 2
    for ids, offsets in zip(features["input_ids"], features["offset_mapping"], strict=True):
        question_length = int(np.flatnonzero(offsets[:, 0] >= 0)[0]) - 2
        assert question_length <= limit
        assert question_length >= limit - 3
        assert len(ids) <= max_length


def test_empty_texts_make_one_feature_without_an_answer():
    features = tokenize_windows([""], [""], make_tokenizer(), 16)
    assert len(features["input_ids"]) == 1
    num_tokens = len(features["input_ids"][0])
    assert best_answer("", [(np.ones(num_tokens), np.ones(num_tokens), features["offset_mapping"][0])]) == ""
    assert find_answer_tokens(features["offset_mapping"][0], 0, 1) == (0, 0)


def naive_best_span(start, end, offsets, n_best, max_answer_length):
    context_tokens = [token for token in range(len(offsets)) if offsets[token][0] >= 0]
    starts = sorted(context_tokens, key=lambda token: (-start[token], token))[:n_best]
    ends = sorted(context_tokens, key=lambda token: (-end[token], token))[:n_best]
    spans = [
        (-(start[first] + end[last]), first, last)
        for first in starts
        for last in ends
        if first <= last < first + max_answer_length
    ]
    if not spans:
        return None
    score, best_first, best_last = min(spans)
    return -score, offsets[best_first][0], offsets[best_last][1]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("ties", [False, True])
def test_best_span_agrees_with_brute_force(seed, ties):
    random = np.random.default_rng(seed)
    num_tokens, question_length = int(random.integers(2, 60)), int(random.integers(0, 8))
    offsets = np.stack([np.arange(num_tokens) * 3, np.arange(num_tokens) * 3 + 2], axis=1)
    offsets[:question_length] = offsets[-1:] = -1
    start, end = random.integers(-2, 3, (2, num_tokens)) if ties else random.normal(size=(2, num_tokens))
    n_best, max_answer_length = int(random.integers(1, 25)), int(random.integers(1, 35))
    expected = naive_best_span(start.tolist(), end.tolist(), offsets.tolist(), n_best, max_answer_length)
    assert best_span(start, end, offsets, n_best, max_answer_length) == pytest.approx(expected)


def test_best_answer_looks_over_all_windows_and_settles_ties_by_order():
    context = "red green blue"
    first = np.array([[-1, -1], [0, 3], [4, 9], [-1, -1]])
    second = np.array([[-1, -1], [4, 9], [9, 14], [-1, -1]])
    low, high = np.array([9.0, 0, 1, 9]), np.array([9.0, 0, 3, 9])
    assert best_answer(context, [(low, low, first), (high, high, second)]) == "blue"
    assert best_answer(context, [(low, low, first), (low, low, second)]) == "green"
    assert best_answer(context, [(low, low, second), (low, low, first)]) == "blue"


def test_real_questions_keep_their_answers(real_data, minilm):
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    articles = json.loads((real_data / "squad" / "dev-v1.1.json").read_text("utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    rows = [
        (qa["question"], paragraph["context"], qa["answers"][0], qa["id"])
        for paragraph in paragraphs
        for qa in paragraph["qas"]
    ]
    questions, contexts, golds, ids = map(list, zip(*rows, strict=True))
    answers = [{"text": [gold["text"]], "answer_start": [gold["answer_start"]]} for gold in golds]
    training = make_training_features(questions, contexts, answers, ids, tokenizer, 96, 32)
    evaluation = tokenize_windows(questions, contexts, tokenizer, 96, 32)
    num_exact, rows_with_answer = 0, set()
    for first, last, row, offsets in zip(
        training["start_positions"],
        training["end_positions"],
        evaluation["example_id"],
        evaluation["offset_mapping"],
        strict=True,
    ):
        start = golds[row]["answer_start"]
        end = start + len(golds[row]["text"])
        context_offsets = offsets[offsets[:, 0] >= 0]
        if context_offsets[0, 0] > start or context_offsets[-1, 1] < end:
            assert (first, last) == (0, 0)
            continue
        rows_with_answer.add(row)
        # Every token of the answer and no other; a word such as "20-yard" may reach over its ends.
        assert offsets[first, 0] <= start < offsets[first, 1]
        assert offsets[last, 0] < end <= offsets[last, 1]
        num_exact += contexts[row][offsets[first, 0] : offsets[last, 1]] == golds[row]["text"]
        logits = np.zeros((2, len(offsets)))
        logits[0, first] = logits[1, last] = 9.0
        if last - first < 30:
            expected = contexts[row][offsets[first, 0] : offsets[last, 1]]
            assert best_answer(contexts[row], [(*logits, offsets)]) == expected
    assert len(rows_with_answer) > 0.95 * len(rows)
    assert num_exact > 0.95 * len(rows_with_answer)
