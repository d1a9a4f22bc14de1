"""The choice of a precision that the hardware computes fast, and a warning about one that it only emulates."""

import logging
import time
from dataclasses import replace
from functools import cache

import torch

from istar.errors import UserError
from istar.finetune.config import TrainerConfig

_MATRIX_SIZE = {"cpu": 256, "cuda": 4096}
"""Rows of the square matrices to multiply, by device: large enough to be fast, but at most 0.1 s if emulated."""
_REPETITIONS = 5
EMULATION_RATIO = 1.5
"""Smallest ratio of the durations in bfloat16 and in float32 at which bfloat16 counts as emulated.

With hardware instructions for bfloat16 the ratio is about 0.5, without them 3 to 60.
"""
_FAST_RATIO = 0.8
"""Largest ratio at which bfloat16 counts as faster."""

log = logging.getLogger(__name__)


def choose_precision(settings: TrainerConfig) -> TrainerConfig:
    """Return the trainer settings with `precision=auto` replaced by a precision that the hardware computes fast.

    This is bf16-mixed if a matrix product takes at most 0.8 times as long in bfloat16 as in float32. Otherwise, it is
    16-mixed on a CUDA device and 32-true on others. Other precisions are returned unchanged, with a warning if
    bf16-mixed is slow on this machine.
    """
    if settings.precision not in ("auto", "bf16-mixed"):
        return settings
    device = _resolve_device_type(settings.accelerator)
    ratio = measure_bfloat16_ratio(device) if device in _MATRIX_SIZE else float("inf")
    if settings.precision == "auto":
        fallback = "16-mixed" if device == "cuda" else "32-true"
        return replace(settings, precision="bf16-mixed" if ratio <= _FAST_RATIO else fallback)
    if EMULATION_RATIO <= ratio < float("inf"):
        _warn_about_emulation(ratio)
    return settings


def check_precision_support(settings: TrainerConfig) -> None:
    """Raise a `UserError` for precision 16-mixed without a CUDA device; Lightning would replace it by bf16-mixed."""
    uses_cuda = torch.cuda.is_available() and settings.accelerator in ("auto", "gpu", "cuda")
    if settings.precision == "16-mixed" and not uses_cuda:
        raise UserError("trainer.precision=16-mixed needs a CUDA device; use bf16-mixed or 32-true on this machine")


@cache
def measure_bfloat16_ratio(device: str) -> float:
    """Return the duration of a matrix product in bfloat16 divided by its duration in float32, on `cpu` or `cuda`.

    Each duration is the shortest of five. A process measures the ratio only once.
    """
    return _time_matrix_product(device, torch.bfloat16) / _time_matrix_product(device, torch.float32)


def _time_matrix_product(device: str, dtype: torch.dtype) -> float:
    """Return the shortest of several durations in seconds; on a CPU, of one thread's processor time."""
    matrix = torch.ones(_MATRIX_SIZE[device], _MATRIX_SIZE[device], device=device, dtype=dtype)
    clock = time.perf_counter if device == "cuda" else time.thread_time
    num_threads, durations = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        # The first product, which may load a library, is not counted.
        for _ in range(1 + _REPETITIONS):
            start = clock()
            matrix @ matrix
            if device == "cuda":
                torch.cuda.synchronize()
            durations.append(clock() - start)
    finally:
        torch.set_num_threads(num_threads)
    return min(durations[1:])


def _resolve_device_type(accelerator: str) -> str:
    """Return the device type that Lightning chooses for an accelerator name: `cpu`, `cuda` or another."""
    if accelerator in ("auto", "gpu"):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return accelerator


@cache
def _warn_about_emulation(ratio: float) -> None:
    log.warning(
        "trainer.precision=bf16-mixed: this machine only emulates bfloat16, in which a matrix product takes %.0f times "
        "as long as in float32; trainer.precision=auto chooses what is fast",
        ratio,
    )
