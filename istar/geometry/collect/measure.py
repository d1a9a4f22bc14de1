"""`istar measure`: measure a model's layers, embedding matrices and final normalization."""

import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import NonFiniteError, UserError
from istar.files.outputs import Output
from istar.geometry.collect import figure_data, stream
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.stream import Pass, Statistics, Stream
from istar.inputs.corpus import Source
from istar.inputs.embedding_matrix import read_untied_output
from istar.inputs.pretrained import load_encoder, load_tokenizer
from istar.inputs.tokenizing import find_max_input_length
from istar.measures import (
    MassiveActivationsSummary,
    ScaleDimension,
    all_but_the_top,
    centered,
    layer_norm_summary,
)
from istar.measures.norms import norm_parameters
from istar.measures.numerics import keep_freed_memory
from istar.measures.partition import measure_matrix, round_digits
from istar.records.config import ModelConfig

WEIGHT_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of the weights by their names on the command line."""
_MAX_DEFAULT_LENGTH = 512
_INTEGER_COLUMNS = ("first", "last", "tokens")
"""Columns of `Layer.summarize_by_position` and `Layer.summarize_by_frequency` that hold whole numbers."""


@dataclass(frozen=True)
class _Summary:
    """The contents of `measures.json` for one source, by tap, and how often each token occurs in the source."""

    measures: dict[str, dict[str, float]]
    spectra: dict[str, dict[str, list[float]]]
    norms: dict[str, dict[str, list[float]]]
    extremes: dict[str, list[dict[str, float]]]
    by_position: dict[str, dict[str, list[float]]]
    by_frequency: dict[str, dict[str, list[float]]]
    massive: dict[str, list[dict[str, Any]]]
    gride: dict[str, list[ScaleDimension]]
    replicates: dict[str, dict[str, list[float]]]
    token_counts: Tensor | None  # `(vocabulary,)`, counted by the accumulator of IntraSim; None without it

    @classmethod
    def from_statistics(cls, statistics: Statistics) -> "_Summary":
        """Compute the summary of a source. It shares no memory with the statistics."""
        layers = statistics.layers
        spectra = {tap: layer.compute_spectra() for tap, layer in layers.items()}
        massive = {tap: layer.find_massive_activations() for tap, layer in layers.items()}
        replicates = {tap: layer.compute_replicates() for tap, layer in layers.items()}
        types = next(iter(layers.values())).types
        by_frequency = {} if types is None else {tap: layer.summarize_by_frequency() for tap, layer in layers.items()}
        return cls(
            measures=statistics.compute_measures(spectra, replicates),
            spectra={
                tap: {form: round_digits(values.tolist()) for form, values in forms.items()}
                for tap, forms in spectra.items()
            },
            norms={tap: figure_data.trim_norm_histogram(layer) for tap, layer in layers.items()},
            extremes={tap: figure_data.find_extreme_dimensions(layer) for tap, layer in layers.items()},
            by_position={tap: _round_columns(layer.summarize_by_position()) for tap, layer in layers.items()},
            by_frequency={tap: _round_columns(columns) for tap, columns in by_frequency.items()},
            massive={tap: _add_ratios(summary) for tap, summary in massive.items() if summary is not None},
            gride=statistics.estimate_gride(),
            replicates={
                tap: {name: round_digits(values, 12) for name, values in columns.items()}
                for tap, columns in replicates.items()
            },
            token_counts=None if types is None else types.count.clone(),
        )


def measure_model(
    name: str,
    sources: Sequence[Source],
    settings: Pass,
    out: Path,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    console: Console | None = None,
    command: str = "",
) -> Measurements:
    """Measure a model's hidden states over texts in one pass, its embedding matrices and its final normalization.

    An interrupted pass resumes from the state that it has saved in `out`. With several processes, only rank 0 returns
    measures of the hidden states; those of the other ranks are empty.

    Args:
        name: hub id or folder of the model.
        sources: texts.
        settings: settings of the pass. A length of 0 stands for the model's longest input, 512 at most, or for 512 if
            the model takes inputs of any length.
        out: folder for the state of the pass.
        revision: branch, tag or commit on the hub.
        dtype: dtype of the weights, a key of `WEIGHT_DTYPES`. Statistics are at least float32.
        device: name of a device, such as cpu, cuda, cuda:1 or mps; auto is the GPU if there is one, else the CPU.
        console: console for a progress bar; None shows none.
        command: command line to record in the measures.

    Raises:
        UserError: if the model or a text cannot be read, or an argument does not fit the model or the machine.
    """
    start = time.monotonic()
    config = ModelConfig(name=name, revision=revision)
    tokenizer = load_tokenizer(config)
    model: Any = load_encoder(config, tokenizer, WEIGHT_DTYPES[dtype])
    model = model.to(_find_device(device))
    if model.device.type == "cpu":
        keep_freed_memory()
    # An encoder has no head, so the output embeddings are read separately. This is done before the pass, which may take
    # hours, so that a failure shows early.
    output_matrix = read_untied_output(config)
    settings = _resolve_length(settings, model)
    weights = hash_weights(model)
    text_hashes = {source.name: stream.compute_identity(source.path)[:16] for source in sources}
    # The identity includes the paths and the contents of the texts.
    identity = stream.compute_identity(weights, settings, [source.path for source in sources], *text_hashes.values())
    reader = Stream(model, tokenizer, settings, Output(out, "state").open_state("pass"), identity)
    try:
        summaries = reader(sources, _Summary.from_statistics, console)
    except NonFiniteError as error:
        if dtype != "float16":
            raise
        raise NonFiniteError(f"{error}; float16 ends at 65,504: choose --dtype float32 or bf16") from error
    norm = reader.taps.norm
    gain_and_bias = None if norm is None else norm_parameters(norm, model.config.get_text_config().hidden_size)
    matrix_by_side = {"input": model.get_input_embeddings().weight.detach()}
    if output_matrix is not None:
        matrix_by_side["output"] = output_matrix.values.to(model.device)
    # The last summary is that of all texts together.
    token_counts = list(summaries.values())[-1].token_counts if summaries else None
    measurements = Measurements(
        model={
            "name": name,
            "revision": revision,
            "dtype": dtype,
            "type": model.config.model_type,
            "device": str(model.device),
        },
        weights=weights,
        settings={**asdict(settings), "texts": {source.name: str(source.path) for source in sources}},
        sources={source: summary.measures for source, summary in summaries.items()},
        spectra={source: summary.spectra for source, summary in summaries.items()},
        matrices={side: _measure_forms(matrix) for side, matrix in matrix_by_side.items()},
        final_norm=None if gain_and_bias is None else asdict(layer_norm_summary(*gain_and_bias)),
        norms={source: summary.norms for source, summary in summaries.items()},
        extremes={source: summary.extremes for source, summary in summaries.items()},
        by_position={source: summary.by_position for source, summary in summaries.items()},
        by_frequency={source: summary.by_frequency for source, summary in summaries.items()},
        massive={source: _add_token_texts(summary.massive, tokenizer) for source, summary in summaries.items()},
        gride={
            source: {tap: [scale._asdict() for scale in scales] for tap, scales in summary.gride.items()}
            for source, summary in summaries.items()
        },
        replicates={source: summary.replicates for source, summary in summaries.items()},
        text_hashes=text_hashes,
        rows={side: figure_data.summarize_rows(matrix, token_counts) for side, matrix in matrix_by_side.items()},
        readings={source: asdict(reading) for source, reading in reader.readings.items()},
        processes=reader.num_processes,
        command=command,
    )
    return replace(measurements, seconds=time.monotonic() - start + reader.earlier_seconds)


def hash_weights(model: PreTrainedModel) -> str:
    """Return a hash of all parameters of a model except its pooler's, as sixteen hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        # No hidden state depends on the pooler, which is initialized randomly if the checkpoint lacks it.
        if "pooler" not in name:
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _measure_forms(matrix: Tensor) -> dict[str, dict[str, Any]]:
    """Measure a matrix `(n, d)` as it is (`raw`), `centered`, and without its top directions (`post_processed`)."""
    forms = {"raw": matrix, "centered": centered(matrix), "post_processed": all_but_the_top(matrix)}
    return {form: measure_matrix(values) for form, values in forms.items()}


def _round_columns(columns: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: values if name in _INTEGER_COLUMNS else round_digits(values) for name, values in columns.items()}


def _add_ratios(summary: MassiveActivationsSummary) -> list[dict[str, Any]]:
    return [
        {**activation._asdict(), "ratio": abs(activation.value) / summary.median if summary.median else math.inf}
        for activation in summary.top
    ]


def _add_token_texts(
    activations_by_tap: Mapping[str, list[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[dict[str, Any]]]:
    return {
        tap: [
            {**activation, "text": str(tokenizer.convert_ids_to_tokens(activation["token"]))}
            for activation in activations
        ]
        for tap, activations in activations_by_tap.items()
    }


def _find_device(name: str) -> torch.device:
    """Return the device with a name; `auto` is this process's GPU, or the CPU if there is no GPU.

    Raises:
        UserError: if the device is not available.
    """
    if name == "auto":
        # torchrun gives each process on a machine its own LOCAL_RANK.
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such device, or this build of torch does not support it
        raise UserError(f"--device {name} is not available; expected auto, cpu, or a device such as cuda:0") from error
    return device


def _resolve_length(settings: Pass, model: PreTrainedModel) -> Pass:
    """Return the settings with a block length that fits the model: 0 becomes the model's longest input, at most 512.

    Raises:
        UserError: if the length is greater than the model's longest input.
    """
    max_length = find_max_input_length(model.config)
    if max_length is not None and settings.length > max_length:
        raise UserError(f"--length {settings.length} is too long; the model takes at most {max_length} tokens")
    return replace(settings, length=settings.length or min(max_length or _MAX_DEFAULT_LENGTH, _MAX_DEFAULT_LENGTH))
