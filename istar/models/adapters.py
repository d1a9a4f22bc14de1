"""Low-rank adapters (LoRA) by peft: added to a pretrained model, saved, and merged into the weights."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.errors import UserError, shorten
from istar.files.folders import ADAPTER_CONFIG_FILE, list_visible
from istar.files.parsing import read_json
from istar.finetune.config import ModelConfig
from istar.finetune.config.model_config import ALL_LINEAR
from istar.runs.tasks import Kind

if TYPE_CHECKING:
    from peft import PeftModel

_POOLER = "pooler"  # part of the base model; many checkpoints lack its weights, which are then random


def add_adapters(model: PreTrainedModel, config: ModelConfig, kind: Kind) -> "PeftModel":
    """Add low-rank adapters to a model with a head for the task.

    Afterwards only the adapters, the head and the pooler require gradients. A head for language modelling is part of
    the pretrained weights and is not trained. Raises a `UserError` if `config.lora_target_modules` is None and peft
    lacks a default for the architecture, or if it names a module that the model lacks.
    """
    peft = _import_peft("model.lora=true")
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
        modules_to_save=None if kind in ("causal_lm", "masked_lm") else find_new_modules(model),
    )
    try:
        with _suppress_peft_warnings():
            return peft.get_peft_model(model, lora_config, revision=config.revision)
    except ValueError as error:
        if config.lora_target_modules is None:
            raise UserError(
                f"model.lora=true: peft has no default for {model.config.model_type} models; name the modules that "
                "get adapters in model.lora_target_modules, or set it to all-linear"
            ) from error
        raise UserError(f"model.lora_target_modules={config.lora_target_modules}: {shorten(error)}") from error


def find_new_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that may have new random weights: the parts of the head, and the pooler."""
    base_model = model.base_model
    head_names = [name for name, child in model.named_children() if child is not base_model and _has_parameters(child)]
    pooler: Any = getattr(base_model, _POOLER, None)
    return [*head_names, _POOLER] if pooler is not None and _has_parameters(pooler) else head_names


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def save_adapters(model: "PeftModel", folder: Path, weights: "dict[str, Tensor] | None" = None) -> None:
    """Write the adapters, the modules of `find_new_modules` and the configuration, without the base model's weights.

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


def read_base_config(folder: Path) -> ModelConfig:
    """Read the name and revision of the base model from a folder with adapters.

    Raises a `UserError` if the folder does not name a base model, or names modules by a regular expression.
    """
    path = folder / ADAPTER_CONFIG_FILE
    settings = read_json(path)
    base_name = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base_name, str) or not base_name:
        raise UserError(f"{path} names no base model; expected base_model_name_or_path, as peft writes it")
    for key in ("target_modules", "exclude_modules"):
        # A malicious pattern could take peft forever.
        if isinstance(settings.get(key), str) and not re.fullmatch(rf"{ALL_LINEAR}|[\w.]+", settings[key]):
            raise UserError(f"{path}: {key} is a regular expression; expected a list of names of modules")
    return ModelConfig(name=base_name, revision=settings.get("revision"))


def find_base(config: ModelConfig, file_name: str) -> ModelConfig | None:
    """Return the base model of an adapter folder that lacks a file, as folders by peft alone do; otherwise None.

    Raises a `UserError` if the file is missing and the folder does not name a base model.
    """
    lacks_file = has_adapters(config.name) and not (Path(config.name) / file_name).is_file()
    return read_base_config(Path(config.name)) if lacks_file else None


def merge_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge the adapters in a folder into the weights of the base model `model`; return it with the adapters' head.

    Raises a `UserError` if the adapters do not fit the base model, or cannot be merged, like prefix tuning.
    """
    peft = _import_peft(f"{folder} holds adapters, which")
    if not list_visible(folder, "adapter_model.*"):
        raise UserError(f"{folder} has an {ADAPTER_CONFIG_FILE}, but no weights in adapter_model.safetensors")
    with _suppress_peft_warnings():
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


def _import_peft(feature: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(f"{feature} needs peft; pip install 'istar[lora]'") from error
    return peft


@contextmanager
def _suppress_peft_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # GPT-2's weights are transposed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield
