"""Read what W&B has recorded of a run from W&B's own files."""

import json
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.waiting import SECONDS


def recorded(path: Path) -> list[Any]:
    """Read W&B's records of a run: protocol buffers in a log of LevelDB's format, after a header of seven bytes.

    Raises AssertionError if the file ends within a record, as it does while W&B is still writing it.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, partial_record, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        block_bytes_left = 2**15 - position % 2**15
        if block_bytes_left < 7:  # too short for the header of a fragment: the block is padded with zeros
            position += block_bytes_left
            continue
        _, size, fragment_type = struct.unpack_from("<IHB", data, position)
        assert fragment_type != 0, "an unwritten part of the file"
        assert position + 7 + size <= len(data), "a record that is cut short"
        partial_record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if fragment_type in (1, 4):  # a full record, or the last fragment of one
            records.append(Record.FromString(partial_record))
            partial_record = b""
    assert partial_record == b""
    assert position == len(data)
    return records


def offline_records(folder: Path) -> list[list[Any]]:
    """Return W&B's records of a run folder: one list for each start of the run, in their order."""
    paths = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    return [_when_written(path) for path in paths]


def _when_written(path: Path) -> list[Any]:
    """Return the records of a file when the end of the run is among them: W&B's service may write it late."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with suppress(AssertionError):
            records = recorded(path)
            if any(record.HasField("exit") for record in records):
                return records
        time.sleep(0.05)
    return recorded(path)


def logged_by(records: list[Any], name: str) -> list[tuple[int, float]]:
    """Return the global step and the value of each logged row that has a value of this name."""
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [(row["trainer/global_step"], row[name]) for row in rows if name in row]


def summary_of(records: list[Any]) -> dict[str, Any]:
    """Return the final summary of the run."""
    updates = [item for record in records if record.HasField("summary") for item in record.summary.update]
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}


def start_of(records: list[Any]) -> Any:
    """Return W&B's record of the start of the run."""
    [start] = [record.run for record in records if record.HasField("run")]
    return start


def config_of(records: list[Any]) -> dict[str, Any]:
    """Return the config that W&B has recorded for the run."""
    return {item.key: json.loads(item.value_json) for item in start_of(records).config.update}
