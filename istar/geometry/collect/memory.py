"""The memory that a pass takes in addition to the weights, told and checked before it starts."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from istar.errors import UserError
from istar.geometry.collect.corpus_statistics import MeasureSettings
from istar.geometry.collect.grouped_moments import UpperPanels
from istar.geometry.collect.stream import UPDATE_BYTES, UPDATE_TOKENS
from istar.measures.point_groups import NUM_LOG2_BINS
from istar.texts.corpus import BATCH_TOKENS, BATCH_TOKENS_ON_DEVICES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def count_layer_bytes(
    settings: MeasureSettings, config: "PretrainedConfig", num_layers: int, device_type: str = "cpu"
) -> tuple[int, int, int]:
    """Return the bytes of the statistics of each of `num_layers` layers of a model with this text config, at most.

    The three numbers are for the sums without IntraSim, for scatter matrices that are not yet added to them, and for
    IntraSim if all token types occur. Only a CPU packs matrices.
    """
    dim, layer_settings = config.hidden_size, settings.make_layer_settings(config.hidden_size, num_layers)
    num_groups = max(settings.groups, 1) if layer_settings.scatter_by_group else 1
    packed = UpperPanels(dim, device_type).size
    numbers = num_groups * (packed + 2 * dim)
    numbers += (NUM_LOG2_BINS + settings.groups) * (dim + 4) + 8 * dim
    numbers += 483 + (2**15 if settings.measures == "all" else 0)  # histograms of the norms and of the activations
    return 8 * numbers, 4 * num_groups * packed, config.vocab_size * (4 * dim + 32) if settings.intra else 0


def describe_memory(
    settings: MeasureSettings,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    devices: Mapping[str, torch.device],
    num_sources: int = 1,
    num_processes: int = 1,
) -> tuple[str, int]:
    """Return a line on the memory that a pass takes in addition to the weights, and its bytes without IntraSim.

    `devices` has the device of each layer's statistics, and `dtype` is of the hidden states. Raises a `UserError` if a
    device has too little memory left. IntraSim depends on how many token types occur, so that it is only told.
    """
    # A GPU does not pack matrices. For layers on several devices, all count as the largest.
    device_types = {device.type for device in devices.values()}
    sums, recent, types = max(count_layer_bytes(settings, config, len(devices), name) for name in device_types)
    dim, cpu, copies = config.hidden_size, torch.device("cpu"), 1 + (num_sources > 1)  # of one source, and combined
    batch_tokens = settings.batch_tokens or (BATCH_TOKENS if {*devices.values()} == {cpu} else BATCH_TOKENS_ON_DEVICES)
    batch_tokens = max(min(batch_tokens, settings.limit or batch_tokens), settings.length)
    update_tokens = max(min(UPDATE_TOKENS, UPDATE_BYTES // (4 * len(devices) * dim)), batch_tokens)
    state_bytes = (batch_tokens + update_tokens) * dim * dtype.itemsize  # of a batch, and of several joined ones
    needed = Counter({cpu: copies * len(devices) * min(settings.sample, config.vocab_size) * dim * dtype.itemsize})
    for device, num_layers in Counter(devices.values()).items():
        needed[device] += num_layers * (copies * (sums + recent) + state_bytes)
        needed[device] += 4 * 8 * dim**2  # to merge a layer, and to compute its measures
        needed[device] *= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device == cpu else 1
        needed[device] += num_layers * sums if num_processes > 1 else 0  # the sums of another process, to merge them
    places = []
    for device, num_bytes in (+needed).items():
        free = read_free_bytes(device)
        places.append(f"{num_bytes / 1e9:.2f} GB on {device}" + ("" if free is None else f" of {free / 1e9:.2f} free"))
        if free is not None and num_bytes > free:
            raise UserError(
                f"the pass takes {places[-1]} in addition to the weights; lower --batch-tokens, --groups or --sample, "
                "or give the weights less of it by --device-map auto and --max-memory"
            )
    place_text = ", ".join(places)
    line = f"memory in addition to the weights: {place_text}; {sums / 1e9:.2f} GB for each of {len(devices)} layers"
    if types := copies * len(devices) * types:
        line += f"; IntraSim takes {types / 1e9:.2f} GB more if all token types occur, and none with --no-intra"
    return line, needed.total()


def read_free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, or None if the system does not say."""
    if device.type == "cuda":
        free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.memory_allocated(device)
    try:
        # Unlike free pages, this includes the cache of files, which gives way.
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 if device.type == "cpu" else None
    except (OSError, KeyError, ValueError):  # not Linux
        return None
