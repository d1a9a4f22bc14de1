"""The choice of a precision that the hardware computes fast, and a warning about one that it only emulates."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from istar.errors import UserError
from istar.finetune.config import TrainerConfig

log = logging.getLogger(__name__)


def choose_precision(settings: TrainerConfig) -> TrainerConfig:
    """Return the trainer settings with `precision=auto` replaced by a precision that the hardware computes fast.

    This is bf16-mixed if the hardware has instructions for bfloat16. Otherwise, it is 16-mixed on a CUDA device and
    32-true on others. Other precisions are returned unchanged, with a warning if bf16-mixed is emulated.
    """
    uses_cuda = _uses_cuda(settings)
    if settings.precision == "auto":
        fallback = "16-mixed" if uses_cuda else "32-true"
        return replace(settings, precision="bf16-mixed" if has_bfloat16(uses_cuda) else fallback)
    if settings.precision == "bf16-mixed" and not has_bfloat16(uses_cuda):
        _warn_about_emulation()
    return settings


def check_precision_support(settings: TrainerConfig) -> None:
    """Raise a `UserError` for precision 16-mixed without a CUDA device; Lightning would replace it by bf16-mixed."""
    if settings.precision == "16-mixed" and not _uses_cuda(settings):
        raise UserError("trainer.precision=16-mixed needs a CUDA device; use bf16-mixed or 32-true on this machine")


def has_bfloat16(uses_cuda: bool) -> bool:
    """Return whether the GPU, or else the processor, has instructions for bfloat16."""
    if uses_cuda:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Without this function, an older torch cannot tell.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _uses_cuda(settings: TrainerConfig) -> bool:
    return torch.cuda.is_available() and settings.accelerator in ("auto", "gpu", "cuda")


@cache
def _warn_about_emulation() -> None:
    log.warning(
        "trainer.precision=bf16-mixed: this machine has no instructions for bfloat16, and emulates it many times more "
        "slowly than float32; trainer.precision=auto chooses what is fast"
    )
