"""Memory that a step frees is reused by the next step."""

import ctypes
import subprocess
import sys

import pytest

from istar.training import memory
from istar.training.memory import keep_freed_memory
from tests.waiting import SECONDS

CODE = """
import resource, sys, torch
from istar.training.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="The C library is not glibc.")
def test_freed_tensors_cost_no_new_pages():
    def faults(mode):
        command = [sys.executable, "-c", CODE, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout)

    assert faults("kept") < 0.1 * faults("left alone")


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_another_allocator_is_left_alone(monkeypatch, error):
    def missing(name):
        raise error

    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    assert not keep_freed_memory()
