"""Packing texts into blocks, checked against the tokens of each document."""

import itertools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from istar.errors import UserError
from istar.geometry.corpus import Packer, Source, batch, sources
from istar.models import tiny
from istar.tasks import demo
from istar.tasks.tokenizing import chunks

TEXTS = ["the cat sees a dog .", "a", " ".join(["dog cat"] * 40), "does the dog see ?"]


def bert() -> PreTrainedTokenizerFast:
    return tiny.tokenizer(demo.vocabulary())  # type: ignore[return-value]


def gpt() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with an end-of-text token and no special tokens around a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=["<end>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


@pytest.mark.parametrize("length", [4, 7, 512])
@pytest.mark.parametrize("make", [bert, gpt])
def test_blocks_hold_all_tokens_in_their_order(make: object, length: int) -> None:
    tokenizer = make()  # type: ignore[operator]
    end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    expected = list(
        itertools.chain.from_iterable([*tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in TEXTS)
    )
    blocks = list(Packer(tokenizer, length)(TEXTS))
    around = 2 if tokenizer.cls_token_id is not None else 0
    assert {len(block) for block in blocks[:-1]} <= {length}
    assert 0 < len(blocks[-1]) <= length
    if around:
        assert {(block[0], block[-1]) for block in blocks} == {(tokenizer.cls_token_id, tokenizer.sep_token_id)}
        blocks = [block[1:-1] for block in blocks]
    assert list(itertools.chain.from_iterable(blocks)) == expected


def test_a_block_without_room_for_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"a block of 2 tokens has no room"):
        Packer(bert(), 2)


def test_batches() -> None:
    one = batch([[5, 6, 7], [5, 6, 8]], 0)
    assert one["input_ids"].tolist() == [[5, 6, 7], [5, 6, 8]]
    assert one["attention_mask"].all()
    other = batch([[1], [2, 3]], 0)
    assert other["input_ids"].tolist() == [[1, 0], [2, 3]]
    assert torch.equal(other["attention_mask"], torch.tensor([[1, 0], [1, 1]]))
    assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunks([], 2)) == []


def test_sources(tmp_path: Path) -> None:
    for name in ("wiki.txt", "a=b.txt"):
        (tmp_path / name).write_text("x")
    wiki, odd = tmp_path / "wiki.txt", tmp_path / "a=b.txt"
    assert sources([str(wiki), f"other={wiki}", str(odd)]) == [
        Source("wiki", wiki), Source("other", wiki), Source("a=b", odd)
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"two sources are named wiki"):
        sources([str(wiki), str(wiki)])
    assert sources([f"combined={wiki}"]) == [Source("combined", wiki)]
    with pytest.raises(UserError, match=r"combined is the name of all texts together"):
        sources([f"combined={wiki}", str(odd)])
    with pytest.raises(UserError, match=r"there is no .*none\.txt; expected a file or folder"):
        sources([f"new={tmp_path / 'none.txt'}"])
