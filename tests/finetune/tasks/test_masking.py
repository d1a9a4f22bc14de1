"""The choice of masked tokens: shares, seeds and whole words."""

import numpy as np
import pytest
from transformers import BertTokenizer, PreTrainedTokenizerBase

from istar.errors import UserError
from istar.finetune.tasks.language_modelling import Masking, find_word_continuations
from istar.models import tiny
from istar.regularizers.points import IGNORED_LABEL

WORDS = [f"w{number}" for number in range(300)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny.make_tokenizer([*WORDS, *(f"##x{number}" for number in range(100))])


def encode_tokens(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> np.ndarray:
    return np.array(tokenizer.convert_tokens_to_ids(["[CLS]", *tokens, "[SEP]"]))


def test_the_shares_are_those_of_the_paper(tokenizer: PreTrainedTokenizerBase) -> None:
    random = np.random.default_rng(0)
    input_ids = encode_tokens(tokenizer, random.choice(WORDS, 100_000).tolist())
    masked, labels = Masking(tokenizer)(input_ids, (0, 1))
    is_chosen = labels != IGNORED_LABEL
    num_chosen = is_chosen.sum()
    # Six standard errors of a share p of n tokens.
    assert is_chosen[1:-1].mean() == pytest.approx(0.15, abs=6 * (0.15 * 0.85 / 100_000) ** 0.5)
    assert (masked[is_chosen] == tokenizer.mask_token_id).mean() == pytest.approx(
        0.8, abs=6 * (0.8 * 0.2 / num_chosen) ** 0.5
    )
    is_replaced = (masked[is_chosen] != input_ids[is_chosen]) & (masked[is_chosen] != tokenizer.mask_token_id)
    # One random token in 400 is the original one.
    assert is_replaced.mean() == pytest.approx(0.1, abs=6 * (0.1 * 0.9 / num_chosen) ** 0.5)
    assert not set(masked[is_chosen][is_replaced]) & set(tokenizer.all_special_ids)
    assert len(set(masked[is_chosen][is_replaced])) > 300
    assert (masked[~is_chosen] == input_ids[~is_chosen]).all()
    assert (labels[is_chosen] == input_ids[is_chosen]).all()
    assert not is_chosen[[0, -1]].any()


def test_equal_seeds_give_equal_masks_and_others_do_not(tokenizer: PreTrainedTokenizerBase) -> None:
    input_ids, masking = encode_tokens(tokenizer, WORDS), Masking(tokenizer)
    first, repeated, other = (masking(input_ids, seed) for seed in ((3, 0, 7), (3, 0, 7), (3, 1, 7)))
    assert all(np.array_equal(*pair) for pair in zip(first, repeated, strict=True))
    assert (first[1] != other[1]).any()


def test_each_text_has_a_token_to_predict_if_it_has_one(tokenizer: PreTrainedTokenizerBase) -> None:
    masking = Masking(tokenizer)
    for seed in range(50):
        assert (masking(encode_tokens(tokenizer, ["w1", "w2"]), (seed,))[1] != IGNORED_LABEL).any()
    masked, labels = masking(encode_tokens(tokenizer, []), (0,))
    assert masked.tolist() == encode_tokens(tokenizer, []).tolist()
    assert (labels == IGNORED_LABEL).all()


@pytest.mark.parametrize("whole_word", [False, True])
def test_ids_without_a_token_are_never_a_replacement(whole_word: bool) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: 100 + 2 * number for number, word in enumerate([*WORDS[:20], "##x"])}
    tokenizer = BertTokenizer({**{token: number for number, token in enumerate(special)}, **words})
    input_ids = encode_tokens(tokenizer, WORDS[:20] * 100)
    masked, labels = Masking(tokenizer, whole_word)(input_ids, (0,))
    is_replaced = (masked != input_ids) & (masked != tokenizer.mask_token_id)
    assert is_replaced.sum() > 10
    assert set(masked[is_replaced]) <= set(words.values())
    assert (labels != IGNORED_LABEL).sum() > 100


def test_whole_words(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = [token for number in range(3_000) for token in (f"w{number % 300}", "##x1", "##x2")[: 1 + number % 3]]
    _, labels = Masking(tokenizer, whole_word=True)(encode_tokens(tokenizer, tokens), (0,))
    chosen = (labels != IGNORED_LABEL)[1:-1]
    words: list[list[bool]] = []
    for token, is_chosen in zip(tokens, chosen, strict=True):
        if token.startswith("##"):
            words[-1].append(is_chosen)
        else:
            words.append([is_chosen])
    assert all(len(set(word)) == 1 for word in words)
    share = np.mean([word[0] for word in words])
    assert share == pytest.approx(0.15, abs=6 * (0.15 * 0.85 / len(words)) ** 0.5)


@pytest.mark.parametrize(
    ("tokens", "continuing"),
    [
        (["[CLS]", "un", "##able", "##", "."], ["##able"]),
        (["\u0120the", "re", ".", "\u0120", "<s>"], ["re"]),
        (["\u2581the", "re", ",", "<s>"], ["re"]),
        (["un", None, "##able"], ["##able"]),
        (["\u2581the", None, "re"], ["re"]),
    ],
)
def test_marks_of_words(tokens: list[str | None], continuing: list[str]) -> None:
    assert [
        token for token, is_continuation in zip(tokens, find_word_continuations(tokens), strict=True) if is_continuation
    ] == continuing


def test_tokenizers_without_marks_are_refused() -> None:
    with pytest.raises(UserError, match=r"task.whole_word=true: the tokenizer does not mark"):
        find_word_continuations(["a", "b"])
