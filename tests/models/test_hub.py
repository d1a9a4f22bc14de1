"""Streams of data sets from the hub, which is a mock server on this machine."""

import gzip
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import IterableDataset

from istar.cli.main import main
from istar.errors import UserError
from istar.models.hub import find_hub_problem, open_dataset_stream
from istar.texts.corpus import Source, parse_sources
from tests.embeddings.builders import save_model
from tests.mock_hub import MockHub, Repository, serving, set_offline, use
from tests.waiting import SECONDS

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


def test_the_hub_is_asked_once_a_minute(hub: MockHub, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("istar.models.hub.time.monotonic", lambda: now)
    for expected_probes, passed in ((1, 0.0), (1, 59.0), (2, 2.0), (2, 59.0)):
        now += passed
        open_dataset_stream("org/web", None, "train", None)
        assert find_hub_problem() == ""
        assert hub.requests.count("HEAD /") == expected_probes
    set_offline(True, monkeypatch)
    assert "forbids asking" in find_hub_problem()
    set_offline(False, monkeypatch)
    assert find_hub_problem() == ""


def test_a_network_that_swallows_packets_is_waited_for_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts connections, and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        set_offline(False, monkeypatch)
        problems = [find_hub_problem(timeout=0.1) for _ in range(8)]
        assert len(set(problems)) == 1
        assert "cannot be reached" in problems[0]
        connection, _ = server.accept()
        connection.close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def make_parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), file)
    return file.getvalue()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz", "csv"])
def test_a_stream_has_the_documents_of_the_download(hub: MockHub, suffix: str) -> None:
    texts = [f"document {number}" if number % 3 else " " for number in range(20)]
    content = {
        "parquet": make_parquet(texts),
        "jsonl.gz": gzip.compress("\n".join(json.dumps({"text": text}) for text in texts).encode()),
        "csv": "\n".join(["text", *(f'"{text}"' for text in texts)]).encode(),
    }[suffix]
    commit = hub.repositories["datasets/org/web"].push(
        {f"train-{number}.{suffix}": content for number in range(2)}, branch="other"
    )
    stream, download = (parse_sources([f"{prefix}org/web::train@other"])[0] for prefix in ("hf://", ""))
    assert (stream.is_stream, download.is_stream) == (True, False)
    expected = [text for text in texts if text != " "] * 2
    assert list(stream.read_documents()) == list(download.read_documents()) == expected
    # What was measured of one need not be measured again of the other.
    assert stream.identify() == download.identify() == ("org/web::train@other", commit)
    assert stream.name == download.name == "web"


def test_streams_without_texts_are_refused(
    hub: MockHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub.repositories["datasets/org/web"]
    repository.push({"train.jsonl": b'{"content": "one", "id": 3}\n'}, branch="columns")
    repository.push({"train.parquet": make_parquet([" ", ""])}, branch="empty")
    [source] = parse_sources(["hf://org/web@columns"])
    with pytest.raises(UserError, match=r"^org/web@columns: there is no column 'text'; found: 'content', 'id' \("):
        next(source.read_documents())
    model = save_model(tmp_path / "model")
    for text, message in (
        ("hf://org/web@empty", "error: org/web@empty holds no text; expected at least one line that is not empty"),
        ("hf://org", "error: --text hf://org: there is no hf://org; expected a file or folder of text, or a data set"),
    ):
        assert main(["measure", str(model), "--text", text, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err.strip()
        assert error.splitlines()[-1].startswith(message)
    assert not (tmp_path / "out" / "measures.json").exists()


def test_a_stream_that_breaks_off_is_one_line() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"text": "one"}
        raise ConnectionError("the line\nis dead")

    source = Source("web", Path("org/web"), IterableDataset.from_generator(rows))
    with pytest.raises(UserError, match=r"^org/web: reading broke off \(ConnectionError: the line is dead\)") as error:
        list(source.read_documents())
    assert isinstance(error.value.__cause__, ConnectionError)
