"""`istar measure`: opens a model, and measures its layers, embedding matrices and final normalization."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import NonFiniteError, UserError, shorten
from istar.files.outputs import Output
from istar.files.writing import replace_nested
from istar.geometry.collect.layers import Layer
from istar.geometry.collect.measures_file import SOURCE_FIELDS, Measurements, ModelName, read_earlier
from istar.geometry.collect.source_sums import MeasureSettings, SourceSums
from istar.geometry.collect.stream import Stream
from istar.hidden_states.offloading import find_input_device, hold_weights, read_parameter
from istar.measures import MassiveActivationsSummary, layer_norm_summary
from istar.measures.matrix_forms import measure_forms, project_rows, round_digits
from istar.measures.norms import norm_parameters
from istar.measures.numerics import keep_freed_memory, row_norms, upcast_blocks
from istar.measures.spectrum import RowSpectrum, decompose_rows
from istar.models.architectures import find_max_input_length
from istar.models.embedding_matrix import Matrix, read_untied_output
from istar.models.model_source import ModelSource
from istar.models.pretrained import load_encoder, load_tokenizer
from istar.texts.corpus import Source

_MAX_DEFAULT_LENGTH = 512
_INTEGER_COLUMNS = ("first", "last", "points")
"""Columns of `Layer.summarize_by_position` and `Layer.summarize_by_frequency` with whole numbers."""
_NAMES_IN_CONFIG = ("_name_or_path", "transformers_version", "dtype")
"""Keys of a model's configuration that say where its files are from, and how they are loaded."""


@dataclass(frozen=True)
class OpenedModel:
    """A model in memory, and what its measurements say about it."""

    name: str  # name in the results: hub id, folder or file
    revision: str | None  # branch, tag or commit on the hub
    encoder: PreTrainedModel  # the model without a head, in eval mode, on its devices
    tokenizer: PreTrainedTokenizerBase
    output_matrix: Matrix | None  # output embeddings, which the encoder lacks; None without any, or if they are tied
    dtype: str  # dtype of the weights, a key of `DTYPES`
    weights: str  # result of `hash_weights`
    identity: str  # result of `hash_model`
    seconds: float = 0.0  # time that loading took

    @property
    def device(self) -> torch.device:
        """Device of the model's input."""
        return find_input_device(self.encoder)


def open_model(
    source: ModelSource, dtype: str = "float32", device: str | Mapping[str, Any] = "auto", name: str | None = None
) -> OpenedModel:
    """Load a model to measure.

    `dtype` and `device` are as for `load_encoder`. `name` is the model's name in the results, if that is not the name
    of the source. Raises a `UserError` if the model cannot be loaded or placed on the device.
    """
    start = time.monotonic()
    tokenizer = load_tokenizer(source)
    encoder = load_encoder(source, tokenizer, dtype, device)
    output_matrix = read_untied_output(source)
    weights = hash_weights(encoder, output_matrix)
    return OpenedModel(
        name=name or source.name,
        revision=source.revision,
        encoder=encoder,
        tokenizer=tokenizer,
        output_matrix=output_matrix,
        dtype=dtype,
        weights=weights,
        identity=hash_model(weights, encoder, tokenizer),
        seconds=time.monotonic() - start,
    )


def measure_model(
    model: OpenedModel,
    texts: Sequence[Source],
    settings: MeasureSettings,
    out: Path,
    console: Console | None = None,
    command: str = "",
    earlier: Iterable[Measurements] = (),
) -> Measurements:
    """Measure a model's hidden states over texts in one pass, its embedding matrices and its final normalization.

    An interrupted pass resumes from the state that it has saved in `out`; `measures_file.discard_state` deletes it once
    the result is on disk. With several processes, only rank 0 returns measures of the hidden states. A length of 0 in
    `settings` means the model's longest input, 512 at most, or 512 if the model takes inputs of any length. Statistics
    are at least float32. A console shows a progress bar, and warns of embeddings that are not finite, which get NaN for
    all measures. `command` is recorded in the measures.

    If the measurements in `out`, or one of the `earlier` ones, are of the same model (see `hash_model`), settings,
    dtype and texts, they are returned with the new names instead, and the console says so.

    Raises a `UserError` if a text cannot be read, a setting does not fit the model, memory runs out, or hidden states
    are not finite, and an `OtherModelError` if `out` contains the measures of another model.
    """
    start = time.monotonic()
    names = ModelName(model.name, model.revision)
    settings = _resolve_length(settings, model.encoder)
    all_settings = {**asdict(settings), "texts": {text.name: str(text.path) for text in texts}}
    text_hashes = {text.name: compute_identity(*text.identify(settings.limit))[:16] for text in texts}
    for other in filter(None, (read_earlier(out, names, model.identity), *earlier)):
        if _measures_the_same(other, model, all_settings, text_hashes):
            if console is not None:
                console.print("measured before")
            return replace(other, model=other.model | names._asdict(), settings=all_settings, command=command)
    stream = _open_stream(model, texts, settings, out, text_hashes)
    # The pass may take hours. Whatever does not need it is measured before, so that a failure shows early.
    final_norm = _measure_final_norm(stream.taps.norm, model.encoder.config.get_text_config().hidden_size)
    embeddings = _measure_embeddings(model, console)
    summaries = _run_pass(stream, texts, model, console)
    by_source: dict[str, Any] = {
        field: {source: summary[field] for source, summary in summaries.items()} for field in SOURCE_FIELDS
    }
    return Measurements(
        model={
            **names._asdict(),
            "dtype": model.dtype,
            "type": model.encoder.config.model_type,
            "device": str(model.device),
        },
        weights=model.weights,
        identity=model.identity,
        settings=all_settings,
        matrices={side: forms for side, (forms, _) in embeddings.items()},
        final_norm=final_norm,
        text_hashes=text_hashes,
        rows=_count_rows({side: rows for side, (_, rows) in embeddings.items() if rows}, summaries),
        readings={source: asdict(reading) for source, reading in stream.readings.items()},
        seconds=model.seconds + time.monotonic() - start + stream.earlier_seconds,
        processes=stream.num_processes,
        command=command,
        **by_source,
    )


def _measures_the_same(
    other: Measurements, model: OpenedModel, settings: Mapping[str, Any], text_hashes: Mapping[str, str]
) -> bool:
    if (other.identity, other.model["dtype"], other.text_hashes) != (model.identity, model.dtype, text_hashes):
        return False
    return {**other.settings, "texts": None} == {**settings, "texts": None}


def _open_stream(
    model: OpenedModel, texts: Sequence[Source], settings: MeasureSettings, out: Path, text_hashes: Mapping[str, str]
) -> Stream:
    if model.device.type == "cpu":
        keep_freed_memory()
    # The state also depends on the device, where sums have other rounding errors.
    paths = [text.path for text in texts]
    state_identity = compute_identity(model.identity, model.device.type, settings, paths, *text_hashes.values())
    state_path = Output(out, "state").open_state("pass")
    return Stream(model.encoder, model.tokenizer, settings, state_path, state_identity)


def _measure_final_norm(norm: nn.Module | None, dim: int) -> dict[str, Any] | None:
    if norm is None:
        return None
    with hold_weights(norm):
        gain_and_bias = norm_parameters(norm, dim)
    return None if gain_and_bias is None else asdict(layer_norm_summary(*gain_and_bias))


def _measure_embeddings(
    model: OpenedModel, console: Console | None
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    weight = read_parameter(model.encoder.get_input_embeddings(), "weight")
    embeddings = {"input": measure_rows(weight, "input", console)}
    if model.output_matrix is not None:
        embeddings["output"] = measure_rows(model.output_matrix.values.to(model.device), "output", console)
    return embeddings


def _run_pass(
    stream: Stream, texts: Sequence[Source], model: OpenedModel, console: Console | None
) -> dict[str, dict[str, Any]]:
    try:
        return stream(texts, lambda statistics: summarize_source(statistics, model.tokenizer), console)
    except NonFiniteError as error:
        if model.dtype != "float16":
            raise
        raise NonFiniteError(f"{error}; float16 ends at 65,504: choose --dtype float32 or bf16") from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(
            f"the pass does not fit into memory ({shorten(error)}); lower --batch-tokens, --groups or --sample, leave "
            "out IntraSim with --no-intra, or give the weights less memory by --device-map auto and --max-memory"
        ) from error


def _count_rows(
    rows: dict[str, dict[str, Any]], summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Add to the results of `summarize_rows` how often each projected row's token occurs in all texts together."""
    # The last summary covers all texts together.
    token_counts = list(summaries.values())[-1]["token_counts"] if summaries else None
    for summary in rows.values():
        if token_counts is not None and max(summary["ids"]) < len(token_counts):
            summary["counts"] = token_counts[summary["ids"]].tolist()
    return rows


def hash_model(weights: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
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


def hash_weights(model: PreTrainedModel, output_matrix: Matrix | None) -> str:
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


def summarize_source(statistics: SourceSums, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a source's `SOURCE_FIELDS` by the name of the hidden state, and its `token_counts`, `(vocabulary,)`.

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
    summary: MassiveActivationsSummary, tokenizer: PreTrainedTokenizerBase
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


def _resolve_length(settings: MeasureSettings, model: PreTrainedModel) -> MeasureSettings:
    """Return the settings with a block length that fits the model: 0 becomes the model's longest input, at most 512."""
    max_length = find_max_input_length(model.config)
    if max_length is not None and settings.length > max_length:
        raise UserError(f"--length {settings.length} is too long; the model takes at most {max_length} tokens")
    return replace(settings, length=settings.length or min(max_length or _MAX_DEFAULT_LENGTH, _MAX_DEFAULT_LENGTH))


def compute_identity(*parts: object) -> str:
    """Return a hash of the `repr` of the values that the result of a pass depends on."""
    return hashlib.blake2b("".join(map(repr, parts)).encode()).hexdigest()
