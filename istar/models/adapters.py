"""Low-rank adapters (LoRA) by peft: saved, read, and merged into the weights of a model."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from istar.errors import UserError
from istar.files.folders import ADAPTER_CONFIG_FILE, list_visible
from istar.files.parsing import read_json
from istar.models.model_source import ModelSource, is_folder

if TYPE_CHECKING:
    from peft import PeftModel


def save_adapters(model: "PeftModel", folder: Path, weights: "dict[str, Tensor] | None" = None) -> None:
    """Write the adapters, the other trained modules and the configuration, without the base model's weights.

    `weights` are used instead of the model's own, of which a sharded model has only parts.
    """
    # By default peft asks the hub whether the vocabulary was changed.
    model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=weights)
    base_model: Any = model.get_base_model()
    config = copy.deepcopy(base_model.config)
    config.architectures = [type(base_model).__name__]
    config.save_pretrained(folder)


def has_adapters(name: str) -> bool:
    """Return whether a model's name is a folder with adapters, as written by `save_adapters`."""
    return (Path(name) / ADAPTER_CONFIG_FILE).is_file()


def read_base_source(folder: Path) -> ModelSource:
    """Read the source of the base model from a folder with adapters.

    Raises a `UserError` if the folder does not name a base model, or names modules by a regular expression.
    """
    path = folder / ADAPTER_CONFIG_FILE
    settings = read_json(path)
    base_name = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base_name, str) or not base_name:
        raise UserError(f"{path} names no base model; expected base_model_name_or_path, as peft writes it")
    for key in ("target_modules", "exclude_modules"):
        # A malicious pattern could take peft forever.
        if isinstance(settings.get(key), str) and not re.fullmatch(r"[\w.-]+", settings[key]):
            raise UserError(f"{path}: {key} is a regular expression; expected a list of names of modules")
    return ModelSource(base_name, None if is_folder(base_name) else settings.get("revision"))


def find_base(source: ModelSource, file_name: str) -> ModelSource | None:
    """Return the base model of an adapter folder that lacks a file, as folders by peft alone do; otherwise None.

    Raises a `UserError` if the file is missing and the folder does not name a base model.
    """
    lacks_file = has_adapters(source.name) and not (Path(source.name) / file_name).is_file()
    return read_base_source(Path(source.name)) if lacks_file else None


def merge_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge the adapters in a folder into the weights of the base model `model`; return it with the adapters' head.

    Raises a `UserError` if the adapters do not fit the base model, or cannot be merged, like prefix tuning.
    """
    peft = import_peft(f"{folder} holds adapters, which")
    if not list_visible(folder, "adapter_model.*"):
        raise UserError(f"{folder} has an {ADAPTER_CONFIG_FILE}, but no weights in adapter_model.safetensors")
    with suppress_peft_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        adapted_model = peft.PeftModel.from_pretrained(model, str(folder))
        # Only this method tells which weights are left out. A head that belongs to another class is expected.
        left_out = adapted_model.load_adapter(str(folder), "default").unexpected_keys
        unused_weights = [name for name in left_out if getattr(adapted_model.base_model, "prefix", "") in name]
        merge: Callable[[], PreTrainedModel] | None = getattr(adapted_model, "merge_and_unload", None)
    method = adapted_model.active_peft_config.peft_type.value
    refusal = f"{folder} holds adapters by {method}, which cannot be merged; expected LoRA or the like"
    if merge is None:
        raise UserError(refusal)
    if unused_weights:
        count, example = len(unused_weights), unused_weights[0]
        raise UserError(f"{folder}: {count} of its weights have no place by {ADAPTER_CONFIG_FILE}, e.g. {example}")
    try:
        return merge()
    except NotImplementedError as error:
        raise UserError(refusal) from error


def import_peft(feature: str) -> Any:
    """Return the module peft; raise a `UserError` that names the feature if peft is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(f"{feature} needs peft; pip install 'istar[lora]'") from error
    return peft


@contextmanager
def suppress_peft_warnings() -> Iterator[None]:
    """Suppress peft's warnings about what is as it should be within the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # GPT-2's weights are transposed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield
