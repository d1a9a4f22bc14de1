"""Encoder and head from transformers, with the task's labels; the tiny random model for offline work."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from istar import tiny
from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.hub import hub_obstacle
from istar.tasks import demo
from istar.tasks.specs import Kind, TaskSpec

_HEADS: dict[Kind, Any] = {
    "classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "span": AutoModelForQuestionAnswering,
}


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer; the tiny model's knows the demo grammar's words and spells all others.

    Raises:
        UserError: if it cannot be found, or is not a fast one.
    """
    if not config.pretrained:
        return tiny.tokenizer(demo.vocabulary())
    with _clear_errors(config):
        tokenizer = AutoTokenizer.from_pretrained(config.name, **_source(config))
    if not tokenizer.is_fast:
        raise UserError(f"model.name={config.name} has no fast tokenizer; choose a model with a tokenizer.json")
    return tokenizer


def load_config(config: ModelConfig, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model's config with the task's labels in it.

    Raises:
        UserError: if it cannot be found.
    """
    if config.pretrained:
        with _clear_errors(config):
            model_config = AutoConfig.from_pretrained(config.name, **_source(config))
    else:
        model_config = tiny.config(len(tokenizer))
    for name, value in _label_settings(spec).items():
        setattr(model_config, name, value)
    return model_config


def load_model(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The encoder with a head for the task, in float32 and training mode.

    The head is new, unless the checkpoint holds one of the same kind and number of labels.

    Raises:
        UserError: if it cannot be found, lacks encoder weights, has no head of the kind, or does not fit its
            tokenizer.
    """
    head = _HEADS[spec.kind]
    if config.pretrained:
        with _clear_errors(config), _quiet():
            model, info = head.from_pretrained(
                config.name,
                config=model_config,
                dtype=torch.float32,
                output_loading_info=True,
                # Another task's head may have other labels; `_check_complete` refuses what else does not fit.
                ignore_mismatched_sizes=True,
                **_source(config),
            )
        _check_complete(config.name, model, info)
    else:
        model = head.from_config(model_config)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"model.name={config.name}: its tokenizer has {len(tokenizer)} tokens and its embedding {rows} rows; "
            "they are not of one model"
        )
    # from_pretrained leaves the model in eval mode and Lightning keeps modes as they are: dropout would be off.
    return model.train()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that `from_pretrained` of the task's Auto class and AutoTokenizer load."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _source(config: ModelConfig) -> dict[str, Any]:
    """Which revision, and whether the hub may be asked: an unreachable one would be asked for a minute.

    Code that a model brings along is refused outright; left open, transformers would ask at the terminal.
    """
    local = Path(config.name).is_dir() or bool(hub_obstacle())
    return {"revision": config.revision or "main", "local_files_only": local, "trust_remote_code": False}


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


def _check_complete(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """The head is new by design, and so is a pooler that pretraining had no use for; the rest must be there and fit."""
    prefix = f"{model.base_model_prefix}."
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        if key.startswith(prefix):
            raise UserError(
                f"model.name={name}: {key} has the shape {tuple(stored)} in the weights and {tuple(wanted)} by "
                "config.json; they are not of one model"
            )
    encoder = [key for key in info["missing_keys"] if key.startswith(prefix) and "pooler" not in key]
    if encoder:
        raise UserError(
            f"model.name={name} lacks {len(encoder)} of the encoder's weights, {sorted(encoder)[0]} for one; "
            "they would be random"
        )


@contextmanager
def _clear_errors(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(_what_failed(config.name, error)) from error


def _what_failed(name: str, error: Exception) -> str:
    if Path(name).is_dir():
        return f"model.name={name} is not a model folder that can be loaded: {shorten(error)}"
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return f"model.name={name}: there is no such folder; expected one that save_pretrained wrote, or a hub id"
    obstacle = hub_obstacle()
    reason = f"not in the local cache, and {obstacle}" if obstacle else shorten(error)
    return f"model {name}: {reason}; name a local copy with model=auto model.name=<folder from save_pretrained>"


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
