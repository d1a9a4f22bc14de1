"""Models too large for one device: accelerate places their layers on GPUs, on the CPU and on the disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from istar.errors import UserError


@dataclass(frozen=True)
class DeviceMap:
    """How to place the layers of a model."""

    name: str = "auto"  # auto, balanced, balanced_low_0 or sequential, as in `from_pretrained` of transformers
    # Bytes of weights by device, "cpu" or the number of a GPU; what does not fit is offloaded. None: what is free.
    max_memory: dict[str | int, int] | None = None
    offload_folder: Path | None = None  # folder for weights that cannot be read from the model's safetensors files

    def make_options(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained`."""
        memory = None if self.max_memory is None else dict(self.max_memory)
        return {"device_map": self.name, "max_memory": memory, "offload_folder": self.offload_folder}


def parse_max_memory(limits: Sequence[str]) -> dict[str | int, int] | None:
    """Return bytes by device from texts such as `cpu=200GB` and `0=20GiB`, or None without any.

    Raises a `UserError` if a text is not a device that this machine has, and a size.
    """
    from accelerate.utils import convert_file_size_to_int

    num_gpus, parsed = torch.cuda.device_count(), dict[str | int, int]()
    for limit in limits:
        device, _, size = limit.partition("=")
        try:
            # accelerate takes a small b for bits.
            parsed[device if device == "cpu" else int(device)] = convert_file_size_to_int(size.upper())
        except ValueError as error:
            raise UserError(f"--max-memory {limit}: expected sizes by device, such as cpu=200GB,0=20GB") from error
    if unknown := [device for device in parsed if device != "cpu" and device not in range(num_gpus)]:
        raise UserError(f"--max-memory {unknown[0]}: there is no such GPU; this machine has {num_gpus}, from 0 on")
    return parsed or None
