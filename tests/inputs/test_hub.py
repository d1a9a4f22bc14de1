"""Streams of data sets from the hub, which is a mock server on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from istar.errors import UserError
from istar.inputs.hub import open_dataset_stream
from tests.mock_hub import MockHub, Repository, serving, set_offline, use

ROWS_PER_FILE = 30_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    """Yield a mock hub with org/web, whose split `train` has three files of JSON lines of 1.2 MB."""
    with serving() as hub:
        files = {
            f"data/{split}-{number}.jsonl": "".join(
                json.dumps({"text": f"document {row} of file {number}"}) + "\n" for row in range(num_rows)
            ).encode()
            for split, number, num_rows in [*(("train", i, ROWS_PER_FILE) for i in range(3)), ("test", 0, 5)]
        }
        hub.repositories["datasets/org/web"] = Repository()
        hub.repositories["datasets/org/web"].push(files)
        use(hub, tmp_path / "cache", monkeypatch)
        yield hub


def test_a_stream_reads_only_the_files_it_needs(hub: MockHub) -> None:
    first_commit = hub.repositories["datasets/org/web"].branches["main"]
    stream, commit = open_dataset_stream("org/web", None, "train", None)
    assert commit == first_commit
    rows = iter(stream)
    assert [next(rows)["text"] for _ in range(ROWS_PER_FILE)][-1] == f"document {ROWS_PER_FILE - 1} of file 0"
    assert not any("train-1" in request for request in hub.requests)
    assert next(rows) == {"text": "document 0 of file 1"}
    assert not any("train-2" in request for request in hub.requests)
    hub.repositories["datasets/org/web"].push({"data/train-0.jsonl": b'{"text": "new"}\n'})
    assert [row["text"] for row in open_dataset_stream("org/web", None, "train", None)[0]] == ["new"]
    earlier, commit = open_dataset_stream("org/web", None, "test", first_commit)
    assert (len(list(earlier)), commit) == (5, first_commit)


def test_a_stream_that_cannot_be_opened_is_refused_in_one_line(hub: MockHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_error(name: str, configuration: str | None, split: str) -> str:
        with pytest.raises(UserError) as error:
            open_dataset_stream(name, configuration, split, None)
        message = str(error.value)
        assert "\n" not in message
        return message

    assert "Bad split: dev. Available splits: ['train', 'test']" in read_error("org/web", None, "dev")
    assert "'en' not found. Available: ['default']" in read_error("org/web", "en", "train")
    assert "data set org/none: the hub has no data set of this name" in read_error("org/none", None, "train")
    set_offline(True, monkeypatch)
    assert read_error("org/web", None, "train").startswith(
        "org/web: a stream is read from the hub, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids asking the hub; "
    )
