"""`istar measure`: measure a model's layers, embedding matrices and final normalization, and write the files."""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.geometry import arrays, stream
from istar.geometry.corpus import COMBINED, Source
from istar.geometry.matrix import read_untied_output
from istar.geometry.stream import Pass, Statistics, Stream
from istar.geometry.taps import Taps
from istar.measures import (
    MassiveActivationsSummary,
    ScaleDimension,
    all_but_the_top,
    centered,
    layer_norm_summary,
    norm_summary,
    partition_isotropy,
    singular_values,
)
from istar.models import load_encoder, load_tokenizer

T = TypeVar("T")
BySourceAndTap = dict[str, dict[str, T]]
FORMAT_VERSION = 2
"""Version of `measures.json`. In version 1, texts were always packed, and special tokens were in the statistics."""
JSON_FILE, CSV_FILE = "measures.json", "measures.csv"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_DEFAULT_LENGTH = 512
_INTEGER_COLUMNS = ("first", "last", "tokens")
"""Columns of `Layer.summarize_by_position` and `Layer.summarize_by_frequency` that hold whole numbers."""
TABLE_HEADERS = {
    "isoscore": "IsoScore",
    "isoscore_unbiased": "unbiased",
    "inter_sim": "InterSim",
    "intra_sim": "IntraSim",
    "two_nn": "TwoNN",
    "average_norm": "norm",
    "effective_rank": "rank",
}
"""Headers of the measures in the terminal table."""


@dataclass(frozen=True)
class Measurements:
    """The contents of `measures.json`."""

    model: dict[str, Any]  # name and revision as given, dtype, model type and device
    weights: str  # hash of all weights; equal weights have equal hashes, whatever their revision is called
    settings: dict[str, Any]  # settings of the pass, and the paths of the texts
    # Measures by source and tap. With several sources, `combined` is all of them together.
    sources: BySourceAndTap[dict[str, float]]
    spectra: BySourceAndTap[dict[str, list[float]]]  # singular values of the hidden states, raw and centered
    # Measures of the `input` embeddings and, if they are not tied, of the `output` embeddings, by form: `raw`,
    # `centered` and `post_processed`.
    matrices: dict[str, dict[str, dict[str, Any]]]
    final_norm: dict[str, Any] | None  # gain and bias of the final normalization; None if the model has no gain there
    norms: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)  # see `arrays.trim_norm_histogram`
    # See `arrays.find_extreme_dimensions`.
    extremes: BySourceAndTap[list[dict[str, float]]] = field(default_factory=dict)
    # Norm and InterSim of the tokens by position in the model's input, and by how often their type occurs in the texts;
    # see `Layer.summarize_by_position` and `Layer.summarize_by_frequency`.
    by_position: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)
    by_frequency: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)
    # The largest massive activations: value, dimension, token id, position, the token's text, and `ratio`, the
    # magnitude divided by the median magnitude.
    massive: BySourceAndTap[list[dict[str, Any]]] = field(default_factory=dict)
    # Intrinsic dimension by scale: fields of `ScaleDimension`.
    gride: BySourceAndTap[list[dict[str, float]]] = field(default_factory=dict)
    # Measures without each group of documents, for jackknife errors of differences; see `Layer.compute_replicates`.
    replicates: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)
    text_hashes: dict[str, str] = field(default_factory=dict)  # hash of each text's content by its name
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # `arrays.summarize_rows` of each embedding matrix
    # How much of each text, and of `combined`, was read and how long that took: fields of `corpus.Reading`. Empty in
    # files of earlier versions.
    readings: dict[str, dict[str, float]] = field(default_factory=dict)
    # Time from loading the model to the last measure, including interrupted calls; None in files of earlier versions.
    seconds: float | None = None
    processes: int = 1  # number of processes that shared the pass
    command: str = ""  # command line that took these measures
    format: int = FORMAT_VERSION

    @property
    def combined_key(self) -> str:
        """Key of all texts together in `sources`: `combined`, or the name of the only source."""
        return COMBINED if COMBINED in self.sources else next(iter(self.sources))

    @property
    def all_texts(self) -> dict[str, dict[str, float]]:
        """Measures by tap over all texts together."""
        return self.sources[self.combined_key]


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
                tap: {form: arrays.round_digits(values.tolist()) for form, values in forms.items()}
                for tap, forms in spectra.items()
            },
            norms={tap: arrays.trim_norm_histogram(layer) for tap, layer in layers.items()},
            extremes={tap: arrays.find_extreme_dimensions(layer) for tap, layer in layers.items()},
            by_position={tap: _round_columns(layer.summarize_by_position()) for tap, layer in layers.items()},
            by_frequency={tap: _round_columns(columns) for tap, columns in by_frequency.items()},
            massive={tap: _add_ratios(summary) for tap, summary in massive.items() if summary is not None},
            gride=statistics.estimate_gride(),
            replicates={
                tap: {name: arrays.round_digits(values, 12) for name, values in columns.items()}
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
        dtype: dtype of the weights, a key of `DTYPES`. Statistics are at least float32.
        device: name of a device, such as cpu, cuda, cuda:1 or mps; auto is the GPU if there is one, else the CPU.
        console: console for a progress bar; None shows none.
        command: command line to record in the measures.

    Raises:
        UserError: if the model or a text cannot be read, or an argument does not fit the model or the machine.
    """
    start = time.monotonic()
    config = ModelConfig(name=name, revision=revision)
    tokenizer = load_tokenizer(config)
    model: Any = load_encoder(config, tokenizer, DTYPES[dtype])
    model = model.to(_find_device(device))
    # An encoder has no head, so the output embeddings are read separately. This is done before the pass, which may take
    # hours, so that a failure shows early.
    output = read_untied_output(config)
    settings = _resolve_length(settings, model)
    weights = hash_weights(model)
    hashes = {source.name: stream.compute_identity(source.path)[:16] for source in sources}
    # The identity includes the paths and the contents of the texts.
    identity = stream.compute_identity(weights, settings, [source.path for source in sources], *hashes.values())
    reader = Stream(model, tokenizer, settings, out / ".pass", identity)
    summaries = reader(sources, _Summary.from_statistics, console)
    embeddings = {"input": model.get_input_embeddings().weight.detach()}
    if output is not None:
        embeddings["output"] = output.values.to(model.device)
    # The last summary is that of all texts together.
    counts = list(summaries.values())[-1].token_counts if summaries else None
    measured = Measurements(
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
        matrices={side: _measure_forms(matrix) for side, matrix in embeddings.items()},
        final_norm=_measure_final_norm(model),
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
        text_hashes=hashes,
        rows={side: arrays.summarize_rows(matrix, counts) for side, matrix in embeddings.items()},
        readings={source: asdict(reading) for source, reading in reader.readings.items()},
        processes=reader.num_processes,
        command=command,
    )
    return replace(measured, seconds=time.monotonic() - start + reader.earlier_seconds)


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


def measure_matrix(matrix: Tensor) -> dict[str, Any]:
    """Measure a matrix `(n, d)`: I(W) with both conventions for the eigenvectors' signs, norms and singular values."""
    norms = norm_summary(matrix)
    as_computed, both = (partition_isotropy(matrix, signs) for signs in ("as_computed", "both"))
    return {
        "rows": matrix.shape[0],
        "dimensions": matrix.shape[1],
        "partition_isotropy_as_computed": as_computed.value,
        "partition_isotropy_both": both.value,
        "average_norm": norms.average,
        "mean_vector_norm": norms.mean_vector,
        "norm_ratio": norms.ratio,
        "singular_values": arrays.round_digits(singular_values(matrix, centered=False).tolist()),
    }


def file_contents(measured: Measurements) -> dict[str, str]:
    """Return the contents of `measures.json` and `measures.csv` by file name."""
    # JSON has no NaN.
    text = json.dumps(_replace_nested(asdict(measured), _is_undefined, None), indent=1, allow_nan=False)
    # Put each list of numbers on one line. JSON strings contain no line breaks, so the pattern matches no string.
    text = re.sub(r"\[\n[-+\d.enul,\s]+\]", lambda match: " ".join(match[0].split()), text)
    frame = layer_frame(measured)
    frame.insert(0, "model", measured.model["name"])
    frame.insert(1, "revision", measured.model["revision"])
    return {JSON_FILE: text + "\n", CSV_FILE: frame.to_csv(index=False)}


def write(measured: Measurements, out: Path) -> None:
    """Write `measures.json` and `measures.csv` to a folder."""
    for name, text in file_contents(measured).items():
        write_text(out / name, text)


def layer_frame(measured: Measurements) -> pd.DataFrame:
    """Return a data frame with a row for each source and layer, and a column for each measure."""
    return pd.DataFrame(
        {"source": source, "layer": tap, **measures}
        for source, taps in measured.sources.items()
        for tap, measures in taps.items()
    )


_NUMBER_FIELDS = (
    *("sources", "spectra", "matrices", "final_norm", "norms", "extremes"),
    *("by_position", "by_frequency", "gride", "replicates"),
)
"""Fields of `Measurements` in which a nested null stands for an undefined number."""


def _is_undefined(value: Any) -> bool:
    """Return whether a value is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


def _replace_nested(value: Any, is_replaced: Callable[[Any], bool], substitute: Any) -> Any:
    """Return a copy of nested dictionaries and lists in which a substitute replaces certain values."""
    if isinstance(value, dict):
        return {key: _replace_nested(item, is_replaced, substitute) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nested(item, is_replaced, substitute) for item in value]
    return substitute if is_replaced(value) else value


def read(path: Path) -> Measurements:
    """Read the measures of a model from `measures.json`. Undefined numbers, which the file holds as null, become NaN.

    Raises:
        UserError: if the file cannot be read, is damaged, or has another version of the format.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT_VERSION:
            raise UserError(
                f"{path} has format {values['format']}, of another version of istar; expected {FORMAT_VERSION}; delete "
                "the file and measure the model again"
            )
        for name in _NUMBER_FIELDS:
            if values.get(name) is not None:
                values[name] = _replace_nested(values[name], lambda value: value is None, math.nan)
        return Measurements(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} holds no measures of istar: {shorten(error)}; measure the model again") from error


def _round_columns(columns: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Round the columns of a table to significant digits, except those of whole numbers."""
    return {
        name: values if name in _INTEGER_COLUMNS else arrays.round_digits(values) for name, values in columns.items()
    }


def _add_ratios(summary: MassiveActivationsSummary) -> list[dict[str, Any]]:
    """Return the largest massive activations with `ratio`, their magnitude divided by the median magnitude."""
    return [
        {**activation._asdict(), "ratio": abs(activation.value) / summary.median if summary.median else math.inf}
        for activation in summary.top
    ]


def _add_token_texts(
    activations_by_tap: Mapping[str, list[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[dict[str, Any]]]:
    """Return massive activations by tap with `text`, the text of the activation's token."""
    return {
        tap: [
            {**activation, "text": str(tokenizer.convert_ids_to_tokens(activation["token"]))}
            for activation in activations
        ]
        for tap, activations in activations_by_tap.items()
    }


def _measure_final_norm(model: PreTrainedModel) -> dict[str, Any] | None:
    """Measure the gain and bias of a model's final normalization, or return None if the model has no gain there."""
    norm = Taps(model).norm
    gain = getattr(norm, "weight", None)
    return None if gain is None else asdict(layer_norm_summary(gain, getattr(norm, "bias", None)))


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
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} is not available; expected auto, cpu, or a device such as cuda:0") from error
    return device


def _resolve_length(settings: Pass, model: PreTrainedModel) -> Pass:
    """Return the settings with a block length that fits the model: 0 becomes the model's longest input, at most 512.

    Raises:
        UserError: if the length is greater than the model's longest input.
    """
    longest = _longest_input(model)
    if longest is not None and settings.length > longest:
        raise UserError(f"--length {settings.length} is too long; the model takes at most {longest} tokens")
    return replace(settings, length=settings.length or min(longest or _MAX_DEFAULT_LENGTH, _MAX_DEFAULT_LENGTH))


def _longest_input(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens of a model's input, or None if inputs may have any length."""
    config = model.config.get_text_config()
    # Falcon's config has `max_position_embeddings` even if its attention uses ALiBi and its inputs have no limit.
    if getattr(config, "alibi", False):
        return None
    # MPT's config calls the limit `max_seq_len`.
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or -1
    # RoBERTa's positions start behind the id of the padding token.
    offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    # Models with relative positions have no `max_position_embeddings`, or -1.
    return limit - offset if limit > 0 else None


def terminal_table(measured: Measurements) -> Table:
    """Return a terminal table of the main measures of each layer, over all texts together."""
    measures_by_tap = measured.all_texts
    tokens = next(iter(measures_by_tap.values()))["tokens"]
    title = f"{measured.model['name']} · {tokens:,.0f} tokens"
    matrices = [
        f"{side} embeddings {form.replace('_', '-')} {measures['partition_isotropy_both']:.4g}"
        for side, forms in measured.matrices.items()
        for form, measures in forms.items()
    ]
    names = [name for name in TABLE_HEADERS if any(name in measures for measures in measures_by_tap.values())]
    rows = {tap: [measures.get(name, math.nan) for name in names] for tap, measures in measures_by_tap.items()}
    caption = f"I(W), both signs: {'; '.join(matrices)}."
    return number_table(title, "layer", [TABLE_HEADERS[name] for name in names], rows, caption)


def number_table(
    title: str,
    label_header: str,
    headers: Iterable[str],
    rows: Mapping[str, Iterable[float]],
    caption: str | None = None,
) -> Table:
    """Return a terminal table of numbers with a labelled row for each item of `rows`; NaN is shown as a dash."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column(label_header, overflow="fold")
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    for label, numbers in rows.items():
        table.add_row(label, *("-" if math.isnan(number) else f"{number:.4g}" for number in numbers))
    return table
