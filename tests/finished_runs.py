"""Keys of runs, and complete records of finished runs, which `istar.runs.record.read_result` accepts."""

from collections.abc import Mapping
from typing import Any

from istar.finetune.config import Config
from istar.finetune.config.schema import to_dict
from istar.finetune.execute import identify
from istar.runs.key import RunKey
from istar.runs.record import RunRecord

NO_KEY = RunKey({"reg": {"name": "none"}}, "", "")
"""Key of a record of which a test needs little."""


def make_key(config: Config, data: str = "data", model: str = "model") -> RunKey:
    """Return the key of a run with these hashes of data and model, which need not exist."""
    return identify.make_key(config, data, model)


def make_plain_key(config: Mapping[str, Any], data: str = "data", model: str | None = None) -> RunKey:
    """Return the key of a run whose config is plain data; without `model`, the name and the revision identify it."""
    no_settings = (
        "logger.", "run.", "data.num_workers", "data.cache_dir", "model.name", "model.revision", "model.tokenizer",
        "task.data_dir", "task.limit_", "task.submission",
    )  # fmt: skip
    settings = {
        group: {name: value for name, value in values.items() if not f"{group}.{name}".startswith(no_settings)}
        for group, values in config.items()
        if isinstance(values, dict)
    }
    if settings["reg"].get("lambda") == 0:
        settings["reg"] = {"name": "none"}
    model_config = config["model"]
    return RunKey(
        {**settings, "seed": config["seed"]}, data, model or f"{model_config['name']}@{model_config.get('revision')}"
    )


def make_finished_record(
    name: str, config: Config, value: float = 0.5, key: RunKey | None = None, **changes: Any
) -> RunRecord:
    """Return the record of a finished run with the accuracy `value`, and with other fields as in `changes`."""
    scores = {"0": 0.2, "1": 0.2, "2": 0.2, "union": 0.2}
    fields: dict[str, Any] = {
        "headline": {"metric": "accuracy", "value": value, "epoch": 1},
        "metrics": {"accuracy": value},
        "isotropy": {"before": scores, "after": scores, "points": 10},
        "timing": {"total": 1.0},
    }
    return RunRecord(name, "finished", to_dict(config), key or make_key(config), **{**fields, **changes})
