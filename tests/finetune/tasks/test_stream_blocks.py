"""Blocks of a stream, compared with all documents tokenized, joined and cut in plain Python."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from istar.errors import UserError
from istar.finetune.tasks.document_stream import DocumentStream
from istar.finetune.tasks.language_modelling import BlockRows, Masking
from istar.finetune.tasks.stream_blocks import StreamedBlocks, StreamPosition
from istar.models import tiny
from istar.texts import demo

TEXTS = demo.generate("mlm", "train")["text"][:90]
SHARDS = [TEXTS[:40], TEXTS[40:41], TEXTS[41:70], TEXTS[70:]]
LENGTH, WINDOW = 11, 3  # tokens of a block, blocks of a window
TOKENIZER = tiny.make_tokenizer(demo.vocabulary())
CLS, SEP = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
PACKED = pytest.mark.parametrize("packing", [True, False])


def make_blocks(packing: bool = True, shards: list[list[str]] = SHARDS, **settings: Any) -> StreamedBlocks:
    documents = DocumentStream([partial(iter, shard) for shard in shards], "")
    values = {"masking": None, "seed": 5, "window_blocks": WINDOW} | settings
    return StreamedBlocks(documents, TOKENIZER, [CLS], [SEP], LENGTH, packing, **values)


def cut_naively(texts: list[str], packing: bool) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each block, and the document numbers in it, which begin with 0."""
    documents = [[*TOKENIZER(text, add_special_tokens=False)["input_ids"], SEP] for text in texts]
    numbered = [[(token, number) for token in document] for number, document in enumerate(documents)]
    units = [list(itertools.chain(*numbered))] if packing else numbered
    width = LENGTH - 2
    pieces = [unit[start : start + width] for unit in units for start in range(0, len(unit), width)]
    pieces = [piece for piece in pieces if len(piece) == width or not packing]
    blocks = []
    for piece in pieces:
        numbers = [number - piece[0][1] for _, number in piece]
        blocks.append(([CLS, *(token for token, _ in piece), SEP], [0, *numbers, numbers[-1]]))
    return blocks


def to_lists(rows: BlockRows) -> list[tuple[list[int], list[int]]]:
    return [(rows[index]["input_ids"].tolist(), rows[index]["documents"].tolist()) for index in range(len(rows))]


@PACKED
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (0, 3)])
def test_windows_have_the_blocks_of_all_documents_of_a_process(packing: bool, rank: int, world_size: int) -> None:
    blocks = make_blocks(packing)
    windows = list(blocks.iterate_windows(2, rank, world_size))
    texts = [text for _, _, text in blocks.documents.iterate((5, 2), rank, world_size)]
    expected = cut_naively(texts, packing)
    assert len(expected) > 3 * WINDOW
    assert [block for window in windows for block in to_lists(window.rows)] == expected
    assert {len(window.rows) for window in windows[:-1]} == {WINDOW}
    assert all(sorted(window.order) == list(range(len(window.rows))) for window in windows)


@PACKED
def test_a_window_is_cut_again_from_its_position(packing: bool) -> None:
    blocks = make_blocks(packing, masking=Masking(TOKENIZER))
    windows = list(blocks.iterate_windows(1, 1, 2))
    assert any(window.start.token > 0 for window in windows)  # a window begins within a document
    for number, window in enumerate(windows):
        assert window.start.window == number
        again = next(blocks.iterate_windows(1, 1, 2, StreamPosition(*window.start)))
        assert np.array_equal(again.order, window.order)
        for index in range(len(window.rows)):
            row, expected = (rows.training_row(index, 1) for rows in (again.rows, window.rows))
            assert all(np.array_equal(row[name], expected[name]) for name in expected)


def test_orders_and_masks_depend_on_epoch_process_window_and_seed() -> None:
    """With a single shard, whose documents come in the same order each time."""

    def list_windows(seed: int = 5, epoch: int = 0, rank: int = 0) -> list[tuple[Any, ...]]:
        blocks = make_blocks(shards=[TEXTS * 3], masking=Masking(TOKENIZER), seed=seed, window_blocks=20)
        windows = list(blocks.iterate_windows(epoch, rank, 1 if rank == 0 else 2))[:2]
        return [
            (tuple(window.order), tuple(window.rows.training_row(0, epoch)["labels"].tolist())) for window in windows
        ]

    all_windows = [*list_windows(), *list_windows(epoch=1), *list_windows(seed=6), *list_windows(rank=1)]
    for values in zip(*all_windows, strict=True):
        assert len(set(values)) == len(values) == 8
    assert list_windows() == list_windows()


def test_a_sample_comes_from_all_shards() -> None:
    rows = make_blocks(packing=False).sample_rows()
    assert sorted(to_lists(rows)) == sorted(cut_naively(TEXTS, packing=False))


@pytest.mark.parametrize(
    ("texts", "packing", "message"),
    [
        ([], True, "the text is empty: it has no token"),
        ([], False, "the text is empty: it has no token"),
        (["and"], True, "the text has 2 tokens, which is less than one block of 11"),
    ],
)
def test_a_stream_without_a_block_is_refused_in_one_line(texts: list[str], packing: bool, message: str) -> None:
    blocks = make_blocks(packing, [texts, []])
    with pytest.raises(UserError, match=message):
        blocks.sample_rows()
    assert list(blocks.iterate_windows(0)) == []
