"""The model and the tokenizer of a run: pretrained or new, with the head and the labels of its task."""

import inspect
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError, shorten
from istar.finetune.config import ModelConfig
from istar.models import tiny
from istar.models.adapters import add_adapters, find_base, save_adapters
from istar.models.architectures import (
    check_num_layers,
    get_auto_class,
    get_checkpoint_class,
    is_decoder,
    make_config,
    override_config,
)
from istar.models.model_files import (
    check_json_files,
    convert_to_user_errors,
    get_embedding_weight,
    is_folder,
    load_checkpoint_config,
    load_weights,
    make_hub_options,
    silence_transformers,
)
from istar.runs.tasks import TaskSpec
from istar.texts import demo
from istar.texts.new_tokenizer import train_tokenizer
from istar.texts.tokenizing import find_max_input_length, make_one_token_tokenizer

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""Data types of the weights by the value of the config key `model.load_in`."""
_OTHER_INPUTS = {"input_features", "input_values", "pixel_values"}
"""Names of arguments for images and sound."""

log = logging.getLogger(__name__)


def load_tokenizer(config: ModelConfig, texts: Iterable[str] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, or train one on `texts` if `config.trains_tokenizer`.

    The tokenizer of the tiny model knows the words of the demo tasks. A tokenizer without a padding token, which is
    common for decoders, pads with its end-of-text token.

    Args:
        config: settings of the model.
        texts: text of the task, read only to train a tokenizer. Equal texts give equal tokenizers, so every process and
            every resumed run can train its own. An iterator is copied to a list; other iterables may be read twice.

    Raises:
        UserError: if the tokenizer is not found, is not a fast one or lacks a vocabulary, or if it is to be trained
            without text.
    """
    if config.is_tiny:
        return tiny.make_tokenizer(demo.vocabulary())
    if config.trains_tokenizer:
        return _train_new_tokenizer(config, texts)
    noun = "model"
    if config.tokenizer is not None:
        noun = "tokenizer"
        name, _, revision = config.tokenizer.partition("@")
        config = ModelConfig(name=name, revision=revision or None)
    if os.path.isfile(config.name):  # noqa: PTH113  Path.is_file raises an error if the name is too long
        raise UserError(f"{noun} {config.name} is a file; name the folder that save_pretrained wrote it to")
    if is_folder(config.name):
        if config.revision is not None:
            raise UserError(f"revision {config.revision} needs a model of the hub, but {config.name} is a folder")
        check_json_files(Path(config.name))
        config = find_base(config, "tokenizer_config.json") or config
    with convert_to_user_errors(config, noun), silence_transformers():
        tokenizer = AutoTokenizer.from_pretrained(config.name, **make_hub_options(config))
    if not tokenizer.is_fast:
        raise UserError(f"{noun} {config.name} has no fast tokenizer; choose a model with a tokenizer.json")
    # If files are missing, transformers creates a tokenizer with special tokens only; all texts are alike to it.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(
            f"{noun} {config.name} has no vocabulary: every word would be unknown; it needs the tokenizer.json "
            "or the vocabulary file that belongs to the model"
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _train_new_tokenizer(config: ModelConfig, texts: Iterable[str] | None) -> PreTrainedTokenizerBase:
    """Train the tokenizer of a new model: byte-level BPE for a decoder, WordPiece for an encoder.

    It truncates texts to the model's maximum length and returns only inputs that the model takes.
    """
    if texts is None:
        raise UserError("model.tokenizer=train needs the text of a task; name the folder or hub id of a tokenizer")
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
    """Load or build a model's transformers configuration, with the task's labels and the tokenizer's ids.

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
    """Load or build a model's configuration with the values of `config.config`, but not yet the task's values."""
    if config.architecture is not None:
        return make_config(config.architecture, config.config)
    model_config = load_checkpoint_config(config)
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
    """Raise a `UserError` unless the model and tokenizer can do the task's language modelling."""
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

    The head has random weights unless the checkpoint's head has the same labels; then its outputs are put in the task's
    order. Without `config.pretrained`, all weights are random. With `config.lora`, the result is a `peft.PeftModel`
    with trainable adapters and head. `model_config` is the result of `load_config`.

    Raises:
        UserError: if the model is not found or lacks a head of this kind, if weights outside the head are missing, or
            if the model cannot process the tokenizer's output.
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
        with convert_to_user_errors(config), silence_transformers():
            model = auto_class.from_config(model_config, trust_remote_code=False, **options).eval()
    if not config.is_tiny:
        texts = ["a"] * len(spec.text_columns)
        trial_tokenizer = make_one_token_tokenizer(tokenizer, get_embedding_weight(model, "input"))
        _check_outputs(config.label, model, tokenizer, trial_tokenizer(*texts, return_tensors="pt"))
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
        with silence_transformers():
            model = add_adapters(model, config, spec.kind)
    if config.compile:
        # `Module.compile` works in place and keeps the names of the weights. Batches differ in length, hence `dynamic`.
        # Without `fallback_random`, compiled dropout would draw other random numbers than eager dropout.
        model.compile(dynamic=True, options={"fallback_random": True})
    # `from_pretrained` returns the model in eval mode, which Lightning keeps; dropout would be disabled.
    return model.train()


def load_encoder(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, **placement: Any
) -> PreTrainedModel:
    """Load a text model of any architecture without a head, in eval mode and the given data type.

    `placement` are arguments of `from_pretrained`; without any, it is on the CPU. Of an encoder-decoder, the encoder is
    returned, with a warning.

    Raises:
        UserError: if the model is not found, if weights are missing, or if the model cannot process the tokenizer's
            output.
    """
    model: Any = load_weights(config, AutoModel, dtype=dtype, **placement)
    device = next((weight.device for weight in model.parameters() if not weight.is_meta), None)
    if device is None:
        raise UserError(f"{config.label}: --max-memory has no room for the first layer; the disk can take only others")
    if model.config.is_encoder_decoder:
        log.warning("%s is an encoder-decoder (%s); only its encoder is read", config.label, model.config.model_type)
        model = model.get_encoder()
    embeddings = get_embedding_weight(model, "input")
    trial_tokenizer = make_one_token_tokenizer(tokenizer, embeddings)
    inputs = trial_tokenizer("a", return_tensors="pt", return_token_type_ids=False).to(device)
    _check_outputs(config.label, model, tokenizer, inputs)
    return model.eval()


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer to a folder that `from_pretrained` can load.

    For a model with adapters, only the adapters, the head and the name of the base model are written. `weights` are
    written instead of the model's own, of which a sharded model has only parts.

    Raises:
        OSError: if the folder cannot be written.
    """
    try:
        with silence_transformers(), _enable_key_value_cache(model):
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


def _fit_head(config: ModelConfig, spec: TaskSpec, model: PreTrainedModel) -> None:
    """Reorder the outputs of a pretrained head by label names, or replace a head for another task.

    Names such as `LABEL_0` mean nothing; their order is kept.
    """
    checkpoint_config = load_checkpoint_config(config)
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
    """Return the index of the head's output for each label of a task, or None if the names differ.

    Case and punctuation do not matter. Numbered names, and the name of a single score, mean nothing.
    """
    if len(names) != len(labels):
        return None
    plain_names, plain_labels = ([re.sub(r"[\W_]", "", name).lower() for name in given] for given in (names, labels))
    if len(names) == 1 or all(re.fullmatch(r"(label)?\d+", name) for name in plain_names):
        return list(range(len(names)))
    return [plain_names.index(label) for label in plain_labels] if set(plain_names) == set(plain_labels) else None


def _check_outputs(label: str, model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any) -> None:
    """Check that tokenizer and model fit together, and that the model's outputs are finite."""
    embedding = get_embedding_weight(model, "input")
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
