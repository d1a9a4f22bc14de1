"""Files of models of transformers: loading them as they are, with one-line errors for what is missing or damaged."""

import logging
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from istar.errors import UserError, shorten
from istar.files.folders import ADAPTER_CONFIG_FILE
from istar.files.parsing import read_json
from istar.hidden_states.model_layers import find_base_model
from istar.models.adapters import find_base, has_adapters, merge_adapters, read_base_source
from istar.models.architectures import check_num_layers, get_checkpoint_class, reset_outputs
from istar.models.hub import LOCAL_COPY_HINTS, explain_refusal, find_hub_problem, is_hub_id
from istar.models.model_source import ModelSource, is_folder

_FORMER_BUFFERS = ("attn.bias", "attention.bias", "masked_bias", "inv_freq", "position_ids", ".version")
"""Ends of the names of buffers in checkpoints, such as causal masks, that classes compute today."""

log = logging.getLogger(__name__)


def load_checkpoint_config(source: ModelSource) -> Any:
    """Load a checkpoint's configuration, changed so that the model returns what models return by default.

    Raises a `UserError` if it is not found, cannot be read, or has an impossible number of layers.
    """
    source = find_base(source, "config.json") or source
    checkpoint_config = _load_pretrained(source, AutoConfig)
    check_num_layers(checkpoint_config, source.label)
    reset_outputs(checkpoint_config)
    return checkpoint_config


def _load_pretrained(source: ModelSource, auto_class: Any, /, **options: Any) -> Any:
    with convert_to_user_errors(source), silence_transformers():
        return auto_class.from_pretrained(source.name, **make_hub_options(source), **options)


def build_meta_model(source: ModelSource) -> PreTrainedModel:
    """Build a checkpoint's model with its head, without weights (meta device).

    Raises a `UserError` as `load_checkpoint_config`, and if transformers does not support the architecture.
    """
    model_config = load_checkpoint_config(source)
    try:
        model_class: Any = get_checkpoint_class(model_config) or transformers.MODEL_MAPPING[type(model_config)]
        with torch.device("meta"), silence_transformers():
            return model_class(model_config)
    except Exception as error:  # transformers raises many types for an unusual config.json
        raise UserError(f"{model_config.model_type} models cannot be built: {describe_load_error(error)}") from error


def get_embedding_weight(model: PreTrainedModel, side: Literal["input", "output"]) -> Any:
    """Return the parameter of a model's input or output embeddings, or None."""
    try:
        layer: Any = model.get_input_embeddings() if side == "input" else model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # of parts like FSMT's encoder, and of models without such a layer
        return None
    return getattr(layer, "weight", None)


def find_file(source: ModelSource, name: str) -> Path | None:
    """Return the path of a model's file, or None if the model lacks it.

    A hub model's file is searched in the local cache and on the hub, and downloaded if needed.
    """
    if is_folder(source.name):
        path = Path(source.name) / name
        return path if path.is_file() else None
    options = make_hub_options(source)
    with convert_to_user_errors(source), silence_transformers():
        if options["local_files_only"]:
            cached_path = try_to_load_from_cache(source.name, name, revision=options["revision"])
            return Path(cached_path) if isinstance(cached_path, str) else None
        try:
            return Path(hf_hub_download(source.name, name, revision=options["revision"]))
        except LocalEntryNotFoundError:  # a subclass of EntryNotFoundError: the hub cannot be reached
            raise
        except EntryNotFoundError:
            return None


def find_body(model: Any) -> Any:
    """Return a model without its head; of an encoder-decoder, only the encoder."""
    return model.get_encoder() if model.config.is_encoder_decoder else find_base_model(model)


def load_weights(
    source: ModelSource, auto_class: Any, /, find_part: Callable[[Any], Any] = find_body, **options: Any
) -> PreTrainedModel:
    """Load a model with pretrained weights, and merge its adapters if it has any.

    `auto_class.from_pretrained` loads the model; `options` are its further arguments. With adapters, `dtype` is
    required. `AutoModel` loads a checkpoint with one stack of an encoder-decoder as this stack. `find_part` returns
    the part of the model that is used; weights of the checkpoint that it leaves out are named in a warning.

    Raises:
        UserError: if the model cannot be loaded, if weights of the part are missing, or if the checkpoint has more
            weights for a layer of the part than the model, such as biases or the scales of quantized weights.
    """
    if has_adapters(source.name):
        if "device_map" in options:
            raise UserError(f"{source.name} holds adapters; merge them into a model, which --device-map can place")
        with tempfile.TemporaryDirectory() as folder:
            _write_merged_model(source, Path(folder), options["dtype"])
            return load_weights(replace(source, name=folder), auto_class, find_part, **options)
    checkpoint_config = load_checkpoint_config(source)
    checkpoint_class = get_checkpoint_class(checkpoint_config)
    # A head for other labels may have mismatched sizes; `_check_loaded_weights` rejects all other mismatches.
    options = {"config": checkpoint_config, **options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    is_headless = auto_class is AutoModel
    if is_headless and checkpoint_class is not None and type(checkpoint_config) not in transformers.MODEL_MAPPING:
        auto_class = checkpoint_class  # some parts of models with images or sound have a class with a head only
    model, loading_info = _load_pretrained(source, auto_class, **options)
    part = find_part(model)
    if checkpoint_class in (None, type(model)) or not _select_weights(model, part, loading_info["missing_keys"]):
        _check_loaded_weights(source.label, model, part, loading_info, checkpoint_class)
        return part if is_headless and auto_class is checkpoint_class else model
    if "device_map" in options:
        raise UserError(f"{source.label}: --device-map cannot place a {checkpoint_class.__name__}; leave it out")
    # The checkpoint's class may compute the missing weights, like the positions of Marian, or have other names for
    # them: the base model of `LlamaForQuestionAnswering` is `transformer`. It may also lack one of two stacks.
    checkpoint_model, loading_info = _load_pretrained(source, checkpoint_class, **options)
    checkpoint_part = find_part(checkpoint_model)
    _check_loaded_weights(source.label, checkpoint_model, checkpoint_part, loading_info, checkpoint_class)
    if is_headless:
        return checkpoint_part
    if part.state_dict().keys() != checkpoint_part.state_dict().keys():
        raise UserError(f"{source.label}: a {checkpoint_class.__name__} cannot become a {type(model).__name__}")
    part.load_state_dict(checkpoint_part.state_dict())
    return model


def _write_merged_model(source: ModelSource, folder: Path, dtype: torch.dtype) -> None:
    adapters_folder = Path(source.name)
    adapted_config = load_checkpoint_config(source)
    adapted_class = get_checkpoint_class(adapted_config)
    settings: Any = read_json(adapters_folder / ADAPTER_CONFIG_FILE)
    # peft alone writes no config.json, which would name the class of the model that was adapted.
    if settings.get("task_type") == "FEATURE_EXTRACTION" and not (adapters_folder / "config.json").is_file():
        adapted_class = AutoModel
    if adapted_class is None:
        raise UserError(f"{source.label}: its config.json names no architecture of transformers")
    base_model = load_weights(read_base_source(adapters_folder), adapted_class, config=adapted_config, dtype=dtype)
    with convert_to_user_errors(source), silence_transformers():
        merge_adapters(base_model, adapters_folder).save_pretrained(folder)


def make_hub_options(source: ModelSource) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for where a model may be loaded from."""
    # The retries of an unreachable hub would take a minute. Without `trust_remote_code`, transformers would ask at the
    # terminal whether to run code of the repository.
    uses_local_files = is_folder(source.name) or bool(find_hub_problem())
    return {"revision": source.revision or "main", "local_files_only": uses_local_files, "trust_remote_code": False}


def check_json_files(folder: Path) -> None:
    """Raise a `UserError` if a settings file of a model or tokenizer in a folder is not a JSON object."""
    for path in (folder / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")):
        if path.exists() and not isinstance(read_json(path), dict):
            raise UserError(f"{path}: a JSON object was expected, as save_pretrained writes it")


def _select_weights(model: nn.Module, part: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of a model's weights that are weights of one of its parts, without a pooler's."""
    # Tied weights have several names.
    part_weights = {id(weight) for weight in part.state_dict(keep_vars=True).values()}
    weights = model.state_dict(keep_vars=True)
    return sorted(name for name in names if "pooler" not in name and id(weights.get(name)) in part_weights)


def _check_loaded_weights(
    label: str, model: PreTrainedModel, part: nn.Module, loading_info: dict[str, Any], checkpoint_class: Any
) -> None:
    """Check that the used part of a model has all of its weights from the checkpoint; raise as `load_weights`.

    The head is new for each task. Warns if a head for language modelling is new, because it needs long training.
    """
    # The head for language modelling has as many outputs as the tokenizer has tokens, whatever the task.
    is_language_model = model.get_output_embeddings() is not None
    for key, stored_shape, expected_shape in sorted(loading_info["mismatched_keys"]):
        if is_language_model or _select_weights(model, part, [key]):
            raise UserError(
                f"{label}: {key} has the shape {tuple(stored_shape)} in the weights and {tuple(expected_shape)} by "
                "config.json; they belong to different models"
            )
    if missing := _select_weights(model, part, loading_info["missing_keys"]):
        raise UserError(f"{label} lacks {len(missing)} of its weights, e.g. {missing[0]}; they would be random")
    new_head_weights = sorted(key for key in loading_info["missing_keys"] if "pooler" not in key)
    if is_language_model and new_head_weights:
        log.warning(
            "%s has no head for language modelling: %s and all else of the head is random", label, new_head_weights[0]
        )
    has_new_head = checkpoint_class not in (type(model), type(part))
    uses_head = checkpoint_class is type(model) and part is find_body(model)
    _check_unused_weights(label, model, model if uses_head else part, loading_info["unexpected_keys"], has_new_head)


def _check_unused_weights(
    label: str, model: PreTrainedModel, part: nn.Module, keys: Iterable[str], has_new_head: bool
) -> None:
    """Warn of weights of a checkpoint that a part of a model lacks; refuse further weights of one of its layers.

    Weights of a pooler, and with `has_new_head` those of the head, are expected to be left out.
    """
    # Only in a model with a head, the names of the base model's weights have a prefix.
    prefix = f"{model.base_model_prefix}."
    module_by_name, part_modules = dict(model.named_modules()), set(part.modules())
    unused = []
    for key in sorted(keys):
        paths = (key, key.removeprefix(prefix), prefix + key)
        names = {name for name in module_by_name if any(path.startswith(f"{name}.") for path in paths)}
        layer_name = max(names - {model.base_model_prefix}, key=len, default="")
        layer = module_by_name[layer_name] if layer_name else find_body(model)
        is_of_head = has_new_head and not layer_name and not key.startswith(prefix)
        is_expected = is_of_head or (has_new_head and "lm_head" in key) or "pooler" in key
        if layer not in part_modules or is_expected:
            continue
        has_weights = layer_name and next(layer.parameters(recurse=False), None) is not None
        if has_weights:
            refuse_further_weight(label, key, layer_name)
        if has_weights or not key.endswith(_FORMER_BUFFERS):
            unused.append(key)
    if unused:
        log.warning("%s: %d of the checkpoint's weights are not used, e.g. %s", label, len(unused), unused[0])


def refuse_further_weight(label: str, key: str, layer_name: str) -> None:
    """Raise a `UserError` for a weight of a checkpoint that a layer of the model lacks, unless it is only a copy."""
    # DeBERTa's checkpoints have copies of weights, under names that begin with an underscore.
    if "._" not in key:
        raise UserError(
            f"{label}: the checkpoint has {key}, but by config.json {layer_name} has no such weight and would compute "
            "something else; choose a checkpoint that is not quantized, or mend config.json"
        )


@contextmanager
def convert_to_user_errors(source: ModelSource, noun: str = "model") -> Iterator[None]:
    """Convert any error in the block to a `UserError`; transformers raises many types for damaged folders."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(_make_load_error_message(noun, source.name, error)) from error


def _make_load_error_message(noun: str, name: str, error: Exception) -> str:
    if is_folder(name):
        return f"{noun} {name} is not a folder that can be loaded: {describe_load_error(error)}"
    if not is_hub_id(name):
        return f"{noun} {name}: there is no such folder; expected one that save_pretrained wrote, or a hub id"
    problem = find_hub_problem() if isinstance(error, OSError | ValueError | KeyError) else ""
    reason = explain_refusal(error, name, "model") or describe_load_error(error)
    reason = f"not in the local cache, and {problem}" if problem else reason
    return f"{noun} {name}: {reason}; {LOCAL_COPY_HINTS['model']}"


def describe_load_error(error: Exception) -> str:
    """Return in one line why transformers could not load or build a model."""
    if isinstance(error, pickle.UnpicklingError | EOFError):
        return "its pickled weights hold more than tensors, or are damaged; look for a model.safetensors"
    # The message of transformers recommends running the code of the checkpoint.
    if "trust_remote_code" in str(error):
        return "it needs code from its repository, which is never run; choose an architecture that transformers knows"
    # The messages of these two types are complete sentences; others need the name of the type to be understood.
    return shorten(error if type(error) in (OSError, ValueError) else f"{type(error).__name__}: {error}")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress transformers' log output, progress bars and warning about pickled weights within the block.

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
