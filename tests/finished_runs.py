"""Complete records of finished runs, which `istar.runs.record.read_result` accepts."""

from typing import Any

from istar.finetune.config import Config
from istar.finetune.config.schema import to_dict
from istar.runs.record import RunRecord


def make_finished_record(name: str, config: Config, value: float = 0.5, **changes: Any) -> RunRecord:
    """Return the record of a finished run with the accuracy `value`, and with other fields as in `changes`."""
    scores = {"0": 0.2, "1": 0.2, "2": 0.2, "union": 0.2}
    fields: dict[str, Any] = {
        "headline": {"metric": "accuracy", "value": value, "epoch": 1},
        "metrics": {"accuracy": value},
        "isotropy": {"before": scores, "after": scores, "points": 10},
        "timing": {"total": 1.0},
    }
    return RunRecord(name, "finished", to_dict(config), **{**fields, **changes})
