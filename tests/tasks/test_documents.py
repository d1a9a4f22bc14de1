"""Documents of a corpus from each kind of file, and what is refused."""

import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from istar.errors import UserError
from istar.tasks.documents import read_documents

TEXTS = ["one", "two\nlines", "\u00fc\u2028three"]


def write_texts(path: Path) -> Path:
    """Write the texts and an empty one, in the format of the path's suffix, and return the path."""
    if path.suffix == ".txt":
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


def test_a_folder_is_all_its_files_of_text_in_order(tmp_path: Path) -> None:
    write_texts(tmp_path / "b.jsonl")
    (tmp_path / "a.txt").write_text("first")
    write_texts(tmp_path / "c.parquet")
    (tmp_path / "notes.md").write_text("not read")
    assert list(read_documents(tmp_path)) == ["first", *TEXTS, *TEXTS]


def test_a_corpus_need_not_fit_into_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 20 + "\n")
    with (tmp_path / "a.txt").open("a") as file:
        file.writelines(f"{number} {'word ' * 20}\n" for number in range(60_000))
    tracemalloc.start()
    assert sum(1 for _ in read_documents(tmp_path / "a.txt")) == 60_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 < (tmp_path / "a.txt").stat().st_size


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
    (tmp_path / "a.txt").write_bytes("Fu\u00dfball".encode("utf-16"))
    assert "a.txt is not UTF-8" in get_read_error(tmp_path / "a.txt")
    assert "cannot be read" in get_read_error(tmp_path / "nowhere.txt")
    (tmp_path / "a.parquet").write_text("text")
    assert "not a readable Parquet file" in get_read_error(tmp_path / "a.parquet")
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "b.parquet")
    assert "there is no column 'text'; found: 'content'" in get_read_error(tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [3]}), tmp_path / "c.parquet")
    assert "holds int64; expected strings" in get_read_error(tmp_path / "c.parquet")
    (tmp_path / "empty").mkdir()
    assert "holds no text" in get_read_error(tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    assert "not a readable saved data set" in get_read_error(tmp_path / "broken")
