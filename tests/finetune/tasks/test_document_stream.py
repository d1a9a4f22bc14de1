"""Streams of documents: who reads what, in which order, from which position, and what identifies them."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset

from istar.errors import UserError
from istar.finetune.tasks import document_stream
from istar.finetune.tasks.document_stream import DocumentStream, make_hub_stream, open_file_stream

SHARDS = [[f"{shard}-{document}" for document in range(size)] for shard, size in enumerate((5, 1, 0, 4))]
DOCUMENTS = [document for shard in SHARDS for document in shard]
STREAM = DocumentStream([partial(iter, shard) for shard in SHARDS], "digest")


def read(
    seed: tuple[int, ...] = (0,), rank: int = 0, world_size: int = 1, stream: DocumentStream = STREAM
) -> list[str]:
    return [text for _, _, text in stream.iterate(seed, rank, world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_processes_read_different_documents_and_together_all(world_size: int) -> None:
    shares = [read((7,), rank, world_size) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == sorted(DOCUMENTS)
    shards_by_process = [{text.partition("-")[0] for text in share} for share in shares]
    if world_size in (2, 4):
        assert sum(map(len, shards_by_process)) == 3  # no shard is read by two processes
    else:
        assert len(shards_by_process[0]) >= 2


def test_documents_of_single_document_shards_are_dealt_out() -> None:
    """Otherwise all of them would belong to the first process."""
    stream = DocumentStream([partial(iter, [str(shard)]) for shard in range(9)], "")
    shares = [read((0,), rank, 2, stream) for rank in range(2)]
    assert sorted(map(len, shares)) == [4, 5]


def test_the_order_of_the_shards_depends_on_the_seed_alone() -> None:
    assert read((1, 0)) == read((1, 0))
    orders = {tuple(read((1, epoch))) for epoch in range(9)}
    assert len(orders) > 1
    for order in orders:
        assert sorted(order) == sorted(DOCUMENTS)
        for shard in SHARDS:  # within a shard, the order stays
            assert [text for text in order if text in shard] == shard


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 3)])
def test_reading_begins_at_any_position(rank: int, world_size: int) -> None:
    rows = list(STREAM.iterate((3,), rank, world_size))
    for number, (shard, document, _) in enumerate(rows):
        assert list(STREAM.iterate((3,), rank, world_size, shard, document)) == rows[number:]


def test_a_sample_takes_turns_with_the_shards() -> None:
    documents = list(STREAM.iterate_sample())
    assert sorted(documents) == sorted(DOCUMENTS)
    assert {document[0] for document in documents[:3]} == {"0", "1", "3"}


def write_files(folder: Path, content_by_name: dict[str, str]) -> Path:
    for name, content in content_by_name.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_files_are_shards_and_their_beginnings_the_identity(tmp_path: Path) -> None:
    contents = {"train/a.txt": "one\ntwo\n", "train/b.jsonl": '{"text": "three"}\n', "train-c.txt": "four\n"}

    def open_stream(folder: Path) -> DocumentStream:
        return open_file_stream([folder / "train", folder / "train-c.txt"])

    stream = open_stream(write_files(tmp_path / "x", contents))
    assert [list(open_shard()) for open_shard in stream.shards] == [["one", "two"], ["three"], ["four"]]
    assert open_stream(write_files(tmp_path / "y", contents)).digest == stream.digest
    others = ({"train/a.txt": "one\ntwo!\n"}, {"train/a.txt": "ONE\ntwo\n"}, {"train/d.txt": "five\n"})
    for number, change in enumerate(others):
        assert open_stream(write_files(tmp_path / str(number), contents | change)).digest != stream.digest
    (tmp_path / "y" / "train" / "a.txt").rename(tmp_path / "y" / "train" / "aa.txt")
    assert open_stream(tmp_path / "y").digest != stream.digest


def test_only_the_beginning_and_the_size_are_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_stream, "BEGINNING_BYTES", 1 << 20)
    path = tmp_path / "train.txt"

    def compute_digest(content: bytes) -> str:
        path.write_bytes(content)
        return open_file_stream([path]).digest

    content = b"a" * (1 << 20) + b"bc"
    assert compute_digest(content) == compute_digest(content[:-1] + b"d") != compute_digest(content[:-1])
    assert compute_digest(content) != compute_digest(b"x" + content[1:])


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("text")
    (tmp_path / "train.txt").chmod(0)
    with pytest.raises(UserError, match=r"train\.txt: cannot be read: Permission denied"):
        open_file_stream([tmp_path / "train.txt"])


def make_rows(columns: dict[str, list[object]]) -> IterableDataset:
    return Dataset.from_dict(columns).to_iterable_dataset(num_shards=2)


def test_rows_of_the_hub_are_documents() -> None:
    texts = ["one", None, "two", " \n", "three", "four"]
    stream = make_hub_stream(make_rows({"id": [*range(6)], "text": texts}), "org/web", "c0ffee")
    assert [list(open_shard()) for open_shard in stream.shards] == [["one", "two"], ["three", "four"]]
    assert stream.digest == "org/web c0ffee"


def break_off() -> Iterator[dict[str, str]]:
    yield {"text": "one"}
    raise ConnectionError("the network is gone")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (make_rows({"content": ["one", "two"]}), "org/web: there is no column 'text'; found: 'content'"),
        (make_rows({"text": [1, 2]}), "org/web, row 1: text is 1; expected a string"),
        (IterableDataset.from_generator(break_off), "org/web: reading broke off (ConnectionError: the network"),
    ],
)
def test_rows_without_texts_are_refused_in_one_line(rows: IterableDataset, message: str) -> None:
    with pytest.raises(UserError) as error:
        read((0,), stream=make_hub_stream(rows, "org/web", ""))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
