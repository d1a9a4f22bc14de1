"""Which files of a corpus are training and which are validation data, and their documents as data sets."""

from pathlib import Path

import pytest
from datasets import Dataset

from istar.errors import UserError
from istar.finetune.tasks.sources import drop_blank_rows, find_text_splits, read_texts
from istar.texts.documents import cache_documents, compute_content_digest
from tests.files.test_folders import write_files


def get_file_names(splits: dict[str, list[Path]]) -> dict[str, list[str]]:
    return {split: [path.name for path in paths] for split, paths in splits.items()}


def test_names_say_the_split(tmp_path: Path) -> None:
    training = ("books-train.txt", "train-00000-of-00002.parquet")
    for name in (*training, "Dev.jsonl", "trainer.txt", "notes.txt", "books.tsv"):
        (tmp_path / name).write_text("text")
    (tmp_path / "validation").mkdir()
    assert get_file_names(find_text_splits(tmp_path)) == {
        "train": list(training),
        "validation": ["Dev.jsonl", "validation"],
    }


def test_hidden_files_have_no_split(tmp_path: Path) -> None:
    names = [".train.txt", "._train.txt", ".ipynb_checkpoints/train.txt", ".train/a.txt"]
    write_files(tmp_path, *names, *(f"{name}-dev" for name in names), "train.txt")
    assert find_text_splits(tmp_path) == {"train": [tmp_path / "train.txt"]}


def test_without_such_names_all_is_training_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    assert find_text_splits(tmp_path) == {"train": [tmp_path]}
    assert find_text_splits(tmp_path / "a.txt") == {"train": [tmp_path / "a.txt"]}
    Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "train-saved")
    assert find_text_splits(tmp_path / "train-saved") == {"train": [tmp_path / "train-saved"]}


def test_a_saved_data_set_of_several_splits(tmp_path: Path) -> None:
    for split, text in (("train", "one"), ("validation", "two")):
        Dataset.from_dict({"text": [text]}).save_to_disk(tmp_path / split)
    splits = find_text_splits(tmp_path)
    assert {split: read_texts(paths, tmp_path / "cache")["text"][:] for split, paths in splits.items()} == {
        "train": ["one"],
        "validation": ["two"],
    }


def test_documents_are_read_again_only_when_a_file_has_changed(tmp_path: Path) -> None:
    path, cache = tmp_path / "train.txt", tmp_path / "cache"
    path.write_text("one\n\ntwo\n")
    assert read_texts([path], cache)["text"][:] == ["one", "two"]
    [file] = (cache / "texts").iterdir()
    write_time = file.stat().st_mtime_ns
    assert read_texts([path], cache)["text"][:] == ["one", "two"]
    assert file.stat().st_mtime_ns == write_time
    path.write_text("three\n")
    assert read_texts([path], cache)["text"][:] == ["three"]


def test_a_reader_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def documents():
        yield "one"
        raise UserError("the second is damaged")

    with pytest.raises(UserError, match="damaged"):
        cache_documents(documents(), tmp_path, "content")
    assert list(tmp_path.iterdir()) == []


def test_a_digest_changes_with_content_and_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    digests = [compute_content_digest(folder), compute_content_digest(folder / "a.txt")]
    (folder / "a.txt").rename(folder / "b.txt")
    digests.append(compute_content_digest(folder))
    (folder / "b.txt").write_text("two")
    digests += [compute_content_digest(folder), compute_content_digest(folder / "b.txt")]
    assert len(set(digests)) == len(digests)


def test_blank_rows_are_left_out() -> None:
    dataset = Dataset.from_dict({"text": ["", " = Title = \n", "\n", "A paragraph."], "page": [1, 2, 3, 4]})
    assert drop_blank_rows(dataset, "wikitext").to_dict() == {"text": [" = Title = \n", "A paragraph."]}
    with pytest.raises(UserError, match="there is no column 'text'"):
        drop_blank_rows(dataset.select_columns(["page"]), "wikitext")
