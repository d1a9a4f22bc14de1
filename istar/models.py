"""Encoder and head from transformers, with the task's labels; the tiny random model for offline work."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from istar import tiny
from istar.config import ModelConfig
from istar.errors import UserError
from istar.tasks import demo
from istar.tasks.specs import Kind, TaskSpec

_HEADS: dict[Kind, Any] = {
    "classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "span": AutoModelForQuestionAnswering,
}


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """The model's tokenizer; the tiny model's knows the demo grammar's words and spells all others.

    Raises:
        UserError: if it cannot be found, or is not a fast one.
    """
    if not config.pretrained:
        return tiny.tokenizer(demo.vocabulary())
    with _clear_errors(config):
        tokenizer = AutoTokenizer.from_pretrained(config.name, revision=config.revision or "main")
    if not tokenizer.is_fast:
        raise UserError(f"model.name={config.name} has no fast tokenizer; choose a model with a tokenizer.json")
    return tokenizer  # type: ignore[no-any-return]


def load_config(config: ModelConfig, spec: TaskSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """The model's config with the task's labels in it.

    Raises:
        UserError: if it cannot be found.
    """
    if config.pretrained:
        with _clear_errors(config):
            model_config = AutoConfig.from_pretrained(config.name, revision=config.revision or "main")
    else:
        model_config = tiny.config(len(tokenizer))
    for name, value in _label_settings(spec).items():
        setattr(model_config, name, value)
    return model_config


def load_model(
    config: ModelConfig, spec: TaskSpec, model_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """The encoder with a new head for the task, in float32 and training mode.

    Raises:
        UserError: if it cannot be found, lacks encoder weights, has no head of the kind, or does not fit its
            tokenizer.
    """
    head = _HEADS[spec.kind]
    if config.pretrained:
        with _clear_errors(config), _quiet():
            model, info = head.from_pretrained(
                config.name,
                revision=config.revision or "main",
                config=model_config,
                dtype=torch.float32,
                output_loading_info=True,
            )
        _check_complete(config.name, model, info["missing_keys"])
    else:
        model = head.from_config(model_config)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"model.name={config.name}: its tokenizer has {len(tokenizer)} tokens and its embedding {rows} rows; "
            "they are not of one model"
        )
    # from_pretrained leaves the model in eval mode and Lightning keeps modes as they are: dropout would be off.
    return model.train()  # type: ignore[no-any-return]


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that `from_pretrained` of the task's Auto class and AutoTokenizer load."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _label_settings(spec: TaskSpec) -> dict[str, Any]:
    if spec.kind == "classification":
        names = dict(enumerate(spec.labels))
        return {
            "id2label": names,
            "label2id": {name: number for number, name in names.items()},
            "problem_type": "single_label_classification",
        }
    if spec.kind == "regression":
        return {"id2label": {0: "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
    return {}


def _check_complete(name: str, model: PreTrainedModel, missing: Any) -> None:
    """The head is new by design, and so is a pooler that pretraining had no use for; the rest must be there."""
    encoder = [key for key in missing if key.startswith(f"{model.base_model_prefix}.") and "pooler" not in key]
    if encoder:
        raise UserError(
            f"model.name={name} lacks {len(encoder)} of the encoder's weights, {sorted(encoder)[0]} for one; "
            "they would be random"
        )


@contextmanager
def _clear_errors(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        if Path(config.name).is_dir():
            raise UserError(f"model.name={config.name} is not a model folder that can be loaded: {reason}") from error
        raise UserError(
            f"model.name={config.name} is neither a folder nor a model that the hub gives: {reason} "
            "Offline, give a folder from save_pretrained: model=auto model.name=<folder>"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No table of new head weights (`_check_complete` says what matters) and no bars for a second's work."""
    before, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        if bars:
            transformers.logging.enable_progress_bar()
