"""Memory that a step frees is reused by the next step."""

import ctypes
from pathlib import Path

import pytest
import torch

from istar.measures.numerics import keep_freed_memory
from tests.forks import run_in_processes

resource = pytest.importorskip("resource", reason="page faults are counted on Linux and macOS")


def count_page_faults() -> int:
    """Return the number of page faults of the process while tensors are made and freed."""
    initial_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(9_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - initial_faults


def write_page_faults(rank: int, file: str) -> None:
    default_faults = count_page_faults()
    assert keep_freed_memory()
    count_page_faults()
    Path(file).write_text(f"{default_faults} {count_page_faults()}")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="The C library is not glibc.")
def test_freed_tensors_cost_no_new_pages(tmp_path: Path) -> None:
    """The test runs in a process of its own, where the setting remains until the end. Each tensor has 34 MiB."""
    run_in_processes(write_page_faults, (str(tmp_path / "faults"),), 1)
    default_faults, faults_with_setting = map(int, (tmp_path / "faults").read_text().split())
    assert faults_with_setting < 0.1 * default_faults


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def raise_error(name: str) -> None:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", raise_error)
    assert not keep_freed_memory()
