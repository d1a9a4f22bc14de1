"""`istar measure`: measure a model's layers, embedding matrices and final normalization."""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.files.outputs import Output
from istar.files.writing import replace_nested
from istar.finetune.config import ModelConfig
from istar.geometry.collect.corpus_statistics import CorpusStatistics, MeasureSettings
from istar.geometry.collect.layers import Layer
from istar.geometry.collect.measures_file import SOURCE_FIELDS, Measurements, ModelName, read_earlier
from istar.geometry.collect.memory import describe_memory
from istar.geometry.collect.stream import Stream
from istar.hidden_states.offloading import find_input_device, hold_weights, read_parameter
from istar.measures import MassiveActivationsSummary, layer_norm_summary
from istar.measures.matrix_forms import measure_forms, project_rows, round_digits
from istar.measures.norms import norm_parameters
from istar.measures.numerics import keep_freed_memory, row_norms, upcast_blocks
from istar.measures.spectrum import RowSpectrum, decompose_rows
from istar.texts.corpus import Source
from istar.texts.tokenizing import find_max_input_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from istar.models.embedding_matrix import Matrix

WEIGHT_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of the weights by their names on the command line."""
_MAX_DEFAULT_LENGTH = 512
_INTEGER_COLUMNS = ("first", "last", "tokens")
"""Columns of `Layer.summarize_by_position` and `Layer.summarize_by_frequency` with whole numbers."""
_NAMES_IN_CONFIG = ("_name_or_path", "transformers_version", "dtype")
"""Keys of a model's configuration that say where its files are from, and how they are loaded."""


def measure_model(
    name: str,
    sources: Sequence[Source],
    settings: MeasureSettings,
    out: Path,
    revision: str | None = None,
    dtype: str = "float32",
    device: str | Mapping[str, Any] = "auto",
    console: Console | None = None,
    command: str = "",
    earlier: Iterable[Measurements] = (),
    folder: str | None = None,
) -> Measurements:
    """Measure a model's hidden states over texts in one pass, its embedding matrices and its final normalization.

    An interrupted pass resumes from the state that it has saved in `out`; `measures_file.discard_state` deletes it once
    the result is on disk. With several processes, only rank 0 returns measures of the hidden states. A length of 0 in
    `settings` means the model's longest input, 512 at most, or 512 if the model takes inputs of any length. `revision`
    is a branch, tag or commit on the hub. `dtype`, a key of `WEIGHT_DTYPES`, is for the weights; statistics are at
    least float32. `device` is a name such as cuda:1, or `auto`: the GPU if there is one, else the CPU; or the arguments
    of `from_pretrained` that place each layer. A console shows a progress bar, the memory of a large pass, and which
    embeddings are not finite: they have NaN for all measures. `command` is recorded in the measures.

    If the measurements in `out`, or one of the `earlier` ones, are of the same model (see `hash_model`), settings,
    dtype and texts, they are returned with the new names instead, and the console says so. `folder` is where the model
    is loaded from, if that is not `name`.

    Raises a `UserError` if the model or a text cannot be read, an argument does not fit the model or the machine, or
    if hidden states are not finite, and an `OtherModelError` if `out` contains the measures of another model.
    """
    # transformers takes seconds to import, and pages of measured models do without it.
    from istar.models.embedding_matrix import read_untied_output
    from istar.models.pretrained import load_tokenizer

    start = time.monotonic()
    config = ModelConfig(name=folder or name, revision=revision)
    tokenizer = load_tokenizer(config)
    model = load_placed_encoder(config, tokenizer, dtype, device)
    input_device = find_input_device(model)
    if input_device.type == "cpu":
        keep_freed_memory()
    # The encoder lacks a head, so the output embeddings are read separately.
    output_matrix = read_untied_output(config)
    settings = _resolve_length(settings, model)
    weights = hash_weights(model, output_matrix)
    identity = hash_model(weights, model, tokenizer)
    in_folder = read_earlier(out, ModelName(name, revision), identity)
    text_hashes = {source.name: compute_identity(*source.identify(settings.limit))[:16] for source in sources}
    names = {"name": name, "revision": revision}
    all_settings = {**asdict(settings), "texts": {source.name: str(source.path) for source in sources}}
    for other in filter(None, (in_folder, *earlier)):
        same_settings = other.settings | {"texts": None} == all_settings | {"texts": None}
        same_inputs = (identity, dtype, text_hashes) == (other.identity, other.model["dtype"], other.text_hashes)
        if same_settings and same_inputs:
            if console is not None:
                console.print("measured before")
            return replace(other, model=other.model | names, settings=all_settings, command=command)
    # The state of a pass also depends on the texts, and on the device, where sums have other rounding errors.
    paths = [source.path for source in sources]
    state_identity = compute_identity(identity, input_device.type, settings, paths, *text_hashes.values())
    reader = Stream(model, tokenizer, settings, Output(out, "state").open_state("pass"), state_identity)
    text_config, devices = model.config.get_text_config(), reader.taps.devices
    line, size = describe_memory(
        settings, text_config, WEIGHT_DTYPES[dtype], devices, len(sources), reader.num_processes
    )
    if console is not None and (size > 1e9 or not isinstance(device, str)):
        console.print(line, highlight=False, soft_wrap=True)
    # All that does not need the pass, which may take hours, is measured before it, so that a failure shows early.
    norm = reader.taps.norm
    with hold_weights(norm):
        gain_and_bias = None if norm is None else norm_parameters(norm, text_config.hidden_size)
    final_norm = None if gain_and_bias is None else asdict(layer_norm_summary(*gain_and_bias))
    weight = read_parameter(model.get_input_embeddings(), "weight")
    embeddings = {"input": measure_rows(weight, "input", console)}
    if output_matrix is not None:
        embeddings["output"] = measure_rows(output_matrix.values.to(input_device), "output", console)
    rows = {side: summary for side, (_, summary) in embeddings.items() if summary}
    try:
        summaries = reader(sources, lambda statistics: summarize_source(statistics, tokenizer), console)
    except NonFiniteError as error:
        if dtype != "float16":
            raise
        raise NonFiniteError(f"{error}; float16 ends at 65,504: choose --dtype float32 or bf16") from error
    # The last summary covers all texts together.
    token_counts = list(summaries.values())[-1]["token_counts"] if summaries else None
    for summary in rows.values():
        if token_counts is not None and max(summary["ids"]) < len(token_counts):
            summary["counts"] = token_counts[summary["ids"]].tolist()
    by_source: dict[str, Any] = {
        field: {source: summary[field] for source, summary in summaries.items()} for field in SOURCE_FIELDS
    }
    measurements = Measurements(
        model={
            **names,
            "dtype": dtype,
            "type": model.config.model_type,
            "device": str(input_device),
        },
        weights=weights,
        identity=identity,
        settings=all_settings,
        matrices={side: forms for side, (forms, _) in embeddings.items()},
        final_norm=final_norm,
        text_hashes=text_hashes,
        rows=rows,
        readings={source: asdict(reading) for source, reading in reader.readings.items()},
        processes=reader.num_processes,
        command=command,
        **by_source,
    )
    return replace(measurements, seconds=time.monotonic() - start + reader.earlier_seconds)


def hash_model(weights: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of all that a model's measures over a text depend on, as sixteen hexadecimal digits.

    That is `weights`, the result of `hash_weights`; the configuration, except for names and versions; and what decides
    how a new tokenizer splits texts.
    """
    config = json.loads(
        model.config.to_json_string(use_diff=False),
        object_hook=lambda values: {key: value for key, value in values.items() if key not in _NAMES_IN_CONFIG},
    )
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    tokenizer_parts = (type(tokenizer).__name__, vocabulary, tokenizer.special_tokens_map)
    return compute_identity(weights, config, tokenizer_parts)[:16]


def hash_weights(model: "PreTrainedModel", output_matrix: "Matrix | None") -> str:
    """Return a hash of a model's parameters and saved buffers, except its pooler's, and of untied output embeddings.

    It has sixteen hexadecimal digits. Offloaded weights are read one by one.
    """
    digest = hashlib.blake2b(digest_size=8)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    if output_matrix is not None:
        tensors["output"] = output_matrix.values
    for name, tensor in tensors.items():
        # No hidden state depends on the pooler, which is initialized randomly if the checkpoint lacks it.
        if "pooler" not in name:
            tensor = read_parameter(model, name) if tensor.is_meta else tensor
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def summarize_source(statistics: CorpusStatistics, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Return a source's `SOURCE_FIELDS` of `Measurements` by tap, and its `token_counts`, `(vocabulary,)`.

    The counts are None without IntraSim, which counts the tokens. The result shares no memory with the statistics.
    """
    layers = statistics.layers
    types = next(iter(layers.values())).types
    spectra = {tap: layer.compute_spectra() for tap, layer in layers.items()}
    replicates = {tap: layer.compute_replicates() for tap, layer in layers.items()}
    massive = {tap: layer.find_massive_activations() for tap, layer in layers.items()}
    by_frequency = {} if types is None else {tap: layer.summarize_by_frequency() for tap, layer in layers.items()}
    gride = statistics.estimate_gride()
    return {
        "sources": statistics.compute_measures(spectra, replicates),
        "spectra": {
            tap: {form: round_digits(values.tolist()) for form, values in forms.items()}
            for tap, forms in spectra.items()
        },
        "norms": {tap: trim_norm_histogram(layer) for tap, layer in layers.items()},
        "extremes": {tap: find_extreme_dimensions(layer) for tap, layer in layers.items()},
        "by_position": {tap: _round_columns(layer.summarize_by_position()) for tap, layer in layers.items()},
        "by_frequency": {tap: _round_columns(columns) for tap, columns in by_frequency.items()},
        "massive": {
            tap: describe_activations(summary, tokenizer) for tap, summary in massive.items() if summary is not None
        },
        "gride": {tap: [scale._asdict() for scale in scales] for tap, scales in gride.items()},
        "replicates": {
            tap: {name: round_digits(values, 12) for name, values in columns.items()}
            for tap, columns in replicates.items()
        },
        "token_counts": None if types is None else types.count.clone(),
    }


def _round_columns(columns: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: values if name in _INTEGER_COLUMNS else round_digits(values) for name, values in columns.items()}


def describe_activations(
    summary: MassiveActivationsSummary, tokenizer: "PreTrainedTokenizerBase"
) -> list[dict[str, Any]]:
    """Return the largest massive activations, each with its ratio to the median and the text of its token."""
    return [
        {
            **activation._asdict(),
            "ratio": abs(activation.value) / summary.median if summary.median else math.inf,
            "text": str(tokenizer.convert_ids_to_tokens(activation.token)),
        }
        for activation in summary.top
    ]


def measure_rows(matrix: Tensor, side: str, console: Console | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of `measure_forms` and `summarize_rows` for embeddings `(n, d)`; NaN and {} if not finite."""
    try:
        spectra = decompose_rows(matrix)
        return measure_forms(matrix, spectra), summarize_rows(matrix, spectra)
    except NonFiniteError as error:
        if console is not None:
            console.print(f"warning: the {side} embeddings get no measures: {error}", soft_wrap=True)
        forms = measure_forms(zeros := torch.zeros_like(matrix), decompose_rows(zeros))
        return replace_nested(forms, lambda value: isinstance(value, float), math.nan), {}


@torch.no_grad()
def summarize_rows(matrix: Tensor, spectra: Mapping[str, RowSpectrum]) -> dict[str, Any]:
    """Compute the histogram of the norms of rows `(n, d)`, and a two-dimensional projection of evenly spaced rows.

    `spectra` is the result of `decompose_rows`. The result has the histogram `norms`, the `ids` of the projected rows,
    and their coordinates by axis, `raw` and `centered`.
    """
    norms = torch.cat([row_norms(block) for block in upcast_blocks(matrix)]).cpu().numpy()
    low, high = norms.min(), norms.max()
    # A range of rounding errors, as of normalized rows, is not divided into bins.
    ends = (0.9 * low, 1.1 * high) if high - low <= 1e-6 * high else (low, high)
    bin_counts, edges = np.histogram(norms, bins=40, range=ends)
    histogram = {"edges": round_digits(edges), "counts": bin_counts.tolist()}
    return {"norms": histogram, **project_rows(matrix, spectra)}


def trim_norm_histogram(layer: Layer) -> dict[str, list[float]]:
    """Return the `edges` and `counts` of the histogram of a layer's norms, without the empty bins at either end.

    `outside` has the numbers of norms below and above the layer's histogram.
    """
    norms = layer.norms.compute()
    nonempty = np.flatnonzero(norms.histogram)
    first_bin, end_bin = (int(nonempty[0]), int(nonempty[-1]) + 1) if len(nonempty) else (0, 0)
    return {
        "edges": round_digits(norms.edges[first_bin : end_bin + 1]),
        "counts": list(norms.histogram[first_bin:end_bin]),
        "outside": [norms.below, norms.above],
    }


def find_extreme_dimensions(layer: Layer) -> list[dict[str, float]]:
    """Return the three dimensions of a layer with means farthest from zero, the farthest first.

    Each has its index `dimension`, its `mean`, its standard `deviation`, `mean_by_typical_deviation` (the mean divided
    by the median deviation of all dimensions) and `variance_share` (its share of the summed variance).
    """
    dimensions = layer.dimensions
    mean, deviation = dimensions.mean, dimensions.deviation()
    typical_deviation = deviation.quantile(0.5)
    mean_by_typical_deviation = mean / torch.where(typical_deviation > 0, typical_deviation, math.nan)
    variance_share = deviation.square() / deviation.square().sum()
    return [
        {
            "dimension": dimension,
            "mean": mean[dimension].item(),
            "deviation": deviation[dimension].item(),
            "mean_by_typical_deviation": mean_by_typical_deviation[dimension].item(),
            "variance_share": variance_share[dimension].item(),
        }
        for dimension in mean.abs().argsort(descending=True, stable=True)[:3].tolist()
    ]


def load_placed_encoder(
    config: ModelConfig, tokenizer: "PreTrainedTokenizerBase", dtype: str, device: str | Mapping[str, Any]
) -> Any:
    """Load a model without its head onto a device, or with its layers on several; see `measure_model`."""
    from istar.models.pretrained import load_encoder

    placement = {} if isinstance(device, str) else device
    model: Any = load_encoder(config, tokenizer, WEIGHT_DTYPES[dtype], **placement)
    return model.to(find_device(device)) if isinstance(device, str) else model


def find_device(name: str) -> torch.device:
    """Return an available device by name, or raise a `UserError`; `auto` is this process's GPU, or else the CPU."""
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


def _resolve_length(settings: MeasureSettings, model: "PreTrainedModel") -> MeasureSettings:
    """Return the settings with a block length that fits the model: 0 becomes the model's longest input, at most 512.

    Raises a `UserError` if the length is greater than the model's longest input.
    """
    max_length = find_max_input_length(model.config)
    if max_length is not None and settings.length > max_length:
        raise UserError(f"--length {settings.length} is too long; the model takes at most {max_length} tokens")
    return replace(settings, length=settings.length or min(max_length or _MAX_DEFAULT_LENGTH, _MAX_DEFAULT_LENGTH))


def compute_identity(*parts: object) -> str:
    """Return a hash of the `repr` of the values that the result of a pass depends on."""
    return hashlib.blake2b("".join(map(repr, parts)).encode()).hexdigest()
