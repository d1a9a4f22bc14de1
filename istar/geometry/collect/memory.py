"""The memory that a pass takes beside the weights, told and checked before it starts."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from istar.errors import UserError
from istar.geometry.collect.corpus_statistics import MeasureSettings
from istar.geometry.collect.layers import NUM_NORM_EDGES
from istar.inputs.corpus import choose_batch_tokens
from istar.measures.point_groups import NUM_LOG2_BINS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

QUIET_BYTES = 10**9
"""Memory that is not worth a line."""
_CPU = torch.device("cpu")
_WORKING_MATRICES = 4
"""Number of matrices `(d, d)` in float64 that merging and computing a layer's measures take, for one layer at a time."""


class LayerBytes(NamedTuple):
    """Bytes of the statistics of one layer."""

    sums: int  # what its accumulators keep, without the next two
    recent: int  # scatter matrices in float32 that are not yet added to the sums
    types: int  # sums of IntraSim, if all token types of the vocabulary occur


def count_layer_bytes(settings: MeasureSettings, config: "PretrainedConfig", num_taps: int) -> LayerBytes:
    """Return the bytes of the statistics of each of `num_taps` layers of a model with this text config.

    `sums` and `types` are the largest sizes: the score by sentence keeps a third matrix per group only for documents
    longer than a block, and IntraSim has a row for each token type that occurs.
    """
    dim, layer_settings = config.hidden_size, settings.make_layer_settings(config.hidden_size, num_taps)
    num_groups = settings.groups
    has_scatters = num_groups and layer_settings.scatter_by_group
    num_parts, matrices = (num_groups if has_scatters else 1), 1
    vectors = num_parts * 3 + 9
    if layer_settings.has_score_by_sentence:
        matrices, vectors = 3, num_parts * 11 + 9
    numbers = num_parts * matrices * dim**2 + vectors * dim + 2 * NUM_NORM_EDGES
    numbers += (NUM_LOG2_BINS + num_groups) * (dim + 4)
    numbers += 2**15 if settings.measures == "all" else 0  # bins of the massive activations
    recent_parts = 2 * num_parts if layer_settings.has_score_by_sentence else num_parts
    num_types = config.vocab_size if settings.intra else 0
    return LayerBytes(8 * numbers, 4 * recent_parts * dim**2, 8 * num_types * (dim + 4))


def describe_memory(
    settings: MeasureSettings,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    devices: Mapping[str, torch.device],
    num_sources: int = 1,
    num_processes: int = 1,
) -> tuple[str, int]:
    """Return a line on the memory that a pass takes beside the weights, and the bytes of it that are certain.

    `devices` has the device of each tap's statistics, and `dtype` is of the hidden states. Raises a `UserError` if a
    device has too little memory left. IntraSim, whose sums depend on how many token types occur, is only told.
    """
    layer, dim, num_taps = count_layer_bytes(settings, config, len(devices)), config.hidden_size, len(devices)
    # Several sources have statistics of their own and combined ones, and the first process reads those of the others.
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    copies = 1 + (num_sources > 1)
    batch_tokens = max(
        settings.length, max(choose_batch_tokens(settings.batch_tokens, device) for device in devices.values())
    )
    state_bytes = 2 * batch_tokens * dim * dtype.itemsize  # as the model returns them, and those of included tokens
    needed: Counter[torch.device] = Counter()
    for device in devices.values():
        needed[device] += copies * (layer.sums + layer.recent) + state_bytes
    num_sampled = min(settings.sample, config.vocab_size)
    needed[_CPU] += copies * num_taps * num_sampled * dim * dtype.itemsize
    for device in needed:
        share = num_local if device == _CPU else 1
        merged = layer.sums * list(devices.values()).count(device) if num_processes > 1 else 0
        needed[device] = share * (needed[device] + 8 * _WORKING_MATRICES * dim**2) + merged
    places = []
    for device, num_bytes in needed.items():
        free = read_free_bytes(device)
        if free is not None and num_bytes > free:
            raise UserError(
                f"the pass needs {_format(num_bytes)} on {device} beside the weights, but {_format(free)} is free; "
                "lower --batch-tokens, --groups or --sample, or leave the weights less of it: --device-map auto with "
                "--max-memory"
            )
        places.append(f"{_format(num_bytes)} on {device}" + ("" if free is None else f" of {_format(free)} free"))
    line = f"memory beside the weights: {', '.join(places)}; {_format(layer.sums)} for each of {num_taps} layers"
    if layer.types:
        types = _format(copies * num_taps * layer.types)
        line += f", and up to {types} for IntraSim, if all token types occur (--no-intra leaves it out)"
    return line, sum(needed.values())


def read_free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, or None if the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    try:
        # Unlike the free pages, this counts the cache of files, which gives way.
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _format(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
