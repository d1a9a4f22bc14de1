"""Loading and saving of models and tokenizers of transformers, with one-line errors for what is missing or damaged."""

import inspect
import logging
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.models import tiny
from istar.models.adapters import add_adapters, base_of, has_adapters, merge_adapters, save_adapters
from istar.models.architectures import auto_class, is_decoder, new_config, override, saved_class
from istar.models.new_tokenizer import train_tokenizer
from istar.tasks import demo
from istar.tasks.hub import LOCAL_COPY_HINTS, explain_refusal, find_hub_problem, is_hub_id
from istar.tasks.readers import parse_json, read_text
from istar.tasks.specs import TaskSpec

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""The data types of the weights, by the values of `model.load_in`."""

log = logging.getLogger(__name__)


def load_tokenizer(config: ModelConfig, texts: Iterable[str] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, or train one on `texts` if `config.trains_tokenizer`.

    The tokenizer of the tiny model knows the words of the demo tasks. A tokenizer without a padding token, as many
    decoders have it, pads with its end-of-text token.

    Args:
        config: the model.
        texts: text of the task, read only if a tokenizer is trained. Equal texts give equal tokenizers, so that every
            process and every resumed run can train its own. An iterator is copied to a list; other iterables may be
            read twice.

    Raises:
        UserError: if the tokenizer is not found, is not a fast one or has no vocabulary; or if it is to be trained and
            there is no text.
    """
    if config.is_tiny:
        return tiny.tokenizer(demo.vocabulary())
    if config.trains_tokenizer:
        return _new_tokenizer(config, texts)
    key = "model.name"
    if config.tokenizer is not None:
        key = "model.tokenizer"
        name, _, revision = config.tokenizer.partition("@")
        config = ModelConfig(name=name, revision=revision or None)
    if os.path.isfile(config.name):  # noqa: PTH113  Path.is_file raises an error if the name is too long
        raise UserError(f"{key}={config.name} is a file; name the folder that save_pretrained wrote it to")
    if _is_folder(config.name):
        if config.revision is not None:
            raise UserError(
                f"model.revision={config.revision} needs a model of the hub, but model.name={config.name} is a folder"
            )
        _check_json_files(Path(config.name))
    with _user_errors(config, key), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(config.name, **_hub_options(config))
    if not tokenizer.is_fast:
        raise UserError(f"{key}={config.name} has no fast tokenizer; choose a model with a tokenizer.json")
    # If the files are missing, transformers creates a tokenizer with the special tokens only, and every text is
    # tokenized alike.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(
            f"{key}={config.name} has no vocabulary: every word would be unknown; it needs the tokenizer.json "
            "or the vocabulary file that belongs to the model"
        )
    # A rare character: some damaged tokenizers have no token for unknown text and fail here.
    with _user_errors(config, key):
        tokenizer("\u2603")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _new_tokenizer(config: ModelConfig, texts: Iterable[str] | None) -> PreTrainedTokenizerBase:
    """Train a tokenizer of the kind that a model needs, for texts of the length that it accepts."""
    if texts is None:
        raise UserError(
            "model.tokenizer=train needs the text of a task to train a tokenizer on; name a tokenizer, a folder or a "
            "hub id"
        )
    model_config = _architecture(config)
    tokenizer = train_tokenizer(texts, config.vocab_size, "bpe" if is_decoder(model_config) else "wordpiece")
    tokenizer.model_max_length = getattr(model_config, "max_position_embeddings", None) or tokenizer.model_max_length
    base_class: Any = transformers.MODEL_MAPPING[type(model_config)]
    arguments = inspect.signature(base_class.forward).parameters
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name in arguments]
    return tokenizer


def load_config(config: ModelConfig, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load or build the configuration of a model, and set the labels of the task and the tokenizer's ids in it.

    Raises:
        UserError: if the configuration is not found, or the model is neither a text encoder nor a decoder, or not the
            one of them that the task needs.
    """
    model_config: Any = tiny.config(len(tokenizer)) if config.is_tiny else _architecture(config)
    if not hasattr(model_config, "num_hidden_layers"):
        raise UserError(f"{config.label}: {model_config.model_type} models are not text encoders")
    if model_config.is_encoder_decoder:
        raise UserError(
            f"{config.label}: {model_config.model_type} models are encoder-decoders, which have two sets of "
            "hidden states; expected an encoder or a decoder"
        )
    _check_language_modelling(config, spec, model_config, tokenizer)
    if config.tokenizer is not None and not config.pretrained:
        _fit_tokenizer(config, model_config, tokenizer)
    if is_decoder(model_config):
        # The cache of keys and values is for generation. With a cache, transformers ignores that positions restart,
        # and packed documents would attend to each other.
        model_config.use_cache = False
    if spec.kind in ("classification", "regression"):
        labels = spec.labels or ("score",)
        model_config.problem_type = "single_label_classification" if spec.labels else "regression"
        model_config.id2label = dict(enumerate(labels))
        model_config.label2id = {name: id_ for id_, name in enumerate(labels)}
        if is_decoder(model_config):
            # The heads of decoders read the last token that is not this one.
            model_config.pad_token_id = tokenizer.pad_token_id
    return model_config


def _architecture(config: ModelConfig) -> Any:
    """Return the configuration of a model, with the values of `config.config`, as yet without those of the task."""
    if config.architecture is not None:
        return new_config(config.architecture, config.config)
    model_config = load_pretrained(config, AutoConfig)
    return override(model_config, config.config, config.label) if config.config else model_config


def _fit_tokenizer(config: ModelConfig, model_config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the size of the vocabulary and the ids of special tokens, except for those that `config.config` sets."""
    values = {"vocab_size": max(tokenizer.get_vocab().values()) + 1}
    values |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for name, value in values.items():
        if name not in config.config:
            setattr(model_config, name, value)


def _check_language_modelling(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse causal language modelling by an encoder, and masked language modelling by a decoder or without a mask."""
    if spec.kind == "causal_lm" and not is_decoder(model_config):
        raise UserError(
            f"task={spec.name} needs a decoder, such as model=gpt2 or small_decoder, but {config.label} is an encoder "
            f"({model_config.model_type}), whose tokens attend to the tokens that are to be predicted"
        )
    if spec.kind == "masked_lm" and is_decoder(model_config):
        raise UserError(
            f"task={spec.name} needs an encoder, such as model=bert or small_encoder, but {config.label} is a decoder "
            f"({model_config.model_type})"
        )
    if spec.kind == "masked_lm" and tokenizer.mask_token_id is None:
        raise UserError(f"task={spec.name} needs a tokenizer with a mask token, but that of {config.label} has none")


def load_model(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load the model with a head for the task, in the data type `config.load_in` and in training mode.

    The head has random weights, unless the checkpoint contains a head of the same kind and number of labels. Without
    `config.pretrained`, all weights are random. With `config.lora`, the model is a `peft.PeftModel` of which adapters
    and head are trained.

    Raises:
        UserError: if the model is not found, has no head of this kind, or fails a check of `_check_weights` or
            `_check_outputs`.
    """
    head, dtype = auto_class(model_config, spec.kind, config.label), DTYPES[config.load_in]
    model: Any
    if config.pretrained:
        model = _load_weights(config, head, config=model_config, dtype=dtype)
    else:
        with _user_errors(config), _quiet():
            model = head.from_config(model_config, dtype=dtype, trust_remote_code=False).eval()
    if not config.is_tiny:
        texts = ["a"] * len(spec.text_columns)
        _check_outputs(config.label, model, tokenizer, tokenizer(*texts, return_tensors="pt"))
    if config.gradient_checkpointing:
        # `gradient_checkpointing_enable` is deprecated since transformers 5.23, which introduced the other name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"model.gradient_checkpointing=true: {shorten(error)}") from error
    if config.lora:
        with _quiet():
            model = add_adapters(model, config, spec.kind)
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
    _check_outputs(config.label, model, tokenizer, tokenizer("a", return_tensors="pt", return_token_type_ids=False))
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
    """Write a model and its tokenizer to a folder that `from_pretrained` can load; raise an OSError on failure.

    Of a model with adapters, these and the head are written, with the name of the base model.
    """
    try:
        with _quiet(), _generation_cache(model):
            if isinstance(model, PreTrainedModel):
                model.save_pretrained(folder)
            else:
                save_adapters(model, folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        # The writers implemented in Rust raise other types, but quote the operating system in this form.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        raise OSError(f"the model cannot be written to {folder}: {shorten(error)}") from error


@contextmanager
def _generation_cache(model: PreTrainedModel) -> Iterator[None]:
    """Turn the cache on in a decoder's configuration, which `load_config` turns off for the training."""
    if not is_decoder(model.config):
        yield
        return
    before = model.config.use_cache
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = before


def _hub_options(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that control access to the hub."""
    # The retries of an unreachable hub would take a minute. Without `trust_remote_code`, transformers would ask at the
    # terminal whether to run code of the repository.
    is_local = _is_folder(config.name) or bool(find_hub_problem())
    return {"revision": config.revision or "main", "local_files_only": is_local, "trust_remote_code": False}


# --- checks -------------------------------------------------------------------------------------------------


def _load_weights(config: ModelConfig, loader: Any, /, **options: Any) -> PreTrainedModel:
    """Load a model with pretrained weights; refuse missing weights, except for those of a head."""
    if has_adapters(config.name):
        with tempfile.TemporaryDirectory() as folder:
            _write_merged(config, Path(folder), options["dtype"])
            return _load_weights(replace(config, name=folder), loader, **options)
    # A head for other labels may have mismatched sizes; `_check_weights` rejects all other mismatches.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model: PreTrainedModel
    model, info = load_pretrained(config, loader, **options)
    saved = saved_class(load_pretrained(config, AutoConfig))
    if saved is None or saved.base_model_prefix == model.base_model_prefix:
        _check_weights(config.label, model, info)
        return model
    # transformers gives the base model another name in some of an architecture's classes, and does not find its weights
    # then: it is `model` in `LlamaForCausalLM`, but `transformer` in `LlamaForQuestionAnswering`.
    source, info = load_pretrained(config, saved, **options)
    _check_weights(config.label, source, info)
    model.base_model.load_state_dict(source.base_model.state_dict())
    return model


def _write_merged(config: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write the model of a folder with adapters as a model of one piece, whose head is that of the adapters."""
    adapted = load_pretrained(config, AutoConfig)
    adapted_class = saved_class(adapted)
    if adapted_class is None:
        raise UserError(f"{config.label}: its config.json names no architecture of transformers")
    base = _load_weights(base_of(Path(config.name)), adapted_class, config=adapted, dtype=dtype)
    with _user_errors(config), _quiet():
        merge_adapters(base, Path(config.name)).save_pretrained(folder)


def _check_outputs(label: str, model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any) -> None:
    """Check that tokenizer and model belong together, and that the model computes finite outputs for the inputs."""
    rows = int(model.get_input_embeddings().num_embeddings)
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        raise UserError(
            f"{label}: its tokenizer has {tokens} tokens, but its embedding has only {rows} rows; "
            "they belong to different models"
        )
    try:
        with torch.no_grad():
            outputs = model(**inputs)[0]
    except Exception as error:  # the types depend on the architecture
        raise UserError(
            f"{label} cannot process the output of its tokenizer ({shorten(error)}); they belong to different models"
        ) from error
    if not outputs.isfinite().all():
        raise UserError(f"{label} computes non-finite numbers; its weights are damaged")


def _check_json_files(folder: Path) -> None:
    """Check that the JSON files of a model contain objects. The errors of transformers do not name the file."""
    for path in (folder / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")):
        if path.exists() and not isinstance(parse_json(read_text(path), str(path)), dict):
            raise UserError(f"{path}: a JSON object was expected, as save_pretrained writes it")


def _check_weights(label: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Check that all weights but those of the head were loaded, given the loading info of `from_pretrained`.

    Only the head and the pooler may have random weights: the head is new for each task, and pretraining often has no
    pooler. A new head for language modelling is worth a warning, because it has much to learn.
    """
    # The weights of a model without a head have no prefix.
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    # The head for language modelling has as many outputs as the tokenizer has tokens, whatever the task.
    is_language_model = model.get_output_embeddings() is not None
    for key, stored, expected in sorted(info["mismatched_keys"]):
        if key.startswith(prefix) or is_language_model:
            raise UserError(
                f"{label}: {key} has the shape {tuple(stored)} in the weights and {tuple(expected)} by "
                "config.json; they belong to different models"
            )
    missing = sorted(key for key in info["missing_keys"] if key.startswith(prefix) and "pooler" not in key)
    if missing:
        raise UserError(
            f"{label} lacks {len(missing)} of the encoder's weights, e.g. {missing[0]}; they would be random"
        )
    new = sorted(key for key in info["missing_keys"] if not key.startswith(prefix))
    if is_language_model and new:
        log.warning("%s has no head for language modelling: %s and all else of the head is random", label, new[0])


# --- errors -------------------------------------------------------------------------------------------------


@contextmanager
def _user_errors(config: ModelConfig, key: str = "model.name") -> Iterator[None]:
    """Convert every error in this block to a `UserError`; transformers raises many types for damaged folders.

    `key` is the config key that holds the name of the model or of the tokenizer.
    """
    try:
        yield
    except Exception as error:
        if config.architecture is not None:
            raise UserError(f"{config.label} cannot be built: {_error_reason(error)}") from error
        raise UserError(_load_error_message(key, config.name, error)) from error


def _load_error_message(key: str, name: str, error: Exception) -> str:
    """Return one line on why a model or a tokenizer cannot be loaded, and what to do."""
    if _is_folder(name):
        return f"{key}={name} is not a model folder that can be loaded: {_error_reason(error)}"
    if not is_hub_id(name):
        return f"{key}={name}: there is no such folder; expected one that save_pretrained wrote, or a hub id"
    problem = find_hub_problem() if isinstance(error, OSError | ValueError | KeyError) else ""
    reason = explain_refusal(error, name, "model") or _error_reason(error)
    reason = f"not in the local cache, and {problem}" if problem else reason
    return f"model {name}: {reason}; {LOCAL_COPY_HINTS['model']}"


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
