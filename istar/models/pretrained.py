"""A pretrained model and its tokenizer: loaded as they are, checked on a trial input, and saved."""

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError, shorten
from istar.models import model_files
from istar.models.adapters import find_base, save_adapters
from istar.models.architectures import is_decoder
from istar.models.model_source import DTYPES, ModelSource, is_folder
from istar.models.special_tokens import make_one_token_tokenizer

_OTHER_INPUTS = {"input_features", "input_values", "pixel_values"}
"""Names of arguments for images and sound."""

log = logging.getLogger(__name__)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a source.

    A tokenizer without a padding token, as many decoders have, pads with its end-of-text token.

    Raises a `UserError` if the tokenizer is not found, is not a fast one or lacks a vocabulary.
    """
    noun = "model" if source.tokenizer is None else "tokenizer"
    source = source.tokenizer_source
    if os.path.isfile(source.name):  # noqa: PTH113  Path.is_file raises an error if the name is too long
        raise UserError(f"{noun} {source.name} is a file; name the folder that save_pretrained wrote it to")
    if is_folder(source.name):
        model_files.check_json_files(Path(source.name))
        source = find_base(source, "tokenizer_config.json") or source
    with model_files.convert_to_user_errors(source, noun), model_files.silence_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.name, **model_files.make_hub_options(source))
    if not tokenizer.is_fast:
        raise UserError(f"{noun} {source.name} has no fast tokenizer; choose a model with a tokenizer.json")
    # If files are missing, transformers creates a tokenizer with special tokens only; all texts are alike to it.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(
            f"{noun} {source.name} has no vocabulary: every word would be unknown; it needs the tokenizer.json "
            "or the vocabulary file that belongs to the model"
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_encoder(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str = "float32",
    device: str | Mapping[str, Any] = "cpu",
) -> PreTrainedModel:
    """Load a text model without its head, in eval mode; of an encoder-decoder, load only the encoder.

    `dtype` is a key of `DTYPES`. `device` is a name that `find_device` takes, or the arguments of `from_pretrained`
    that place each layer.

    Raises a `UserError` if the model is not found, if weights are missing, if there is no such device, or if the model
    cannot process the tokenizer's output.
    """
    placement = {} if isinstance(device, str) else device
    model: Any = model_files.load_weights(source, AutoModel, dtype=get_dtype(dtype), **placement)
    input_device = next((weight.device for weight in model.parameters() if not weight.is_meta), None)
    if input_device is None:
        raise UserError(f"{source.label}: --max-memory has no room for the first layer; the disk can take only others")
    if model.config.is_encoder_decoder:
        log.warning("%s is an encoder-decoder (%s); only its encoder is read", source.label, model.config.model_type)
        model = model.get_encoder()
    trial_tokenizer = make_one_token_tokenizer(tokenizer, model_files.get_embedding_weight(model, "input"))
    inputs = trial_tokenizer("a", return_tensors="pt", return_token_type_ids=False).to(input_device)
    check_outputs(source.label, model, tokenizer, inputs)
    return model.eval().to(find_device(device)) if isinstance(device, str) else model.eval()


def get_dtype(name: str) -> torch.dtype:
    """Return the data type of weights by its name, a key of `DTYPES`."""
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


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


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer to a folder that `from_pretrained` can load.

    For a model with adapters, only the adapters, the head and the name of the base model are written. `weights` are
    written instead of the model's own. They are needed for a sharded model, where each process has a part of them.

    Raises:
        OSError: if the folder cannot be written.
    """
    try:
        with model_files.silence_transformers(), _enable_key_value_cache(model):
            if isinstance(model, PreTrainedModel):
                model.save_pretrained(folder, state_dict=weights)
            else:
                save_adapters(model, folder, weights)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        # Writers in Rust, such as safetensors, raise special types with messages that contain `(os error 28)`.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        raise OSError(f"the model cannot be written ({shorten(error, 80)}) to {folder}") from error


@contextmanager
def _enable_key_value_cache(model: PreTrainedModel) -> Iterator[None]:
    """Turn on a decoder's key-value cache within the block, so that the saved configuration has it on.

    A training turns the cache off.
    """
    if not is_decoder(model.config):
        yield
        return
    previous_use_cache = model.config.use_cache
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = previous_use_cache


def check_outputs(label: str, model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any) -> None:
    """Raise a `UserError` unless tokenizer and model fit together, and the outputs for trial `inputs` are finite.

    The message names the model by `label`.
    """
    embedding = model_files.get_embedding_weight(model, "input")
    class_name = type(model).__name__
    other_inputs = " and ".join(sorted(_OTHER_INPUTS.intersection(inspect.signature(model.forward).parameters)))
    refusal = f"{label} is a {class_name}, which has no embeddings of tokens; choose a model of text"
    if other_inputs:
        refusal = f"{label} cannot process text alone: a {class_name} reads {other_inputs}; choose a model of text"
    if embedding is None or model.main_input_name != "input_ids":
        raise UserError(refusal)
    num_embeddings, num_tokens = len(embedding), max(tokenizer.get_vocab().values()) + 1
    if num_tokens > num_embeddings:
        raise UserError(
            f"{label}: its tokenizer has {num_tokens} tokens, but its embedding has only {num_embeddings} rows; "
            "they belong to different models"
        )
    try:
        with torch.no_grad():
            outputs = model(**inputs)[0]
    except Exception as error:  # the types depend on the architecture
        mismatch = f"{label} cannot process the output of its tokenizer ({shorten(error)}); do they belong together?"
        raise UserError(refusal if other_inputs else mismatch) from error
    if not outputs.isfinite().all():
        raise UserError(f"{label} computes non-finite numbers; {_explain_nonfinite_outputs(model)}")


def _explain_nonfinite_outputs(model: Any) -> str:
    weights = [parameter for parameter in model.parameters() if not parameter.is_meta]
    if any(values.isnan().any() for values in weights):
        return "its weights are damaged: some are NaN"
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype == "float16":
        return "they overflow float16, which ends at 65,504: choose float32 or bf16"
    if all(values.isfinite().all() for values in weights):
        return f"its weights are finite, but what it computes overflows {dtype}: look for very large weights"
    return "its weights are damaged: some are infinite"
