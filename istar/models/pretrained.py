"""Loading and saving of models and tokenizers of transformers, with one-line errors for what is missing or damaged."""

import logging
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.models import tiny
from istar.tasks import demo
from istar.tasks.hub import LOCAL_COPY, hub_problem, is_hub_id, refusal
from istar.tasks.readers import parse_json, read_text
from istar.tasks.specs import TaskSpec


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. The tokenizer of the tiny model knows the words of the demo tasks.

    Raises:
        UserError: if the tokenizer is not found, is not a fast one or has no vocabulary.
    """
    if config.is_tiny:
        return tiny.tokenizer(demo.vocabulary())
    if os.path.isfile(config.name):  # noqa: PTH113  Path.is_file raises an error if the name is too long
        raise UserError(f"model.name={config.name} is a file; name the folder that save_pretrained wrote it to")
    if _is_folder(config.name):
        if config.revision is not None:
            raise UserError(
                f"model.revision={config.revision} needs a model of the hub, but model.name={config.name} is a folder"
            )
        _check_json_files(Path(config.name))
    with _user_errors(config), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(config.name, **_hub_options(config))
    if not tokenizer.is_fast:
        raise UserError(f"model.name={config.name} has no fast tokenizer; choose a model with a tokenizer.json")
    # If the files are missing, transformers creates a tokenizer with the special tokens only, and every text is
    # tokenized alike.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(
            f"model.name={config.name} has no vocabulary: every word would be unknown; it needs the tokenizer.json "
            "or the vocabulary file that belongs to the model"
        )
    # A rare character: some damaged tokenizers have no token for unknown text and fail here.
    with _user_errors(config):
        tokenizer("\u2603")
    return tokenizer


def load_config(config: ModelConfig, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load the configuration of a model and set the labels of the task in it.

    Raises:
        UserError: if the configuration is not found, or the model is neither a text encoder nor a decoder.
    """
    model_config: Any = tiny.config(len(tokenizer)) if config.is_tiny else load_pretrained(config, AutoConfig)
    if not hasattr(model_config, "num_hidden_layers"):
        raise UserError(f"model.name={config.name}: {model_config.model_type} models are not text encoders")
    if model_config.is_encoder_decoder:
        raise UserError(
            f"model.name={config.name}: {model_config.model_type} models are encoder-decoders, which have two sets of "
            "hidden states; expected an encoder or a decoder"
        )
    if spec.kind != "span":
        labels = spec.labels or ("score",)
        model_config.problem_type = "single_label_classification" if spec.labels else "regression"
        model_config.id2label = dict(enumerate(labels))
        model_config.label2id = {name: id_ for id_, name in enumerate(labels)}
    return model_config


def load_model(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load the encoder with a head for the task, in float32 and training mode.

    The head has random weights, unless the checkpoint contains a head of the same kind and number of labels. Without
    `config.pretrained`, all weights are random.

    Raises:
        UserError: if the model is not found, has no head of this kind, or fails a check of `_check_weights` or
            `_check_outputs`.
    """
    head: Any = AutoModelForQuestionAnswering if spec.kind == "span" else AutoModelForSequenceClassification
    if config.pretrained:
        model = _load_weights(config, head, config=model_config, dtype=torch.float32)
    else:
        with _user_errors(config), _quiet():
            model = head.from_config(model_config, dtype=torch.float32, trust_remote_code=False).eval()
    if not config.is_tiny:
        _check_outputs(config.name, model, tokenizer, tokenizer(*["a"] * len(spec.text_columns), return_tensors="pt"))
    if config.gradient_checkpointing:
        # `gradient_checkpointing_enable` is deprecated since transformers 5.23, which introduced the other name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"model.gradient_checkpointing=true: {shorten(error)}") from error
    if config.compile:
        # `Module.compile` works in place and keeps the names of the weights. `dynamic` because batches differ in
        # length. Without `fallback_random`, compiled dropout would draw other random numbers than eager dropout.
        model.compile(dynamic=True, options={"fallback_random": True})
    # `from_pretrained` returns the model in eval mode, and Lightning keeps the mode; dropout would be disabled.
    return model.train()


def load_encoder(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model without a head, of any architecture that reads text, in eval mode and the given data type.

    Raises:
        UserError: if the model is not found, or fails a check of `_check_weights` or `_check_outputs`.
    """
    model = _load_weights(config, AutoModel, dtype=dtype)
    _check_outputs(config.name, model, tokenizer, tokenizer("a", return_tensors="pt", return_token_type_ids=False))
    return model.eval()


def load_pretrained(config: ModelConfig, auto_class: Any, /, **options: Any) -> Any:
    """Call `auto_class.from_pretrained` for a model, without log output and without network retries.

    Raises:
        UserError: if the files are not found or cannot be read.
    """
    with _user_errors(config), _quiet():
        return auto_class.from_pretrained(config.name, **_hub_options(config), **options)


def meta_model(model_config: Any) -> PreTrainedModel:
    """Build the architecture that a checkpoint names, including its head, on the meta device, without weights.

    Raises:
        UserError: if transformers does not support the architecture.
    """
    try:
        architecture = getattr(transformers, (model_config.architectures or [""])[0], None)
        model_class: Any = architecture or transformers.MODEL_MAPPING[type(model_config)]
        with torch.device("meta"), _quiet():
            return model_class(model_config)
    except Exception as error:  # transformers raises many types for an unusual config.json
        raise UserError(f"{model_config.model_type} models cannot be built: {_error_reason(error)}") from error


def find_file(config: ModelConfig, name: str) -> Path | None:
    """Return the path of a file of a model, or None if the model has no such file.

    The file is searched in the model's folder, or else in the local cache and on the hub. It is downloaded if needed.
    """
    if _is_folder(config.name):
        path = Path(config.name) / name
        return path if path.is_file() else None
    options = _hub_options(config)
    with _user_errors(config), _quiet():
        if options["local_files_only"]:
            cached = try_to_load_from_cache(config.name, name, revision=options["revision"])
            return Path(cached) if isinstance(cached, str) else None
        try:
            return Path(hf_hub_download(config.name, name, revision=options["revision"]))
        except LocalEntryNotFoundError:  # a subclass of EntryNotFoundError: the hub cannot be reached
            raise
        except EntryNotFoundError:
            return None


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer to a folder that `from_pretrained` can load; raise an OSError on failure."""
    try:
        with _quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        # The writers implemented in Rust raise other types, but quote the operating system in this form.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        raise OSError(f"the model cannot be written to {folder}: {shorten(error)}") from error


def _hub_options(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that control access to the hub."""
    # The retries of an unreachable hub would take a minute. Without `trust_remote_code`, transformers would ask at the
    # terminal whether to run code of the repository.
    is_local = _is_folder(config.name) or bool(hub_problem())
    return {"revision": config.revision or "main", "local_files_only": is_local, "trust_remote_code": False}


# --- checks -------------------------------------------------------------------------------------------------


def _load_weights(config: ModelConfig, auto_class: Any, /, **options: Any) -> PreTrainedModel:
    """Load a model with pretrained weights; refuse missing weights of the encoder."""
    # A head for other labels may have mismatched sizes; `_check_weights` rejects all other mismatches.
    model: PreTrainedModel
    model, info = load_pretrained(config, auto_class, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    _check_weights(config.name, model, info)
    return model


def _check_outputs(name: str, model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any) -> None:
    """Check that tokenizer and model belong together, and that the model computes finite outputs for the inputs."""
    rows = int(model.get_input_embeddings().num_embeddings)
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        raise UserError(
            f"model.name={name}: its tokenizer has {tokens} tokens, but its embedding has only {rows} rows; "
            "they belong to different models"
        )
    try:
        with torch.no_grad():
            outputs = model(**inputs)[0]
    except Exception as error:  # the types depend on the architecture
        raise UserError(
            f"model.name={name} cannot process the output of its tokenizer ({shorten(error)}); "
            "they belong to different models"
        ) from error
    if not outputs.isfinite().all():
        raise UserError(f"model.name={name} computes non-finite numbers; its weights are damaged")


def _check_json_files(folder: Path) -> None:
    """Check that the JSON files of a model contain objects. The errors of transformers do not name the file."""
    for path in (folder / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")):
        if path.exists() and not isinstance(parse_json(read_text(path), str(path)), dict):
            raise UserError(f"{path}: a JSON object was expected, as save_pretrained writes it")


def _check_weights(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Check that all weights of the encoder were loaded, given the loading info of `from_pretrained`.

    Only the head and the pooler may have random weights: the head is new for each task, and pretraining often has no
    pooler.
    """
    # The weights of a model without a head have no prefix.
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    for key, stored, expected in sorted(info["mismatched_keys"]):
        if key.startswith(prefix):
            raise UserError(
                f"model.name={name}: {key} has the shape {tuple(stored)} in the weights and {tuple(expected)} by "
                "config.json; they belong to different models"
            )
    missing = sorted(key for key in info["missing_keys"] if key.startswith(prefix) and "pooler" not in key)
    if missing:
        raise UserError(
            f"model.name={name} lacks {len(missing)} of the encoder's weights, e.g. {missing[0]}; they would be random"
        )


# --- errors -------------------------------------------------------------------------------------------------


@contextmanager
def _user_errors(config: ModelConfig) -> Iterator[None]:
    """Convert every error in this block to a `UserError`; transformers raises many types for damaged folders."""
    try:
        yield
    except Exception as error:
        raise UserError(_load_error_message(config.name, error)) from error


def _load_error_message(name: str, error: Exception) -> str:
    """Return one line on why a model cannot be loaded, and what to do."""
    if _is_folder(name):
        return f"model.name={name} is not a model folder that can be loaded: {_error_reason(error)}"
    if not is_hub_id(name):
        return f"model.name={name}: there is no such folder; expected one that save_pretrained wrote, or a hub id"
    problem = hub_problem() if isinstance(error, OSError | ValueError | KeyError) else ""
    reason = refusal(error, name, "model") or _error_reason(error)
    reason = f"not in the local cache, and {problem}" if problem else reason
    return f"model {name}: {reason}; {LOCAL_COPY['model']}"


def _error_reason(error: Exception) -> str:
    """Return the reason in an error of transformers as one line."""
    # The library's own message recommends running the code of the checkpoint.
    if isinstance(error, pickle.UnpicklingError | EOFError):
        return "its pickled weights hold more than tensors, or are damaged; look for a model.safetensors"
    if "trust_remote_code" in str(error):
        return "it needs code from its repository, which is never run; choose an architecture that transformers knows"
    # The messages of these two types are complete sentences; others need the name of the type to be understood.
    return shorten(error if type(error) in (OSError, ValueError) else f"{type(error).__name__}: {error}")


def _is_folder(name: str) -> bool:
    return os.path.isdir(name)  # noqa: PTH112  Path.is_dir raises an error if the name is too long


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log output of transformers, its progress bars and its warning about pickled weights.

    The log would list the new weights of the head; `_check_weights` reports those that matter.
    """
    verbosity, has_bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if has_bars:
            transformers.logging.enable_progress_bar()
