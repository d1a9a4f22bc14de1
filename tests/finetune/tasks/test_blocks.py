"""Blocks of tokens, compared with lists that are cut in plain Python."""

from pathlib import Path

import numpy as np
import pytest

from istar.errors import UserError
from istar.finetune.tasks.blocks import (
    STARTS_FILE,
    TOKENS_FILE,
    Corpus,
    append_separator,
    cut_packed_blocks,
    cut_separate_blocks,
    open_corpus,
    write_corpus,
)

DOCUMENTS = [[11, 12, 13], [], [14], [15, 16, 17, 18, 19, 20, 21], [22, 23]]
FLAT = [token for document in DOCUMENTS for token in document]
SPECIAL_TOKENS = pytest.mark.parametrize(("prefix", "suffix"), [((), ()), ((1,), (2,))])


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_corpus(DOCUMENTS, 100, tmp_path)


def find_document(token: int) -> int:
    """Return the number of the document that contains a token, where empty documents are not counted."""
    return next(number for number, document in enumerate(filter(None, DOCUMENTS)) if token in document)


def test_the_file_holds_all_documents(corpus: Corpus, tmp_path: Path) -> None:
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.tolist() == FLAT
    assert corpus.starts.tolist() == [0, 3, 4, 11, 13]
    assert len(corpus) == 4
    assert (tmp_path / TOKENS_FILE).stat().st_size == 2 * len(FLAT)


@pytest.mark.parametrize(("vocabulary", "size"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_take_two_bytes_where_that_is_enough(tmp_path: Path, vocabulary: int, size: int) -> None:
    corpus = write_corpus([[0, vocabulary - 1]], vocabulary, tmp_path)
    assert corpus.tokens.itemsize == size
    assert corpus.tokens.tolist() == [0, vocabulary - 1]


def test_many_tokens_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("istar.finetune.tasks.blocks._TOKENS_PER_WRITE", 4)
    assert write_corpus(iter(DOCUMENTS), 100, tmp_path).tokens.tolist() == FLAT


def test_what_is_not_whole_is_no_corpus(corpus: Corpus, tmp_path: Path) -> None:
    reopened = open_corpus(tmp_path)
    assert reopened is not None
    assert reopened.tokens.tolist() == FLAT
    (tmp_path / TOKENS_FILE).write_bytes((tmp_path / TOKENS_FILE).read_bytes()[:-2])
    assert open_corpus(tmp_path) is None
    write_corpus(DOCUMENTS, 100, tmp_path)
    (tmp_path / STARTS_FILE).unlink()
    assert open_corpus(tmp_path) is None
    assert open_corpus(tmp_path / "nowhere") is None


def test_what_a_writer_did_not_describe_is_no_corpus(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer replaces the tokens by equally many others, and is killed before it writes their description."""

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("istar.finetune.tasks.blocks.write_text", kill)
    with pytest.raises(KeyboardInterrupt):
        write_corpus([document[::-1] for document in DOCUMENTS], 100, tmp_path)
    assert open_corpus(tmp_path) is None


def test_a_writer_that_fails_leaves_no_corpus(tmp_path: Path) -> None:
    def documents() -> object:
        yield [1]
        raise UserError("not UTF-8")

    with pytest.raises(UserError, match="UTF-8"):
        write_corpus(documents(), 100, tmp_path)  # type: ignore[arg-type]
    assert open_corpus(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [3, 5, 6, 15, 99])
@SPECIAL_TOKENS
def test_packed_blocks_hold_the_tokens_in_their_order(
    corpus: Corpus, length: int, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> None:
    blocks = cut_packed_blocks(corpus, length, prefix, suffix)
    capacity = length - len(prefix) - len(suffix)
    parts = [FLAT[start : start + capacity] for start in range(0, len(FLAT), capacity)]
    expected_parts = [part for part in parts if len(part) == capacity] or parts
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
    blocks = cut_separate_blocks(corpus, length, prefix, suffix)
    capacity = length - len(prefix) - len(suffix)
    parts = [
        document[start : start + capacity] for document in DOCUMENTS for start in range(0, len(document), capacity)
    ]
    assert [blocks.input_ids(block).tolist() for block in range(len(blocks))] == [
        [*prefix, *part, *suffix] for part in parts
    ]
    assert blocks.lengths.tolist() == [len(blocks.input_ids(block)) for block in range(len(blocks))]
    assert all((blocks.document_numbers(block) == 0).all() for block in range(len(blocks)))


@pytest.mark.parametrize("cut", [cut_packed_blocks, cut_separate_blocks])
def test_blocks_without_room_and_an_empty_corpus_are_refused(cut: object, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a block of 2 tokens has no room"):
        cut(corpus, 2, (1,), (2,))  # type: ignore[operator]
    with pytest.raises(UserError, match=r"the text is empty"):
        cut(write_corpus([[]], 100, tmp_path / "empty"), 8)  # type: ignore[operator]


def test_documents_are_followed_by_the_separator() -> None:
    assert list(append_separator(DOCUMENTS, 9)) == [[*document, 9] if document else [] for document in DOCUMENTS]
    assert list(append_separator(DOCUMENTS, None)) == DOCUMENTS
