"""Runs on local folders do not connect to any server."""

import json
import socket
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from istar.runs import run as run_module
from istar.runs.run import run
from tests.runs.faults import Build
from tests.waiting import SECONDS


def test_attempts_to_connect_are_seen(no_network: Any, closed: str) -> None:
    import requests

    attempts = no_network()
    with pytest.raises(requests.ConnectionError):
        requests.get(closed, timeout=SECONDS)
    with pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("127.0.0.1", 9))
    assert len(attempts) == 2


@pytest.mark.parametrize("since", ["the start", "assembly"])
def test_a_run_on_local_folders_needs_no_network(
    small: Build, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: Any, since: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    data = tmp_path / "data"
    data.mkdir()
    for split, rows in (("train", 16), ("validation", 8)):
        lines = [
            json.dumps({"sentence1": f"the {split} lamp {n} is old", "sentence2": "a lamp is old", "label": n % 2})
            for n in range(rows)
        ]
        (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    attempts: list[Any] = []
    assemble = run_module._assemble_job

    def then_without(*arguments: Any) -> Any:
        job = assemble(*arguments)
        attempts.append(no_network())
        return job

    if since == "the start":
        attempts.append(no_network())
    else:
        monkeypatch.setattr(run_module, "_assemble_job", then_without)
    config = small("task=rte", f"task.data_dir={data}", "model=auto", f"model.name={undisturbed / 'model'}")
    assert run(config).status == "finished"
    assert attempts == [[]]
