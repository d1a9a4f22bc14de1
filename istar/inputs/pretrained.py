"""Loading and saving of models and tokenizers of transformers, with one-line errors for what is missing or damaged."""

import inspect
import logging
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

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

from istar.errors import UserError, shorten
from istar.files.parsing import read_json
from istar.inputs import demo, tiny
from istar.inputs.adapters import add_adapters, find_base, has_adapters, merge_adapters, read_base_config, save_adapters
from istar.inputs.architectures import (
    check_num_layers,
    get_auto_class,
    get_checkpoint_class,
    is_decoder,
    make_config,
    override_config,
)
from istar.inputs.hub import LOCAL_COPY_HINTS, explain_refusal, find_hub_problem, is_hub_id
from istar.inputs.new_tokenizer import train_tokenizer
from istar.inputs.tokenizing import find_max_input_length
from istar.records.config import ModelConfig
from istar.records.task_specs import TaskSpec

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""Data types of the weights by the value of the config key `model.load_in`."""

log = logging.getLogger(__name__)


def load_tokenizer(config: ModelConfig, texts: Iterable[str] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, or train one on `texts` if `config.trains_tokenizer`.

    The tokenizer of the tiny model knows the words of the demo tasks. A tokenizer without a padding token, which is
    common for decoders, pads with its end-of-text token.

    Args:
        config: settings of the model.
        texts: text of the task, read only if a tokenizer is trained. Equal texts give equal tokenizers, so that every
            process and every resumed run can train its own. An iterator is copied to a list; other iterables may be
            read twice.

    Raises:
        UserError: if the tokenizer is not found, is not a fast one or has no vocabulary; or if it is to be trained and
            there is no text.
    """
    if config.is_tiny:
        return tiny.make_tokenizer(demo.vocabulary())
    if config.trains_tokenizer:
        return _train_new_tokenizer(config, texts)
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
        config = find_base(config, "tokenizer_config.json") or config
    with _convert_to_user_errors(config, key), _silence_transformers():
        tokenizer = AutoTokenizer.from_pretrained(config.name, **_make_hub_options(config))
    if not tokenizer.is_fast:
        raise UserError(f"{key}={config.name} has no fast tokenizer; choose a model with a tokenizer.json")
    # If the files are missing, transformers creates a tokenizer with special tokens only, to which all texts are alike.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(
            f"{key}={config.name} has no vocabulary: every word would be unknown; it needs the tokenizer.json "
            "or the vocabulary file that belongs to the model"
        )
    # A rare character: some damaged tokenizers have no token for unknown text and fail here.
    with _convert_to_user_errors(config, key):
        tokenizer("\u2603")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _train_new_tokenizer(config: ModelConfig, texts: Iterable[str] | None) -> PreTrainedTokenizerBase:
    """Train the tokenizer of a new model: byte-level BPE for a decoder, WordPiece for an encoder.

    It truncates texts to the length that the model accepts, and returns only inputs that the model takes.
    """
    if texts is None:
        raise UserError(
            "model.tokenizer=train needs the text of a task to train a tokenizer on; name a tokenizer, a folder or a "
            "hub id"
        )
    model_config = _make_architecture_config(config)
    tokenizer = train_tokenizer(texts, config.vocab_size, "bpe" if is_decoder(model_config) else "wordpiece")
    # In some architectures, positions start after the id of the padding token.
    model_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = find_max_input_length(model_config) or tokenizer.model_max_length
    model_class: Any = transformers.MODEL_MAPPING[type(model_config)]
    parameters = inspect.signature(model_class.forward).parameters
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name in parameters]
    return tokenizer


def load_config(config: ModelConfig, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load or build the transformers configuration of a model, with the labels of the task and the tokenizer's ids.

    Args:
        config: settings of the model.
        spec: the task.
        tokenizer: the model's tokenizer.

    Raises:
        UserError: if the configuration is not found, if the model is neither a text encoder nor a decoder, or if the
            task needs the other of the two.
    """
    model_config: Any = tiny.make_tiny_config(len(tokenizer)) if config.is_tiny else _make_architecture_config(config)
    check_num_layers(model_config, config.label)
    if not hasattr(model_config, "num_hidden_layers"):
        raise UserError(f"{config.label}: {model_config.model_type} models are not text encoders")
    if model_config.is_encoder_decoder:
        raise UserError(
            f"{config.label}: {model_config.model_type} models are encoder-decoders, which have two sets of "
            "hidden states; expected an encoder or a decoder"
        )
    _check_language_modelling(config, spec, model_config, tokenizer)
    if config.tokenizer is not None and not config.pretrained:
        _set_tokenizer_values(config, model_config, tokenizer)
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


def _make_architecture_config(config: ModelConfig) -> Any:
    """Load or build the configuration of a model with the values of `config.config`, but not yet those of the task."""
    if config.architecture is not None:
        return make_config(config.architecture, config.config)
    model_config = load_pretrained(config, AutoConfig)
    return override_config(model_config, config.config, config.label) if config.config else model_config


def _set_tokenizer_values(config: ModelConfig, model_config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    values = {"vocab_size": max(tokenizer.get_vocab().values()) + 1}
    values |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for name, value in values.items():
        if name not in config.config:
            setattr(model_config, name, value)


def _check_language_modelling(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise a `UserError` if the model cannot do the language modelling of the task.

    Causal language modelling needs a decoder. Masked language modelling needs an encoder, and a tokenizer with a mask
    token.
    """
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

    The head has random weights, unless the checkpoint contains a head for the same labels: then its outputs are put in
    the order of the task's. Without `config.pretrained`, all weights are random. With `config.lora`, the result is a
    `peft.PeftModel`, of which the adapters and the head are trained.

    Args:
        config: settings of the model.
        spec: the task.
        model_config: result of `load_config`.
        tokenizer: the model's tokenizer.

    Raises:
        UserError: if the model is not found or has no head of this kind, if weights other than those of the head are
            missing, or if the model cannot process the output of the tokenizer.
    """
    auto_class = get_auto_class(model_config, spec.kind, config.label)
    options: dict[str, Any] = {"dtype": DTYPES[config.load_in]}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    model: Any
    if config.pretrained:
        model = load_weights(config, auto_class, config=model_config, **options)
        if spec.kind in ("classification", "regression"):
            _fit_head(config, spec, model)
    else:
        with _convert_to_user_errors(config), _silence_transformers():
            model = auto_class.from_config(model_config, trust_remote_code=False, **options).eval()
    if not config.is_tiny:
        texts = ["a"] * len(spec.text_columns)
        _check_outputs(config.label, model, tokenizer, tokenizer(*texts, return_tensors="pt"))
    if config.gradient_checkpointing:
        # `gradient_checkpointing_enable` is deprecated since transformers 5.23, which introduced the other name.
        enable_checkpointing = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        try:
            enable_checkpointing({"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"model.gradient_checkpointing=true: {shorten(error)}") from error
    if config.lora:
        with _silence_transformers():
            model = add_adapters(model, config, spec.kind)
    if config.compile:
        # `Module.compile` works in place and keeps the names of the weights. Batches differ in length, hence `dynamic`.
        # Without `fallback_random`, compiled dropout would draw other random numbers than eager dropout.
        model.compile(dynamic=True, options={"fallback_random": True})
    # `from_pretrained` returns the model in eval mode, which Lightning keeps; dropout would be disabled.
    return model.train()


def load_encoder(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model without a head, of any architecture that reads text, in eval mode and the given data type.

    Of an encoder-decoder, the encoder is returned, and a warning says so.

    Raises:
        UserError: if the model is not found, if weights are missing, or if the model cannot process the output of the
            tokenizer.
    """
    model: Any = load_weights(config, AutoModel, dtype=dtype)
    if model.config.is_encoder_decoder:
        log.warning("%s is an encoder-decoder (%s); only its encoder is read", config.label, model.config.model_type)
        model = model.get_encoder()
    _check_outputs(config.label, model, tokenizer, tokenizer("a", return_tensors="pt", return_token_type_ids=False))
    return model.eval()


def load_pretrained(config: ModelConfig, auto_class: Any, /, **options: Any) -> Any:
    """Load an object by `auto_class.from_pretrained`, without log output and without network retries.

    Args:
        config: settings of the model, of which name and revision are used.
        auto_class: a class of transformers, such as `AutoConfig` or `AutoModel`.
        **options: further arguments of `from_pretrained`.

    Raises:
        UserError: if the files are not found or cannot be read.
    """
    if auto_class is AutoConfig:
        config = find_base(config, "config.json") or config
    elif "config" not in options:
        load_pretrained(config, AutoConfig)  # its size is checked before the model is built
    with _convert_to_user_errors(config), _silence_transformers():
        loaded = auto_class.from_pretrained(config.name, **_make_hub_options(config), **options)
    if auto_class is AutoConfig:
        check_num_layers(loaded, config.label)
    return loaded


def build_meta_model(model_config: Any) -> PreTrainedModel:
    """Build the model that a checkpoint's configuration names, including its head, without weights (meta device).

    Raises:
        UserError: if transformers does not support the architecture.
    """
    try:
        model_class: Any = get_checkpoint_class(model_config) or transformers.MODEL_MAPPING[type(model_config)]
        with torch.device("meta"), _silence_transformers():
            return model_class(model_config)
    except Exception as error:  # transformers raises many types for an unusual config.json
        raise UserError(f"{model_config.model_type} models cannot be built: {_describe_error(error)}") from error


def get_embedding_weight(model: PreTrainedModel, side: Literal["input", "output"]) -> Any:
    """Return the parameter of a model's input or output embeddings, or None if it has none."""
    try:
        layer: Any = model.get_input_embeddings() if side == "input" else model.get_output_embeddings()
    except NotImplementedError:  # transformers raises this for architectures without such a layer
        return None
    return getattr(layer, "weight", None)


def find_file(config: ModelConfig, name: str) -> Path | None:
    """Return the path of a file of a model, or None if the model has no such file.

    The file is searched in the model's folder. For a model of the Hugging Face hub, it is searched in the local cache
    and on the hub, and downloaded if needed.
    """
    if _is_folder(config.name):
        path = Path(config.name) / name
        return path if path.is_file() else None
    options = _make_hub_options(config)
    with _convert_to_user_errors(config), _silence_transformers():
        if options["local_files_only"]:
            cached_path = try_to_load_from_cache(config.name, name, revision=options["revision"])
            return Path(cached_path) if isinstance(cached_path, str) else None
        try:
            return Path(hf_hub_download(config.name, name, revision=options["revision"]))
        except LocalEntryNotFoundError:  # a subclass of EntryNotFoundError: the hub cannot be reached
            raise
        except EntryNotFoundError:
            return None


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer to a folder that `from_pretrained` can load.

    For a model with adapters, only the adapters, the head and the name of the base model are written.

    Raises:
        OSError: if the folder cannot be written.
    """
    try:
        with _silence_transformers(), _enable_key_value_cache(model):
            if isinstance(model, PreTrainedModel):
                model.save_pretrained(folder)
            else:
                save_adapters(model, folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        # Writers in Rust, such as safetensors, raise types of their own, whose messages contain `(os error 28)`.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        raise OSError(f"the model cannot be written ({shorten(error, 80)}) to {folder}") from error


@contextmanager
def _enable_key_value_cache(model: PreTrainedModel) -> Iterator[None]:
    """Turn on a decoder's cache of keys and values within the block, so that the saved configuration has it turned on.

    `load_config` turns the cache off for training.
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


def _make_hub_options(config: ModelConfig) -> dict[str, Any]:
    # The retries of an unreachable hub would take a minute. Without `trust_remote_code`, transformers would ask at the
    # terminal whether to run code of the repository.
    uses_local_files = _is_folder(config.name) or bool(find_hub_problem())
    return {"revision": config.revision or "main", "local_files_only": uses_local_files, "trust_remote_code": False}


def _fit_head(config: ModelConfig, spec: TaskSpec, model: PreTrainedModel) -> None:
    """Reorder the outputs of a pretrained head by the names of its labels, or replace it if it is for another task.

    Names such as `LABEL_0` say nothing, and their order is kept.
    """
    checkpoint_config = load_pretrained(config, AutoConfig)
    if not getattr(get_checkpoint_class(checkpoint_config), "__name__", "").endswith("ForSequenceClassification"):
        return
    names = [str(name) for _, name in sorted(checkpoint_config.id2label.items())]
    is_regression = checkpoint_config.problem_type == "regression"
    order = None
    if checkpoint_config.problem_type is None or is_regression == (spec.kind == "regression"):
        order = _match_labels(names, spec.labels or ("score",))
    if order is None:
        log.warning(
            "the head of %s for the labels %s is replaced by a new one, as task %s has %s",
            config.label,
            ", ".join(names),
            spec.name,
            ", ".join(spec.labels) or "a score",
        )
        if len(names) == model.config.num_labels:  # a head of another size is new already
            new_weights, prefix = type(model)(model.config).state_dict(), f"{model.base_model_prefix}."
            head = {name: values for name, values in new_weights.items() if not name.startswith(prefix)}
            model.load_state_dict(head, strict=False)
    elif order != sorted(order):
        last_layer = [layer for layer in model.modules() if getattr(layer, "out_features", None) == len(order)][-1]
        with torch.no_grad():
            for parameter in last_layer.parameters():
                parameter.copy_(parameter[order].clone())


def _match_labels(names: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Return for each label of a task which output of a head has its name, or None if the names are others.

    Case and punctuation do not matter. Numbered names, and the name of a single score, mean nothing.
    """
    if len(names) != len(labels):
        return None
    plain_names, plain_labels = ([re.sub(r"[\W_]", "", name).lower() for name in given] for given in (names, labels))
    if len(names) == 1 or all(re.fullmatch(r"(label)?\d+", name) for name in plain_names):
        return list(range(len(names)))
    return [plain_names.index(label) for label in plain_labels] if set(plain_names) == set(plain_labels) else None


# --- checks -------------------------------------------------------------------------------------------------


def load_weights(config: ModelConfig, auto_class: Any, /, **options: Any) -> PreTrainedModel:
    """Load a model with pretrained weights, and merge its adapters if it has any.

    Args:
        config: settings of the model.
        auto_class: class whose `from_pretrained` loads the model.
        **options: further arguments of `from_pretrained`; `dtype` is required for a model with adapters.

    Raises:
        UserError: if the model cannot be loaded, or weights other than those of the head or the pooler are missing.
    """
    if has_adapters(config.name):
        with tempfile.TemporaryDirectory() as folder:
            _write_merged_model(config, Path(folder), options["dtype"])
            return load_weights(replace(config, name=folder), auto_class, **options)
    # A head for other labels may have mismatched sizes; `_check_loaded_weights` rejects all other mismatches.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model: PreTrainedModel
    model, loading_info = load_pretrained(config, auto_class, **options)
    checkpoint_class = get_checkpoint_class(load_pretrained(config, AutoConfig))
    if checkpoint_class is None or checkpoint_class.base_model_prefix == model.base_model_prefix:
        _check_loaded_weights(config.label, model, loading_info)
        return model
    # Some classes of an architecture give the base model another name, with which transformers does not find its
    # weights: it is `model` in `LlamaForCausalLM`, but `transformer` in `LlamaForQuestionAnswering`.
    checkpoint_model, loading_info = load_pretrained(config, checkpoint_class, **options)
    _check_loaded_weights(config.label, checkpoint_model, loading_info)
    model.base_model.load_state_dict(checkpoint_model.base_model.state_dict())
    return model


def _write_merged_model(config: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    adapted_config = load_pretrained(config, AutoConfig)
    adapted_class = get_checkpoint_class(adapted_config)
    if adapted_class is None:
        raise UserError(f"{config.label}: its config.json names no architecture of transformers")
    base_model = load_weights(read_base_config(Path(config.name)), adapted_class, config=adapted_config, dtype=dtype)
    with _convert_to_user_errors(config), _silence_transformers():
        merge_adapters(base_model, Path(config.name)).save_pretrained(folder)


def _check_outputs(label: str, model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any) -> None:
    """Check that tokenizer and model belong together, and that the model computes finite outputs for the inputs."""
    embedding = get_embedding_weight(model, "input")
    if embedding is None or model.main_input_name != "input_ids":
        raise UserError(
            f"{label} is a {type(model).__name__}, which has no embeddings of tokens; choose a model of text"
        )
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
        raise UserError(
            f"{label} cannot process the output of its tokenizer ({shorten(error)}); do they belong together?"
        ) from error
    if not outputs.isfinite().all():
        raise UserError(f"{label} computes non-finite numbers; {_explain_nonfinite_outputs(model)}")


def _explain_nonfinite_outputs(model: Any) -> str:
    if any(parameter.isnan().any() for parameter in model.parameters()):
        return "its weights are damaged: some are NaN"
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype == "float16":
        return "they overflow float16, which ends at 65,504: choose float32 or bf16"
    if all(parameter.isfinite().all() for parameter in model.parameters()):
        return f"its weights are finite, but what it computes overflows {dtype}: look for very large weights"
    return "its weights are damaged: some are infinite"


def _check_json_files(folder: Path) -> None:
    for path in (folder / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")):
        if path.exists() and not isinstance(read_json(path), dict):
            raise UserError(f"{path}: a JSON object was expected, as save_pretrained writes it")


def _check_loaded_weights(label: str, model: PreTrainedModel, loading_info: dict[str, Any]) -> None:
    """Check that all weights except those of the head and the pooler were loaded.

    The head is new for each task, and many models are pretrained without a pooler. A warning is logged if a head for
    language modelling is new, because such a head needs long training.
    """
    # In a model without a head, the names of the weights have no prefix.
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    # The head for language modelling has as many outputs as the tokenizer has tokens, whatever the task.
    is_language_model = model.get_output_embeddings() is not None
    for key, stored_shape, expected_shape in sorted(loading_info["mismatched_keys"]):
        if key.startswith(prefix) or is_language_model:
            raise UserError(
                f"{label}: {key} has the shape {tuple(stored_shape)} in the weights and {tuple(expected_shape)} by "
                "config.json; they belong to different models"
            )
    missing_weights = sorted(
        key for key in loading_info["missing_keys"] if key.startswith(prefix) and "pooler" not in key
    )
    if missing_weights:
        raise UserError(
            f"{label} lacks {len(missing_weights)} of the encoder's weights, e.g. {missing_weights[0]}; they would be "
            "random"
        )
    new_head_weights = sorted(key for key in loading_info["missing_keys"] if not key.startswith(prefix))
    if is_language_model and new_head_weights:
        log.warning(
            "%s has no head for language modelling: %s and all else of the head is random", label, new_head_weights[0]
        )


# --- errors -------------------------------------------------------------------------------------------------


@contextmanager
def _convert_to_user_errors(config: ModelConfig, key: str = "model.name") -> Iterator[None]:
    """Convert every error in the block to a `UserError`; transformers raises many types for damaged folders."""
    try:
        yield
    except Exception as error:
        if config.architecture is not None:
            raise UserError(f"{config.label} cannot be built: {_describe_error(error)}") from error
        raise UserError(_make_load_error_message(key, config.name, error)) from error


def _make_load_error_message(key: str, name: str, error: Exception) -> str:
    if _is_folder(name):
        return f"{key}={name} is not a model folder that can be loaded: {_describe_error(error)}"
    if not is_hub_id(name):
        return f"{key}={name}: there is no such folder; expected one that save_pretrained wrote, or a hub id"
    problem = find_hub_problem() if isinstance(error, OSError | ValueError | KeyError) else ""
    reason = explain_refusal(error, name, "model") or _describe_error(error)
    reason = f"not in the local cache, and {problem}" if problem else reason
    return f"model {name}: {reason}; {LOCAL_COPY_HINTS['model']}"


def _describe_error(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError | EOFError):
        return "its pickled weights hold more than tensors, or are damaged; look for a model.safetensors"
    # The message of transformers recommends running the code of the checkpoint.
    if "trust_remote_code" in str(error):
        return "it needs code from its repository, which is never run; choose an architecture that transformers knows"
    # The messages of these two types are complete sentences; others need the name of the type to be understood.
    return shorten(error if type(error) in (OSError, ValueError) else f"{type(error).__name__}: {error}")


def _is_folder(name: str) -> bool:
    return os.path.isdir(name)  # noqa: PTH112  Path.is_dir raises an error if the name is too long


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Suppress the log output of transformers, its progress bars and its warning about pickled weights in a block.

    The log would list the new weights of the head; `_check_loaded_weights` reports those that matter.
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
