"""Encoder and head from transformers, with the task's labels; the tiny random model for offline work."""

import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
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
from istar.tasks.hub import hub_problem
from istar.tasks.readers import parse_json, whole_text
from istar.tasks.specs import Kind, TaskSpec

_HEADS: dict[Kind, Any] = {
    "classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "span": AutoModelForQuestionAnswering,
}


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer; the tiny model's knows the demo grammar's words and spells all others.

    Raises:
        UserError: if it cannot be found, is not a fast one, or knows no words.
    """
    if not config.pretrained:
        return tiny.tokenizer(demo.vocabulary())
    if _is(Path.is_file, config.name):
        raise UserError(f"model.name={config.name} is a file; name the folder that save_pretrained wrote it to")
    if _is(Path.is_dir, config.name):
        if config.revision is not None:
            raise UserError(f"model.revision={config.revision} is of the hub, but model.name={config.name} is a folder")
        _check_json(Path(config.name))
    with _clear_errors(config), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(config.name, **_source(config))
    if not tokenizer.is_fast:
        raise UserError(f"model.name={config.name} has no fast tokenizer; choose a model with a tokenizer.json")
    # Without its files transformers makes one up that knows the special tokens at most, and all text looks the same.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(
            f"model.name={config.name} has no vocabulary: every word would be unknown; it needs the tokenizer.json, "
            "or the vocabulary file, of its own model"
        )
    with _clear_errors(config):
        tokenizer("\u2603")  # a character that few know: some lack even a token for the unknown
    return tokenizer


def load_config(config: ModelConfig, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model's config with the task's labels in it.

    Raises:
        UserError: if it cannot be found, or is not that of a text encoder.
    """
    if config.pretrained:
        with _clear_errors(config), _quiet():
            model_config = AutoConfig.from_pretrained(config.name, **_source(config))
    else:
        model_config = tiny.config(len(tokenizer))
    if not hasattr(model_config, "num_hidden_layers"):
        raise UserError(f"model.name={config.name}: {model_config.model_type} models are not text encoders")
    if model_config.is_encoder_decoder:
        raise UserError(
            f"model.name={config.name}: {model_config.model_type} models are encoder-decoders, whose two stacks have "
            "hidden states of their own; expected an encoder or a decoder"
        )
    for name, value in _label_settings(spec).items():
        setattr(model_config, name, value)
    return model_config


def load_model(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The encoder with a head for the task, in float32 and training mode.

    The head is new, unless the checkpoint holds one of the same kind and number of labels.

    Raises:
        UserError: if it cannot be found, lacks encoder weights, has no head of the kind, does not fit its
            tokenizer, or computes no finite numbers.
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
    _check_rows(config.name, model, tokenizer)
    if config.pretrained:
        _try_out(config.name, model, tokenizer(*["a"] * len(spec.text_columns), return_tensors="pt"))
    _apply_options(config, model)
    # from_pretrained leaves the model in eval mode and Lightning keeps modes as they are: dropout would be off.
    return model.train()


def load_encoder(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    """A model without a head, of any architecture that reads text, in eval mode.

    Args:
        config: which; the options for training do not count.
        tokenizer: its own.
        dtype: of the weights; by itself transformers would take the checkpoint's.

    Raises:
        UserError: if it cannot be found, lacks weights, does not fit its tokenizer, or computes no finite numbers.
    """
    with _clear_errors(config), _quiet():
        model, info = AutoModel.from_pretrained(
            config.name, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **_source(config)
        )
    _check_complete(config.name, model, info)
    _check_rows(config.name, model, tokenizer)
    _try_out(config.name, model, tokenizer("a", return_tensors="pt", return_token_type_ids=False))
    return model.eval()


def load_pretrained(config: ModelConfig, auto: Any, **settings: Any) -> Any:
    """What a class of transformers makes of a model's files, with its own settings.

    Raises:
        UserError: if they cannot be found or read.
    """
    with _clear_errors(config), _quiet():
        return auto.from_pretrained(config.name, **_source(config), **settings)


def skeleton(model_config: Any) -> PreTrainedModel:
    """The architecture that a checkpoint names, with its head, without memory for its weights.

    Raises:
        UserError: if transformers does not have it.
    """
    named = getattr(transformers, (model_config.architectures or [""])[0], None)
    try:
        kind: Any = named or transformers.MODEL_MAPPING[type(model_config)]
        with torch.device("meta"), _quiet():
            return kind(model_config)
    except Exception as error:  # a strange config.json makes transformers raise any of two dozen kinds
        raise UserError(f"{model_config.model_type} models cannot be built: {_reason(error)}") from error


def file_of(config: ModelConfig, name: str) -> Path | None:
    """A file of a model: in its folder, the local cache or, brought from there, the hub; None if it has none such.

    Raises:
        UserError: if the hub has to be asked and does not answer.
    """
    if _is(Path.is_dir, config.name):
        path = Path(config.name) / name
        return path if path.is_file() else None
    source = _source(config)
    with _clear_errors(config), _quiet():
        if source["local_files_only"]:
            cached = try_to_load_from_cache(config.name, name, revision=source["revision"])
            return Path(cached) if isinstance(cached, str) else None
        try:
            return Path(hf_hub_download(config.name, name, revision=source["revision"]))
        except LocalEntryNotFoundError:  # nor can the hub be asked
            raise
        except EntryNotFoundError:
            return None


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that `from_pretrained` of the task's Auto class and AutoTokenizer load.

    Raises:
        OSError: if it cannot be written.
    """
    try:
        with _quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        # The writers in Rust have exceptions of their own, but all of them quote the operating system in this way.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        raise OSError(f"the model cannot be written to {folder}: {shorten(error)}") from error


def _source(config: ModelConfig) -> dict[str, Any]:
    """Which revision, and whether the hub may be asked: an unreachable one would be asked for a minute.

    Code that a model brings along is refused outright; left open, transformers would ask at the terminal.
    """
    local = _is(Path.is_dir, config.name) or bool(hub_problem())
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


def _check_json(folder: Path) -> None:
    """What transformers says of a broken file is any of a dozen things, but not which file it is."""
    for path in (folder / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")):
        if path.exists() and not isinstance(parse_json(whole_text(path), str(path)), dict):
            raise UserError(f"{path}: a JSON object was expected, as save_pretrained writes it")


def _check_complete(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """The head is new by design, and so is a pooler that pretraining had no use for; the rest must be there and fit."""
    # A model without a head has no prefix.
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
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


def _check_rows(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        raise UserError(
            f"model.name={name}: its tokenizer has {tokens} tokens and its embedding {rows} rows; "
            "they are not of one model"
        )


def _try_out(name: str, model: PreTrainedModel, inputs: Any) -> None:
    """One short text shows what would otherwise stop the training: a part that does not fit, or damaged weights."""
    try:
        with torch.no_grad():
            logits = model(**inputs)[0]
    except Exception as error:  # each architecture has its own way to stumble
        raise UserError(
            f"model.name={name} cannot read what its tokenizer writes ({shorten(error)}); they are not of one model"
        ) from error
    if not logits.isfinite().all():
        raise UserError(f"model.name={name} computes numbers that are not finite; its weights are damaged")


def _apply_options(config: ModelConfig, model: PreTrainedModel) -> None:
    if config.gradient_checkpointing:
        # The older name is deprecated in transformers 5.23, which brought the newer one.
        newer = getattr(model, "activation_checkpointing_enable", None)
        try:
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"model.gradient_checkpointing=true: {shorten(error)}") from error
    if config.compile:
        # In place, so that the names of the weights stay; lengths differ from batch to batch. Without the fallback the
        # compiler draws other random numbers for dropout.
        model.compile(dynamic=True, options={"fallback_random": True})


@contextmanager
def _clear_errors(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged or strange folder makes transformers raise any of two dozen kinds
        raise UserError(_what_failed(config.name, error)) from error


def _what_failed(name: str, error: Exception) -> str:
    if _is(Path.is_dir, name):
        return f"model.name={name} is not a model folder that can be loaded: {_reason(error)}"
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return f"model.name={name}: there is no such folder; expected one that save_pretrained wrote, or a hub id"
    obstacle = hub_problem() if isinstance(error, OSError | ValueError | KeyError) else ""
    reason = f"not in the local cache, and {obstacle}" if obstacle else _reason(error)
    return f"model {name}: {reason}; name a local copy with model=auto model.name=<folder from save_pretrained>"


def _reason(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError | EOFError):  # whose own text recommends to run the stranger's code
        return "its pickled weights hold more than tensors, or are damaged; look for a model.safetensors"
    if "trust_remote_code" in str(error):
        return "it asks for code of its own, which is never run; choose an architecture that transformers knows"
    # Only these say what is wrong without their names.
    return shorten(error if type(error) in (OSError, ValueError) else f"{type(error).__name__}: {error}")


def _is(kind: Callable[[Path], bool], name: str) -> bool:
    try:
        return kind(Path(name))
    except OSError:  # too long to be the name of a file
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """No table of new head weights (`_check_complete` says what matters), no bars for a second's work, no advice."""
    before, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        if bars:
            transformers.logging.enable_progress_bar()
