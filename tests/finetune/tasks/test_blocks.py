"""Blocks of tokens, compared with lists that are cut in plain Python."""

from pathlib import Path

import numpy as np
import pytest

from istar.errors import UserError
from istar.finetune.tasks.blocks import STARTS_FILE, Corpus, cut_blocks, open_corpus, write_corpus

DOCUMENTS = [[11, 12, 13], [14], [15, 16, 17, 18, 19, 20, 21], [22, 23]]
FLAT = [token for document in DOCUMENTS for token in document]
SPECIAL_TOKENS = pytest.mark.parametrize(("prefix", "suffix"), [((), ()), ((1,), (2,))])


def write_and_open(documents: list[list[int]], vocabulary_size: int, folder: Path) -> Corpus:
    write_corpus(documents, vocabulary_size, folder)
    corpus = open_corpus(folder)
    assert corpus is not None
    return corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_and_open(DOCUMENTS, 100, tmp_path)


def find_document(token: int) -> int:
    """Return the number of the document that contains a token."""
    return next(number for number, document in enumerate(DOCUMENTS) if token in document)


def test_the_file_holds_all_documents(corpus: Corpus) -> None:
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.tolist() == FLAT
    assert corpus.starts.tolist() == [0, 3, 4, 11, 13]
    assert len(corpus) == 4


@pytest.mark.parametrize(("vocabulary", "size"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_take_two_bytes_where_that_is_enough(tmp_path: Path, vocabulary: int, size: int) -> None:
    corpus = write_and_open([[0, vocabulary - 1]], vocabulary, tmp_path)
    [path] = tmp_path.glob("tokens.*")
    assert path.stat().st_size == 2 * corpus.tokens.itemsize == 2 * size
    assert corpus.tokens.tolist() == [0, vocabulary - 1]


def test_what_is_not_whole_is_no_corpus(corpus: Corpus, tmp_path: Path) -> None:
    [path] = tmp_path.glob("tokens.*")
    path.write_bytes(path.read_bytes()[:-2])
    assert open_corpus(tmp_path) is None
    write_corpus(DOCUMENTS, 100, tmp_path)
    assert open_corpus(tmp_path) is not None
    (tmp_path / STARTS_FILE).unlink()
    assert open_corpus(tmp_path) is None
    assert open_corpus(tmp_path / "nowhere") is None


@pytest.mark.parametrize("length", [3, 5, 6, 13])
@SPECIAL_TOKENS
def test_packed_blocks_hold_the_tokens_in_their_order(
    corpus: Corpus, length: int, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> None:
    blocks = cut_blocks(corpus, length, prefix, suffix)
    capacity = length - len(prefix) - len(suffix)
    parts = [FLAT[start : start + capacity] for start in range(0, len(FLAT), capacity)]
    expected_parts = [part for part in parts if len(part) == capacity]
    assert [blocks.input_ids(block).tolist() for block in range(len(blocks))] == [
        [*prefix, *part, *suffix] for part in expected_parts
    ]
    assert blocks.lengths.tolist() == [len(prefix) + len(part) + len(suffix) for part in expected_parts]
    for block, part in enumerate(expected_parts):
        documents = [find_document(token) - find_document(part[0]) for token in part]
        expected = [documents[0]] * len(prefix) + documents + [documents[-1]] * len(suffix)
        assert blocks.document_numbers(block).tolist() == expected


@pytest.mark.parametrize("length", [3, 4, 99])
@SPECIAL_TOKENS
def test_separate_blocks_are_parts_of_one_document(
    corpus: Corpus, length: int, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> None:
    blocks = cut_blocks(corpus, length, prefix, suffix, packing=False)
    capacity = length - len(prefix) - len(suffix)
    parts = [
        document[start : start + capacity] for document in DOCUMENTS for start in range(0, len(document), capacity)
    ]
    assert [blocks.input_ids(block).tolist() for block in range(len(blocks))] == [
        [*prefix, *part, *suffix] for part in parts
    ]
    assert blocks.lengths.tolist() == [len(blocks.input_ids(block)) for block in range(len(blocks))]
    assert all((blocks.document_numbers(block) == 0).all() for block in range(len(blocks)))


@pytest.mark.parametrize("packing", [True, False])
def test_blocks_without_room_and_an_empty_corpus_are_refused(packing: bool, corpus: Corpus) -> None:
    with pytest.raises(UserError, match=r"a block of 2 tokens has no room"):
        cut_blocks(corpus, 2, (1,), (2,), packing)
    empty_corpus = Corpus(np.empty(0, np.uint16), np.array([0]))
    with pytest.raises(UserError, match=r"the text is empty"):
        cut_blocks(empty_corpus, 8, packing=packing)
