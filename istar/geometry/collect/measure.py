"""`istar measure`: opens a model, and measures its layers, embedding matrices and final normalization."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import NonFiniteError, UserError, shorten
from istar.files.outputs import Output
from istar.geometry.collect.item_labels import Labels
from istar.geometry.collect.matrices import measure_final_norm, measure_rows
from istar.geometry.collect.mean_states import read_examples
from istar.geometry.collect.measures_file import EXAMPLES_FILE, Measurements, ModelName, arrange_by_source, read_earlier
from istar.geometry.collect.model_identity import compute_identity, hash_model, hash_weights
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.geometry.collect.stream import Stream
from istar.geometry.collect.summaries import Collected, join_examples, summarize_source
from istar.hidden_states.model_layers import find_base_model, find_head_model
from istar.hidden_states.offloading import find_input_device, read_parameter
from istar.measures.numerics import keep_freed_memory
from istar.models.architectures import find_max_input_length
from istar.models.embedding_matrix import Matrix, read_untied_output
from istar.models.model_source import ModelSource
from istar.models.pretrained import load_encoder, load_tokenizer
from istar.texts.corpus import Source

_MAX_DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class OpenedModel:
    """A model in memory, and what its measurements say about it."""

    names: ModelName  # in the results
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
        names=ModelName(name or source.name, source.revision),
        encoder=encoder,
        tokenizer=tokenizer,
        output_matrix=output_matrix,
        dtype=dtype,
        weights=weights,
        identity=hash_model(weights, encoder, tokenizer),
        seconds=time.monotonic() - start,
    )


@dataclass(frozen=True)
class TextPass:
    """Everything that the result of a pass depends on: the model, the texts and the settings."""

    model: OpenedModel
    texts: Sequence[Source]
    settings: MeasureSettings  # with a length that fits the model
    text_hashes: Mapping[str, str]  # hash of each text's content by its name

    @property
    def recorded_settings(self) -> dict[str, Any]:
        """The settings as `Measurements` have them, with the paths of the texts."""
        return {**asdict(self.settings), "texts": {text.name: str(text.path) for text in self.texts}}


def plan_pass(model: OpenedModel, texts: Sequence[Source], settings: MeasureSettings) -> TextPass:
    """Return what to measure; a length of 0 becomes the model's longest input, at most 512.

    Raises a `UserError` if a text cannot be read, or a setting does not fit the model.
    """
    settings = _resolve_length(settings, model.encoder)
    text_hashes = {text.name: compute_identity(*text.identify(settings.limit))[:16] for text in texts}
    return TextPass(model, texts, settings, text_hashes)


def hold_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> OpenedModel:
    """Return a transformers model in memory, bare or with a head, as a model to measure.

    Raises a `UserError` if there is no such model in the module, or it is an encoder-decoder.
    """
    encoder: Any = find_base_model(model)
    head_model: Any = find_head_model(model)
    output = head_model.get_output_embeddings()
    is_untied = output is not None and output.weight is not encoder.get_input_embeddings().weight
    matrix = Matrix(output.weight.detach(), "output", "", None, tied=False) if is_untied else None
    dtype = str(next(encoder.parameters()).dtype).removeprefix("torch.")
    names = ModelName(type(head_model).__name__)
    return OpenedModel(names, encoder, tokenizer, matrix, dtype, weights="", identity="")


def measure_texts(
    plan: TextPass,
    out: Path | None = None,
    console: Console | None = None,
    num_examples: int = 0,
    labels: Labels | None = None,
    earlier: Iterable[Measurements] = (),
) -> Collected:
    """Measure a model's hidden states over texts in one pass, its embedding matrices and its final normalization.

    If the measurements in the folder `out`, or one of the `earlier` ones, are of the same model (see `hash_model`),
    settings, dtype and texts, they are returned with the new names, and the console says so. With `num_examples`, they
    need the examples in `out`. Otherwise, the pass saves its state in `out` and resumes from it after an interruption;
    `measures_file.discard_state` deletes the state once the result is on disk.

    With several processes, only rank 0 returns measures of the hidden states. Statistics are at least float32. A
    console shows a progress bar, and warns of embeddings that are not finite, which get NaN for all measures. The mean
    states of the first `num_examples` documents of all texts together are kept. `labels` has the groups of the
    documents of each text, see `Stream`.

    Raises a `UserError` if a text cannot be read, memory runs out, or hidden states are not finite, and an
    `OtherModelError` if `out` contains the measures of another model.
    """
    measured = None if out is None else _find_earlier(plan, out, earlier, num_examples)
    if measured is not None:
        if console is not None:
            console.print("measured before")
        return measured
    start, model = time.monotonic(), plan.model
    examples_by_text = num_examples // len(plan.texts) if plan.settings.documents == "separate" else 0
    stream = _open_stream(plan, out, examples_by_text, labels)
    try:
        # The pass may take hours. Whatever does not need it is measured before, so that a failure shows early.
        final_norm = measure_final_norm(stream.taps.norm, model.encoder.config.get_text_config().hidden_size)
        embeddings = _measure_embeddings(model, console)
        summaries = _run_pass(stream, plan, console)
    finally:
        stream.taps.remove()
    measurements = Measurements(
        model={
            **model.names._asdict(),
            "dtype": model.dtype,
            "type": model.encoder.config.model_type,
            "device": str(model.device),
        },
        weights=model.weights,
        identity=model.identity,
        settings=plan.recorded_settings,
        matrices={side: forms for side, (forms, _) in embeddings.items()},
        final_norm=final_norm,
        text_hashes=dict(plan.text_hashes),
        rows=_count_rows({side: rows for side, (_, rows) in embeddings.items() if rows}, summaries),
        readings={source: asdict(reading) for source, reading in stream.readings.items()},
        seconds=model.seconds + time.monotonic() - start + stream.earlier_seconds,
        processes=stream.num_processes,
        groups=dict.fromkeys(stream.taps.names, labels.num_independent) if labels and labels.num_independent else {},
        **arrange_by_source(summaries),
    )
    sums = {plan.text_hashes[name]: summaries[name]["examples"] for name in plan.text_hashes if name in summaries}
    return Collected(
        measurements, join_examples(sums, labels or Labels(plan.settings.groups)) if examples_by_text else None
    )


def _find_earlier(plan: TextPass, out: Path, earlier: Iterable[Measurements], num_examples: int) -> Collected | None:
    model, settings = plan.model, plan.recorded_settings
    key = (model.identity, model.dtype, plan.text_hashes, {**settings, "texts": None})
    in_folder = read_earlier(out, model.names, model.identity)
    examples = read_examples(out / EXAMPLES_FILE) if num_examples and (out / EXAMPLES_FILE).is_file() else None
    for other in earlier if in_folder is None else (in_folder, *earlier):
        other_key = (other.identity, other.model["dtype"], other.text_hashes, {**other.settings, "texts": None})
        if other_key == key and (examples is not None or not num_examples):
            return Collected(replace(other, model=other.model | model.names._asdict(), settings=settings), examples)
    return None


def _open_stream(plan: TextPass, out: Path | None, num_examples: int, labels: Labels | None) -> Stream:
    model = plan.model
    if model.device.type == "cpu":
        keep_freed_memory()
    # The state also depends on the device, where sums have other rounding errors.
    paths, hashes = [text.path for text in plan.texts], plan.text_hashes.values()
    identity = compute_identity(model.identity, model.device.type, plan.settings, num_examples, paths, *hashes)
    state_path = None if out is None else Output(out, "state").open_state("pass")
    return Stream(model.encoder, model.tokenizer, plan.settings, state_path, identity, num_examples, labels)


def _measure_embeddings(
    model: OpenedModel, console: Console | None
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    weight = read_parameter(model.encoder.get_input_embeddings(), "weight")
    embeddings = {"input": measure_rows(weight, "input", console)}
    if model.output_matrix is not None:
        embeddings["output"] = measure_rows(model.output_matrix.values.to(model.device), "output", console)
    return embeddings


def _run_pass(stream: Stream, plan: TextPass, console: Console | None) -> dict[str, dict[str, Any]]:
    def name_token(token_id: int) -> str:
        return str(plan.model.tokenizer.convert_ids_to_tokens(token_id))

    try:
        return stream(plan.texts, lambda sums: summarize_source(sums, name_token), console)
    except NonFiniteError as error:
        if plan.model.dtype != "float16":
            raise
        raise NonFiniteError(f"{error}; float16 ends at 65,504: choose the dtype float32 or bf16") from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(
            f"the pass does not fit into memory ({shorten(error)}); lower batch_tokens or sample; istar "
            "measure can also have fewer --groups, leave out IntraSim by --no-intra, and give the weights less memory "
            "by --device-map auto and --max-memory"
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


def _resolve_length(settings: MeasureSettings, model: PreTrainedModel) -> MeasureSettings:
    max_length = find_max_input_length(model.config)
    if max_length is not None and settings.length > max_length:
        raise UserError(f"length={settings.length} is too long; the model takes at most {max_length} tokens")
    return replace(settings, length=settings.length or min(max_length or _MAX_DEFAULT_LENGTH, _MAX_DEFAULT_LENGTH))
