"""What W&B has recorded of a run, read back from its own files."""

import json
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.waiting import SECONDS


def recorded(path: Path) -> list[Any]:
    """W&B's record of a run: protocol buffers in a log of LevelDB's format, behind seven bytes.

    Raises AssertionError where the file ends within a record, as it does while W&B is still writing it.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, piece, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:  # too short for the head of a piece: the block ends with zeros
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        assert kind != 0, "an unwritten part of the file"
        assert position + 7 + size <= len(data), "a record that is cut short"
        piece += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last of its pieces
            records.append(Record.FromString(piece))
            piece = b""
    assert piece == b""
    assert position == len(data)
    return records


def offline_records(folder: Path) -> list[list[Any]]:
    """Those of a run's starts, in their order."""
    paths = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    return [_when_written(path) for path in paths]


def _when_written(path: Path) -> list[Any]:
    """W&B's service may still be writing when it has said that the run is finished."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with suppress(AssertionError):
            records = recorded(path)
            if any(record.HasField("exit") for record in records):
                return records
        time.sleep(0.05)
    return recorded(path)


def logged_by(records: list[Any], name: str) -> list[tuple[int, float]]:
    """Global step and value of all rows that have one."""
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [(row["trainer/global_step"], row[name]) for row in rows if name in row]


def summary_of(records: list[Any]) -> dict[str, Any]:
    """The summary that stands for the run in the end."""
    updates = [item for record in records if record.HasField("summary") for item in record.summary.update]
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}


def start_of(records: list[Any]) -> Any:
    """What W&B was told when the run began."""
    [start] = [record.run for record in records if record.HasField("run")]
    return start


def config_of(records: list[Any]) -> dict[str, Any]:
    return {item.key: json.loads(item.value_json) for item in start_of(records).config.update}
