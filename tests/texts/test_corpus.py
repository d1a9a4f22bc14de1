"""Dividing texts into blocks, checked against the tokens of each document."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from istar.errors import UserError
from istar.models import tiny
from istar.texts import corpus, demo, tokenizing
from istar.texts.corpus import Block, Blocks, Source, pad_batch, parse_sources, shuffle_documents
from istar.texts.tokenizing import chunks

MakeTokenizer = Callable[[], PreTrainedTokenizerFast]
TEXTS = ["the cat sees a dog .", "a", " ".join(["dog cat"] * 40), "does the dog see ?"]


def bert() -> PreTrainedTokenizerFast:
    return tiny.make_tokenizer(demo.vocabulary())  # type: ignore[return-value]


def gpt() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with an end-of-text token and no special tokens around a text."""
    bpe_tokenizer = Tokenizer(models.BPE())
    bpe_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe_tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=["<end>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer, eos_token="<end>")


@pytest.mark.parametrize("size", [2, 3, 40, 100])
def test_documents_are_shuffled_by_a_buffer(size: int) -> None:
    texts = list(map(str, range(40)))
    orders = [list(shuffle_documents(texts, size, seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != texts
    assert orders[0] != orders[2]
    assert all(sorted(order, key=int) == texts for order in orders)
    assert all(int(text) <= place + size for order in orders for place, text in enumerate(order))
    assert list(shuffle_documents(texts, 0, 0)) == texts


def test_the_first_document_of_a_shuffled_text_is_any_of_the_buffer() -> None:
    iterator = iter(range(1_000_000))
    first_documents = Counter(next(shuffle_documents(map(str, range(9)), 4, seed)) for seed in range(400))
    assert first_documents.keys() == set("0123")
    assert min(first_documents.values()) > 60
    next(shuffle_documents(map(str, iterator), 10, 0))
    assert next(iterator) == 11


def test_few_long_documents_are_tokenized_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_TOKENIZER_CHARACTERS", 1_000)
    iterator = iter(range(1_000))
    blocks = Blocks(bert(), 16)("the cat " * 50 + str(number) for number in iterator)
    assert next(blocks).document_index == 0
    assert next(iterator) == 3


@pytest.mark.parametrize("documents", ["separate", "packed"])
@pytest.mark.parametrize("make_tokenizer", [bert, gpt])
def test_a_long_document_is_tokenized_in_parts(
    make_tokenizer: MakeTokenizer, documents: corpus.Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the dog", "the cat  sees\ta dog . " * 50, "", "a"]
    expected_reading, reading = corpus.ReadCounts(), corpus.ReadCounts()
    expected = list(Blocks(make_tokenizer(), 9, documents)(texts, expected_reading))
    monkeypatch.setattr(tokenizing, "_TOKENIZER_CHARACTERS", 100)
    blocks = Blocks(make_tokenizer(), 9, documents)(texts, reading)
    first_blocks = list(itertools.islice(blocks, 2))
    assert (reading.documents, reading.characters < 200) == (2, True)
    assert [*first_blocks, *blocks] == expected
    assert reading.documents == expected_reading.documents == 4
    assert reading.characters == reading.bytes == expected_reading.characters


def test_the_parts_of_a_text_are_cut_before_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_TOKENIZER_CHARACTERS", 8)
    parts = list(tokenizing.tokenize_parts(["the cat sees", "sees\n  a.........", "", " " * 17], bert()))
    texts = ["the cat", " sees", "sees\n ", " a......", "...", "", *[" " * 8] * 2, " "]
    assert [part.text for part in parts] == texts
    assert [part.text for part in parts if part.is_last] == [" sees", "...", "", " "]
    [first, *_] = tokenizing.tokenize(["the cat sees"], bert())
    assert first == bert()("the cat sees", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("documents", ["separate", "packed"])
def test_documents_are_counted_as_they_are_read(documents: corpus.Documents) -> None:
    """The tokenizer reads all texts at once, but a document is counted only when its first block is returned."""
    texts = ["the cat", "a dög", "does the dog see a cat ?", "the dog\nthe cat"]
    reading = corpus.ReadCounts()
    for block in Blocks(bert(), 512, documents)(texts, reading):
        num_documents_read = block.document_index + 1 if documents == "separate" else 4
        assert (reading.documents, reading.characters) == (
            num_documents_read,
            sum(map(len, texts[:num_documents_read])),
        )
    # The letter ö has two bytes.
    assert reading.bytes == sum(map(len, texts)) + 1
    total = corpus.ReadCounts(documents=1, seconds=0.5)
    total.add(reading)
    assert (total.documents, total.characters, total.seconds) == (5, reading.characters, 0.5)
    assert reading.sentences == 5


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0), (" \n ... \n", 0), ("no end", 1), ("One. Two! Three? Four…", 4), ("It costs 3.5 dollars. Or 4.", 2),
        ("e.g. this one", 1), ('He said "No." Then he left.', 2), ("A heading\nA sentence.\n\nAnother one.", 3),
        ("one。two。three", 3), ("Été. Élan. Über", 3), ("see fig. 3 of the paper", 2), ("Why?! (Because.) So", 3),
    ],
)  # fmt: skip
def test_sentences(text: str, sentences: int) -> None:
    assert corpus.count_sentences(text) == sentences


@pytest.mark.parametrize("length", [4, 7, 512])
@pytest.mark.parametrize("make_tokenizer", [bert, gpt])
def test_packed_blocks_hold_all_tokens_in_their_order(make_tokenizer: MakeTokenizer, length: int) -> None:
    tokenizer = make_tokenizer()
    end_id = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    expected_tokens, expected_is_special = [], []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected_tokens += [*ids, end_id]
        expected_is_special += [*[False] * len(ids), True]
    blocks = list(Blocks(tokenizer, length, "packed")(TEXTS))
    assert {len(block.tokens) for block in blocks[:-1]} <= {length}
    assert 0 < len(blocks[-1].tokens) <= length
    assert all(len(block.tokens) == len(block.is_special) for block in blocks)
    assert sum(block.num_text_tokens for block in blocks) == expected_is_special.count(False)
    if tokenizer.cls_token_id is not None:
        assert {(b.tokens[0], b.tokens[-1]) for b in blocks} == {(tokenizer.cls_token_id, tokenizer.sep_token_id)}
        assert all(block.is_special[0] and block.is_special[-1] for block in blocks)
        blocks = [Block(block.tokens[1:-1], block.is_special[1:-1]) for block in blocks]
    assert list(itertools.chain.from_iterable(block.tokens for block in blocks)) == expected_tokens
    assert list(itertools.chain.from_iterable(block.is_special for block in blocks)) == expected_is_special


@pytest.mark.parametrize("length", [4, 7, 512])
@pytest.mark.parametrize("make_tokenizer", [bert, gpt])
def test_separate_documents_share_no_block(make_tokenizer: MakeTokenizer, length: int) -> None:
    tokenizer = make_tokenizer()
    blocks = Blocks(tokenizer, length)(TEXTS)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids_read: list[int] = []
        while len(ids_read) < len(ids):
            block = next(blocks)
            text_ids = [id_ for id_, is_special in zip(block.tokens, block.is_special, strict=True) if not is_special]
            has_special_tokens = tokenizer.cls_token_id is not None
            assert block.tokens == (
                [tokenizer.cls_token_id, *text_ids, tokenizer.sep_token_id] if has_special_tokens else text_ids
            )
            ids_read += text_ids
            assert len(block.tokens) == length or ids_read == ids
        assert ids_read == ids
    assert next(blocks, None) is None


def test_pieces_of_a_document_and_runs_of_packed_blocks_have_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [len(bert()(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    expected = [index for index, length in enumerate(lengths) for _ in range(math.ceil(length / 5))]
    assert [block.document_index for block in Blocks(bert(), 7)(TEXTS)] == expected
    monkeypatch.setattr(corpus, "RUN_LENGTH", 3)
    packed_indices = [block.document_index for block in Blocks(bert(), 7, "packed")(TEXTS)]
    assert packed_indices == [index // 3 for index in range(len(packed_indices))]


def test_windows_are_sorted_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "WINDOW_SIZE", 4)
    blocks = ["a", "bbb", "cc", "dd", "e", "ff"]
    assert list(corpus.sorted_windows(blocks, len)) == [["bbb", "cc", "dd", "a"], ["ff", "e"]]


@pytest.mark.parametrize("num_tokens", [1, 40, 100, 5_000])
def test_batches_hold_as_many_blocks_as_fit(num_tokens: int) -> None:
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(num_tokens)
    lengths = torch.randint(1, 41, (200,), generator=generator).tolist()
    batches = list(corpus.split_into_batches(lengths, lambda length: length, cpu, num_tokens))
    assert [length for batch in batches for length in batch] == lengths
    for batch, next_batch in itertools.pairwise([*batches, []]):
        assert len(batch) == 1 or len(batch) * max(batch) <= num_tokens
        if next_batch:
            assert (len(batch) + 1) * max(*batch, next_batch[0]) > num_tokens


def test_the_default_size_of_batches_depends_on_the_device() -> None:
    for device, num_blocks in (("cpu", 64), ("meta", 512)):
        batches = corpus.split_into_batches([32] * 600, lambda length: length, torch.device(device))
        assert len(next(batches)) == num_blocks


def test_odd_texts_and_wrong_arguments() -> None:
    assert [block.num_text_tokens for block in Blocks(bert(), 8)(["", "a", "\u200b"])] == [1]
    assert [block.is_special for block in Blocks(gpt(), 8)(["<end>"])] == [b"\0"]
    with pytest.raises(UserError, match=r"a block of 2 tokens has no room"):
        Blocks(bert(), 2)
    with pytest.raises(UserError, match=r"documents is 'joined'; expected one of separate, packed"):
        Blocks(bert(), 8, "joined")  # type: ignore[arg-type]


def test_batches() -> None:
    equal, padded = (
        [Block([5, 6, 7], b"\1\0\0"), Block([5, 6, 8], b"\0\0\1")],
        [Block([1], b"\0"), Block([2, 3], b"\0\1")],
    )
    batch = pad_batch(equal, 9)
    assert batch.input_ids.tolist() == [[5, 6, 7], [5, 6, 8]]
    assert batch.attention_mask.all()
    assert batch.is_included.all()
    batch = pad_batch(padded, 9)
    assert batch.input_ids.tolist() == [[1, 9], [2, 3]]
    assert batch.attention_mask.tolist() == [[1, 0], [1, 1]]
    assert batch.is_included.tolist() == [[True, False], [True, True]]
    assert pad_batch(padded, 9, has_special_tokens=False).is_included.tolist() == [[True, False], [True, False]]
    assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunks([], 2)) == []


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wiki.txt", "a=b.txt"):
        (tmp_path / name).write_text("x")
    wiki_path, path_with_equals_sign = tmp_path / "wiki.txt", tmp_path / "a=b.txt"
    assert parse_sources([str(wiki_path), f"other={wiki_path}", str(path_with_equals_sign)]) == [
        Source("wiki", wiki_path), Source("other", wiki_path), Source("a=b", path_with_equals_sign)
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"two sources are named wiki"):
        parse_sources([str(wiki_path), str(wiki_path)])
    assert parse_sources([f"combined={wiki_path}"]) == [Source("combined", wiki_path)]
    with pytest.raises(UserError, match=r"combined is the name of all texts together"):
        parse_sources([f"combined={wiki_path}", str(path_with_equals_sign)])
    with pytest.raises(UserError, match=r"there is no .*none\.txt; expected a file or folder"):
        parse_sources([f"new={tmp_path / 'none.txt'}"])
    assert parse_sources([f"x={path_with_equals_sign}"]) == [Source("x", path_with_equals_sign)]
    with pytest.raises(UserError, match=r"'\.\.' cannot name a folder"):
        parse_sources([f"..={wiki_path}"])
    monkeypatch.chdir(tmp_path)
    assert parse_sources(["."]) == [Source(tmp_path.name, Path())]


def test_a_text_is_any_column_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("index\tsentence1\tsentence2\n0\tA cat.\tA dog.\n1\tTwo cats.\tTwo dogs.\n")
    (tmp_path / "rows.jsonl").write_text('{"id": "1", "body": "A bird."}\n')
    (tmp_path / "plain.txt").write_text("A line.\n")
    first, second = parse_sources([f"{tmp_path / 'dev.tsv'}:sentence1", f"b={tmp_path / 'dev.tsv'}:sentence2"])
    assert (first.name, second.name, first.path) == ("dev-sentence1", "b", tmp_path / "dev.tsv")
    assert list(first.read_documents()) == ["A cat.", "Two cats."]
    assert list(second.read_documents()) == ["A dog.", "Two dogs."]
    assert first.identify() != second.identify()
    [folder] = parse_sources([f"{tmp_path / 'rows.jsonl'}:body"])
    assert list(folder.read_documents()) == ["A bird."]
    for text, message in (
        ("dev.tsv", "no column 'text'"),
        ("dev.tsv:body", "no column 'body'"),
        ("plain.txt:a", "plain"),
    ):
        [source] = parse_sources([str(tmp_path / text)])
        with pytest.raises(UserError, match=message):
            list(source.read_documents())
    colon = tmp_path / "a:b"
    colon.write_text("A line.\n")
    assert parse_sources([str(colon)]) == [Source("a:b", colon)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/web", ("", "train", "text")),
        ("org/web:en:train[:10%]+test:sentence@main", ("en", "train[:10%]+test", "sentence")),
        ("org/web::test:body", ("", "test", "body")),
        ("org/web:::body", ("", "train", "body")),
    ],
)
def test_a_text_is_any_column_of_a_data_set(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, str, str]
) -> None:
    asked = []

    def load(name: str, configuration: str | None, split: str, revision: str | None) -> tuple[Dataset, str]:
        asked.append((configuration or "", split))
        return Dataset.from_dict({"text": ["t"], "sentence": ["s"], "body": ["b"]}), "commit"

    monkeypatch.setattr(corpus, "load_dataset_split", load)
    [source] = parse_sources([text])
    assert (*asked[0], source.column) == expected
    assert list(source.read_documents()) == [expected[2][0]]
