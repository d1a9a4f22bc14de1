"""Memory that a step frees is reused by the next step."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from istar.training import memory
from istar.training.memory import keep_freed_memory
from tests.forks import run_in_processes


def faults() -> int:
    """The number of pages that the system hands out while tensors are made and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(9_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def count_faults(rank: int, file: str) -> None:
    left_alone = faults()
    assert keep_freed_memory()
    faults()
    Path(file).write_text(f"{left_alone} {faults()}")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="The C library is not glibc.")
def test_freed_tensors_cost_no_new_pages(tmp_path: Path) -> None:
    """In a process of its own, where the setting remains until the end; the tensors have 34 MiB each."""
    run_in_processes(count_faults, (str(tmp_path / "faults"),), 1)
    left_alone, kept = map(int, (tmp_path / "faults").read_text().split())
    assert kept < 0.1 * left_alone


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def missing(name: str) -> None:
        raise error

    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    assert not keep_freed_memory()
