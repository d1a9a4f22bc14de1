"""Runs on local folders do not connect to any server."""

import json
import socket
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import datasets
import huggingface_hub
import pytest

from istar.finetune.execute import execute as execute_module
from istar.finetune.execute.run import run
from tests.finetune.execute.faults import Build
from tests.waiting import SECONDS


def test_attempts_to_connect_are_seen(forbid_network: Any, closed_url: str) -> None:
    attempts = forbid_network()
    with pytest.raises(URLError):
        urlopen(closed_url, timeout=SECONDS)
    with pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("127.0.0.1", 9))
    assert len(attempts) == 2


@pytest.mark.parametrize("offline_since", ["the start", pytest.param("assembly", marks=pytest.mark.slow)])
def test_a_run_on_local_folders_needs_no_network(
    small: Build, undisturbed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbid_network: Any,
    offline_since: str,
) -> None:  # fmt: skip
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
    original_assemble = execute_module.assemble

    def assemble_then_forbid(*arguments: Any) -> Any:
        job = original_assemble(*arguments)
        attempts.append(forbid_network())
        return job

    if offline_since == "the start":
        attempts.append(forbid_network())
    else:
        monkeypatch.setattr(execute_module, "assemble", assemble_then_forbid)
    config = small("task=rte", f"task.data_dir={data}", "model=auto", f"model.name={undisturbed_run / 'model'}")
    assert run(config).status == "finished"
    assert attempts == [[]]
