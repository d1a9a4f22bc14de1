"""Documents of a corpus from each kind of file, and what is refused."""

import gzip
import itertools
import json
import os
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_from_disk

from istar.errors import UserError
from istar.texts.corpus import parse_sources
from istar.texts.documents import compute_content_digest, read_documents
from tests.files.test_folders import HIDDEN, write_files

TEXTS = ["one", "two\nlines", "\u00fc\u2028three"]


def write_texts(path: Path) -> Path:
    """Write the texts and an empty one, in the format of the path's suffix, and return the path."""
    if path.suffix in (".csv", ".tsv"):
        separator, quote = (",", '"') if path.suffix == ".csv" else ("\t", "")
        rows = [
            separator.join(("1", f"{quote}{text}{quote}")) for text in ("one", "two\nlines" if quote else "two", "")
        ]
        path.write_text("\n".join((f"number{separator}text", *rows)) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": text, "more": 1} for text in TEXTS], indent=1), encoding="utf-8")
    elif path.suffix == ".txt":
        path.write_text("one\n\n  two \n \u00fc\u2028three\r\n", encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"number": [1, 2, 3, 4], "text": [TEXTS[0], None, TEXTS[1], TEXTS[2]]}), path)
    elif path.suffix == ".saved":
        Dataset.from_dict({"text": [*TEXTS, " "], "number": [1, 2, 3, 4]}).save_to_disk(path)
    else:
        lines = [json.dumps({"text": text, "more": 1}) for text in (*TEXTS[:2], "", TEXTS[2])]
        path.write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "parquet", "saved"])
def test_forms_in_which_a_document_may_have_several_lines(tmp_path: Path, suffix: str) -> None:
    assert list(read_documents(write_texts(tmp_path / f"corpus.{suffix}"))) == TEXTS


def test_a_line_of_text_is_a_document(tmp_path: Path) -> None:
    assert list(read_documents(write_texts(tmp_path / "corpus.txt"))) == ["one", "two", "\u00fc\u2028three"]
    (tmp_path / "corpus.txt").rename(tmp_path / "README")
    assert list(read_documents(tmp_path / "README")) == ["one", "two", "\u00fc\u2028three"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain text", r"a\.txt\.gz: cannot be read: "),
        (gzip.compress(b"text\n" * 999)[:-9], r"a\.txt\.gz: cannot be read: Truncated compressed stream"),
        (gzip.compress(b"one\ncaf\xe9\n"), r"a\.txt\.gz, line 2: not UTF-8: byte 4 is 0xe9"),
    ],
    ids=["plain", "truncated", "not UTF-8"],  # else the names would contain the time of the compression
)
def test_damaged_compressed_files_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt.gz").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(read_documents(tmp_path))
    assert "\n" not in str(error.value)


def test_a_folder_is_all_its_files_of_text_in_order(tmp_path: Path) -> None:
    write_texts(tmp_path / "b.jsonl")
    (tmp_path / "a.txt").write_text("first")
    write_texts(tmp_path / "c.parquet")
    (tmp_path / "notes.md").write_text("not read")
    assert list(read_documents(tmp_path)) == ["first", *TEXTS, *TEXTS]


def test_only_what_is_read_is_in_the_digest(tmp_path: Path) -> None:
    """Neither hidden files nor files of other kinds are read, and none changes the identity of the texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    write_texts(folder / "a.txt")
    write_texts(folder / "saved.parquet")
    documents, digest = list(read_documents(folder)), compute_content_digest(folder)
    write_files(folder, *HIDDEN, "notes.md", "sub/a.txt", "a.txt~", "info.json")
    assert list(read_documents(folder)) == documents
    assert compute_content_digest(folder) == digest == parse_sources([str(folder)])[0].identify()[0]
    # What is read counts, also in a folder or a saved data set with the name of a file.
    (folder / "c.txt").mkdir()
    for source, target in (("b.txt", "c.txt/a.txt"), ("a.saved", "e.jsonl")):
        write_texts(tmp_path / source).rename(folder / target)
        assert len(list(read_documents(folder))) == len(documents) + len(TEXTS)
        documents, old_digest, digest = list(read_documents(folder)), digest, compute_content_digest(folder)
        assert digest != old_digest


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_pipes_and_dangling_links_are_refused_when_they_are_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "a.txt").write_text("one")
    make(tmp_path / "b.txt")
    assert len(compute_content_digest(tmp_path)) == 64
    assert f"{tmp_path / 'b.txt'}: cannot be read" in get_read_error(tmp_path)


def test_the_digest_of_a_saved_data_set_is_of_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    rows = {"text": TEXTS, "number": [3, 1, 2]}
    Dataset.from_dict(rows).save_to_disk(folder, num_shards=2)
    digest = compute_content_digest(folder)
    # `map` caches its result next to the data.
    load_from_disk(folder).map(lambda row: {"number": -row["number"]})
    assert list(folder.glob("cache-*.arrow"))
    write_files(folder, *HIDDEN)
    assert compute_content_digest(folder) == digest
    monkeypatch.setattr("datasets.config.IN_MEMORY_MAX_SIZE", 1 << 20)
    monkeypatch.chdir(folder)
    assert compute_content_digest(folder) == compute_content_digest(Path()) == digest
    Dataset.from_dict({**rows, "text": TEXTS[::-1]}).save_to_disk(tmp_path / "other", num_shards=2)
    assert compute_content_digest(tmp_path / "other") != digest


def test_a_saved_dictionary_of_splits_says_which_splits_it_has(tmp_path: Path) -> None:
    texts = Dataset.from_dict({"text": TEXTS})
    DatasetDict({"books": texts, "news": texts}).save_to_disk(tmp_path / "texts")
    books, news = (tmp_path / "texts" / name for name in ("books", "news"))
    assert get_read_error(tmp_path / "texts").endswith(f"or a saved data set; it has the saved splits {books}, {news}")
    with pytest.raises(UserError, match="it has the saved splits"):
        compute_content_digest(tmp_path / "texts")
    assert list(read_documents(books)) == TEXTS


def test_a_corpus_need_not_fit_into_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 20 + "\n")
    with (tmp_path / "a.txt").open("a") as file:
        file.writelines(f"{number} {'word ' * 20}\n" for number in range(60_000))
    tracemalloc.start()
    assert sum(1 for _ in read_documents(tmp_path / "a.txt")) == 60_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 < (tmp_path / "a.txt").stat().st_size


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.jsonl.zst", "b.JSON.GZ", "b.csv.gz"])
def test_compressed_files_are_read_as_the_others(tmp_path: Path, name: str) -> None:
    plain = write_texts(tmp_path / "a.csv" if ".csv" in name else tmp_path / "a.jsonl")
    content = plain.read_bytes()
    if name.endswith("zst"):
        compressed = bytes(pa.Codec("zstd").compress(content))
    else:
        # Some programs write a file in several parts.
        compressed = gzip.compress(content[:20]) + gzip.compress(content[20:])
    (tmp_path / name).write_bytes(compressed)
    assert list(read_documents(tmp_path / name)) == list(read_documents(plain))
    # Unlike `.json`, which usually describes other files, `.json.gz` in a folder is text.
    assert list(read_documents(tmp_path)) == list(read_documents(plain)) * 2
    (tmp_path / name).write_bytes(compressed[:-3])
    assert f"{name}: cannot be read: Truncated compressed stream" in get_read_error(tmp_path / name)
    (tmp_path / name).write_bytes(content)
    assert f"{name}: cannot be read" in get_read_error(tmp_path / name)


def test_only_the_files_that_are_needed_are_read(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl")
    write_texts(tmp_path / "b.parquet")
    for suffix in ("jsonl", "parquet", "jsonl.gz"):
        (tmp_path / f"c.{suffix}").write_text("damaged")
    assert list(itertools.islice(read_documents(tmp_path), 6)) == TEXTS * 2
    # A file is read only as far as it is needed, too.
    (tmp_path / "d.json").write_bytes(b'{"text": "one"}\n{"text": "two"}\n\xff')
    assert list(itertools.islice(read_documents(tmp_path / "d.json"), 2)) == ["one", "two"]
    assert "d.json, line 3: not UTF-8: byte 1 is 0xff" in get_read_error(tmp_path / "d.json")


def test_a_row_group_need_not_fit_into_memory(tmp_path: Path) -> None:
    texts = [random.Random(number).randbytes(500).hex() for number in range(20_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=len(texts))
    documents = read_documents(tmp_path / "a.parquet")
    allocated = pa.total_allocated_bytes()
    assert next(documents) == texts[0]
    assert pa.total_allocated_bytes() - allocated < 10_000_000 < (tmp_path / "a.parquet").stat().st_size
    assert list(documents) == texts[1:]


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for path, content in ((tmp_path / "same.txt", "one"), (folder / "a.txt", "one"), (folder / "b.txt", "three")):
        path.write_text(content)
    assert compute_content_digest(folder / "a.txt") == compute_content_digest(tmp_path / "same.txt")
    whole, beginning = compute_content_digest(folder), compute_content_digest(folder, 4)
    assert compute_content_digest(folder, 8) == whole != beginning
    # What follows the beginning counts by its size.
    (folder / "b.txt").write_text("three"[::-1])
    assert compute_content_digest(folder) != whole
    assert compute_content_digest(folder, 4) != beginning
    beginning = compute_content_digest(folder, 4)
    for content, is_same in (("eERHT", True), ("eER", False), ("EERHT", False)):
        (folder / "b.txt").write_text(content)
        assert (compute_content_digest(folder, 4) == beginning) == is_same, content


@pytest.mark.parametrize("name", ["a.JSONL", "a.Parquet", "a.json", "a.csv", "a.tsv", "a.CSV"])
def test_suffix_decides_which_reader_and_case_does_not_matter(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name.lower()).rename(tmp_path / name)
    assert list(read_documents(path)) == {"csv": TEXTS[:2], "tsv": ["one", "two"]}.get(name[2:].lower(), TEXTS)
    if path.suffix != ".json":
        assert list(read_documents(tmp_path)) == list(read_documents(path))


@pytest.mark.parametrize("name", ["a.html", "a.gz", "a.pt", "a.docx", "a.xml", "a.2024"])
def test_files_of_other_kinds_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("words")
    assert re.search(rf"{name}: .*\.{name[2:]} are not read as text; expected .*\.txt", get_read_error(tmp_path / name))


def test_content_that_is_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("two\nlines".encode("utf-16-le"))
    assert "a.txt, line 1: not UTF-8 text: it holds null bytes" in get_read_error(path)
    path.write_bytes(b"one\ntwo\0\n")
    assert "a.txt, line 2: not UTF-8 text" in get_read_error(path)
    path.write_bytes(b"one\ntwo\n\x89PNG")
    assert "a.txt, line 3: not UTF-8" in get_read_error(path)
    path.write_text('\n{"text": "one"}\n{"text": "two"}\n')
    assert "expected the suffix .jsonl" in get_read_error(path)
    path.write_text("{not JSON}\n3\n")
    assert list(read_documents(path)) == ["{not JSON}", "3"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_half_a_surrogate_pair_is_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "\\ud83d\\ude00"}\n{"text": "hello world \\ud83d again"}\n')
    message = get_read_error(tmp_path / name)
    assert f"{name}, line 2: not JSON: the text 'hello world \\ud83d again' has half" in message
    message.encode()


def test_a_row_of_another_length_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,n\n"two\nlines",1\nthree\n')
    assert "a.csv, line 4: expected 2 fields" in get_read_error(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("sentence\none\n")
    assert "b.csv: there is no column 'text'; found: 'sentence'" in get_read_error(tmp_path / "b.csv")


def test_parquet_with_bytes_that_are_no_text_is_refused(tmp_path: Path) -> None:
    column = pa.array([b"\xed\xa0\xbd"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert "is not UTF-8" in get_read_error(tmp_path / "a.parquet")


@pytest.mark.parametrize("line", ["{", "[]", '"text"', '{"texts": "a"}', '{"text": 3}', "3"])
def test_invalid_json_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(f"{json.dumps({'text': 'good'})}\n{line}\n")
    with pytest.raises(UserError, match=r"b\.jsonl, line 2: ") as error:
        list(read_documents(path))
    assert "\n" not in str(error.value)


def get_read_error(path: Path) -> str:
    with pytest.raises(UserError) as error:
        list(read_documents(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_holds_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in get_read_error(tmp_path / "nowhere.txt")
    (tmp_path / "a.parquet").write_text("text")
    assert "not a readable Parquet file" in get_read_error(tmp_path / "a.parquet")
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "b.parquet")
    assert "there is no column 'text'; found: 'content'" in get_read_error(tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [3]}), tmp_path / "c.parquet")
    assert "c.parquet, row 1: text is 3; expected a string" in get_read_error(tmp_path / "c.parquet")
    (tmp_path / "empty").mkdir()
    assert "holds no text" in get_read_error(tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    assert "not a readable saved data set" in get_read_error(tmp_path / "broken")
