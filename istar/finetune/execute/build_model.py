"""The model and the tokenizer of a run: pretrained or new, with the head of its task."""

import inspect
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError, shorten
from istar.finetune.config import ModelConfig
from istar.finetune.execute.build_config import make_architecture_config
from istar.models import tiny
from istar.models.adapters import import_peft, suppress_peft_warnings
from istar.models.architectures import find_max_input_length, get_checkpoint_class, is_decoder
from istar.models.model_files import (
    describe_load_error,
    get_embedding_weight,
    load_checkpoint_config,
    load_weights,
    silence_transformers,
)
from istar.models.pretrained import check_outputs, get_dtype, load_tokenizer
from istar.models.special_tokens import make_one_token_tokenizer
from istar.runs.tasks import Kind, TaskSpec
from istar.texts import demo
from istar.texts.new_tokenizer import train_tokenizer

if TYPE_CHECKING:
    from peft import PeftModel

_SEQUENCE_HEAD = transformers.AutoModelForSequenceClassification, transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
_HEADS: dict[Kind, tuple[Any, Any]] = {
    "classification": _SEQUENCE_HEAD,
    "regression": _SEQUENCE_HEAD,
    "span": (transformers.AutoModelForQuestionAnswering, transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING),
    "causal_lm": (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    "masked_lm": (transformers.AutoModelForMaskedLM, transformers.MODEL_FOR_MASKED_LM_MAPPING),
}  # fmt: skip
"""By kind of task: the class that loads a model with its head, and the architectures with such a head."""

log = logging.getLogger(__name__)


def build_tokenizer(config: ModelConfig, texts: Iterable[str] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run's model, or train one on `texts` if `config.trains_tokenizer`.

    The tokenizer of the tiny model knows the words of the demo tasks.

    Args:
        config: settings of the model.
        texts: text of the task, read only to train a tokenizer. Equal texts give equal tokenizers, so every process and
            every resumed run can train its own. An iterator is copied to a list; other iterables may be read twice.

    Raises a `UserError` as `istar.models.pretrained.load_tokenizer`, or if a tokenizer is to be trained without text.
    """
    if config.is_tiny:
        return tiny.make_tokenizer(demo.vocabulary())
    return _train_new_tokenizer(config, texts) if config.trains_tokenizer else load_tokenizer(config.source())


def _train_new_tokenizer(config: ModelConfig, texts: Iterable[str] | None) -> PreTrainedTokenizerBase:
    """Train the tokenizer of a new model: byte-level BPE for a decoder, WordPiece for an encoder.

    It truncates texts to the model's maximum length and returns only inputs that the model takes.
    """
    if texts is None:
        raise UserError("model.tokenizer=train needs the text of a task; name the folder or hub id of a tokenizer")
    model_config = make_architecture_config(config)
    tokenizer = train_tokenizer(texts, config.vocab_size, "bpe" if is_decoder(model_config) else "wordpiece")
    # In some architectures, positions start after the id of the padding token.
    model_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = find_max_input_length(model_config) or tokenizer.model_max_length
    model_class: Any = transformers.MODEL_MAPPING[type(model_config)]
    parameters = inspect.signature(model_class.forward).parameters
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name in parameters]
    return tokenizer


def build_model(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load or make the model with a head for the task, in the data type `config.load_in` and in training mode.

    The head has random weights unless the checkpoint's head has the same labels; then its outputs are put in the task's
    order. Without `config.pretrained`, all weights are random. With `config.lora`, the result is a `peft.PeftModel`
    with trainable adapters and head. `model_config` is the result of `build_config`. Raises a `UserError` if the model
    is not found or lacks a head of this kind, if weights outside the head are missing, or if the model cannot process
    the tokenizer's output.
    """
    auto_class = _get_auto_class(model_config, spec.kind, config.label)
    options: dict[str, Any] = {"dtype": get_dtype(config.load_in)}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    model: Any
    if config.pretrained:
        model = load_weights(config.source(), auto_class, config=model_config, **options)
        if spec.kind in ("classification", "regression"):
            _fit_head(config, spec, model)
    else:
        try:
            with silence_transformers():
                model = auto_class.from_config(model_config, trust_remote_code=False, **options).eval()
        except Exception as error:  # the types depend on the architecture
            raise UserError(f"{config.label} cannot be built: {describe_load_error(error)}") from error
    if not config.is_tiny:
        texts = ["a"] * len(spec.text_columns)
        trial_tokenizer = make_one_token_tokenizer(tokenizer, get_embedding_weight(model, "input"))
        check_outputs(config.label, model, tokenizer, trial_tokenizer(*texts, return_tensors="pt"))
    if config.gradient_checkpointing:
        # `gradient_checkpointing_enable` is deprecated since transformers 5.23, which introduced the other name.
        enable_checkpointing = getattr(model, "activation_checkpointing_enable", None)
        enable_checkpointing = enable_checkpointing or model.gradient_checkpointing_enable
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


def _get_auto_class(config: PreTrainedConfig, kind: Kind, label: str) -> Any:
    auto_class, architectures = _HEADS[kind]
    if type(config) not in architectures:
        raise UserError(
            f"{label}: transformers has no {auto_class.__name__} for {config.model_type} models; choose another model "
            "or another task"
        )
    return auto_class


def _fit_head(config: ModelConfig, spec: TaskSpec, model: PreTrainedModel) -> None:
    """Reorder the outputs of a pretrained head by label names, or replace a head for another task.

    Names such as `LABEL_0` mean nothing; their order is kept.
    """
    checkpoint_config = load_checkpoint_config(config.source())
    if not getattr(get_checkpoint_class(checkpoint_config), "__name__", "").endswith("ForSequenceClassification"):
        return
    names = [str(name) for _, name in sorted(checkpoint_config.id2label.items())]
    is_regression = checkpoint_config.problem_type == "regression"
    order = None
    if checkpoint_config.problem_type is None or is_regression == (spec.kind == "regression"):
        order = _match_labels(names, spec.labels or ("score",))
    if order is None:
        labels = ", ".join(spec.labels) or "a score"
        message = "the head of %s for the labels %s is replaced by a new one, as task %s has %s"
        log.warning(message, config.label, ", ".join(names), spec.name, labels)
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


_POOLER = "pooler"  # part of the base model; many checkpoints lack its weights, which are then random


def add_adapters(model: PreTrainedModel, config: ModelConfig, kind: Kind) -> "PeftModel":
    """Add low-rank adapters to a model with a head for the task.

    Afterwards only the adapters, the head and the pooler require gradients. A head for language modelling is part of
    the pretrained weights and is not trained. Raises a `UserError` if `config.lora_target_modules` is None and peft
    lacks a default for the architecture, or if it names a module that the model lacks.
    """
    peft = import_peft("model.lora=true")
    task_types = {"span": peft.TaskType.QUESTION_ANS, "causal_lm": peft.TaskType.CAUSAL_LM, "masked_lm": None}
    # peft reads the name of the base model here, and writes it into the folder of the adapters.
    path = Path(config.name)
    model.name_or_path = str(path.resolve()) if path.is_dir() else config.name
    lora_config = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        task_type=task_types.get(kind, peft.TaskType.SEQ_CLS),
        modules_to_save=None if kind in ("causal_lm", "masked_lm") else _find_new_modules(model),
    )
    try:
        with suppress_peft_warnings():
            return peft.get_peft_model(model, lora_config, revision=config.revision)
    except ValueError as error:
        if config.lora_target_modules is None:
            raise UserError(
                f"model.lora=true: peft has no default for {model.config.model_type} models; name the modules that "
                "get adapters in model.lora_target_modules, or set it to all-linear"
            ) from error
        raise UserError(f"model.lora_target_modules={config.lora_target_modules}: {shorten(error)}") from error


def _find_new_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that may have new random weights: the parts of the head, and the pooler."""
    base_model = model.base_model
    head_names = [name for name, child in model.named_children() if child is not base_model and _has_parameters(child)]
    pooler: Any = getattr(base_model, _POOLER, None)
    return [*head_names, _POOLER] if pooler is not None and _has_parameters(pooler) else head_names


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
