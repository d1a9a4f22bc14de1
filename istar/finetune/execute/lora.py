"""Low-rank adapters (LoRA) of a run's model, by peft."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from istar.errors import UserError, shorten
from istar.finetune.config import ModelConfig
from istar.models.adapters import import_peft, suppress_peft_warnings
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
