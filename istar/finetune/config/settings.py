"""The settings of a run that change its outcome."""

from typing import Any

from istar.finetune.config.groups import Config
from istar.finetune.config.model_config import ModelConfig
from istar.finetune.config.schema import to_dict
from istar.finetune.config.task_config import DataConfig, TaskConfig, find_task_spec
from istar.finetune.config.trainer_arguments import redundant_arguments
from istar.finetune.config.trainer_config import TrainerConfig


def settings_of(config: Config) -> dict[str, Any]:
    """Return the config as nested dictionaries that are equal for configs of the same run.

    Values that have no effect, or that mean the same as the default, are replaced by the default.
    """
    settings, spec = to_dict(config), find_task_spec(config.task)
    task, trainer = settings["task"], settings["trainer"]
    # The fingerprint of the data covers these two.
    task["limit_train"] = task["limit_validation"] = None
    model = settings["model"]
    if not config.model.trains_tokenizer:
        model["vocab_size"] = ModelConfig.vocab_size
    if not config.model.lora:
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            model[key] = getattr(ModelConfig, key)
    if config.task.max_length == spec.max_length:
        task["max_length"] = None
    if spec.kind != "span":
        for key in ("doc_stride", "n_best", "max_answer_length"):
            task[key] = getattr(TaskConfig, key)
    if not spec.is_language_modelling:
        task["packing"] = TaskConfig.packing
    if spec.kind != "masked_lm":
        task["whole_word"] = TaskConfig.whole_word
    if config.task.stream:
        settings["data"]["group_by_length"] = DataConfig.group_by_length
    else:
        task["shuffle_blocks"] = TaskConfig.shuffle_blocks
    if config.trainer.stop_at_inter_sim is None:
        trainer["inter_sim_patience"] = TrainerConfig.inter_sim_patience
    trainer["devices"] = num_devices = _count_devices(config.trainer)
    if not config.task.stream and getattr(config.reg, "sync", True):
        # W processes with batches of B examples train as one process does with batches of W * B examples.
        settings["data"]["batch_size"] *= num_devices * config.trainer.num_nodes
        trainer["devices"] = trainer["num_nodes"] = 1
    for name in redundant_arguments(config.trainer.lightning):
        del trainer[name]
    return settings


def _count_devices(settings: TrainerConfig) -> int:
    if type(settings.devices) is int and settings.devices > 0:
        return settings.devices
    # `auto`, -1 or a list depend on the hardware.
    from istar.finetune.training.trainer import build_bare_trainer

    return build_bare_trainer(settings).num_devices
