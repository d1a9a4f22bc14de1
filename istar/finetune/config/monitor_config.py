"""The settings of the monitor of a run."""

from dataclasses import dataclass, field
from typing import Any

from istar.errors import UserError, check_at_least, check_one_of
from istar.finetune.config.fields import NEVER_MATTERS, matters

_IF_IT_STOPS = matters(if_=lambda config: config.monitor.stops)


@dataclass
class MonitorConfig:
    """The geometry of all hidden states during training, read by an `istar.Monitor`, and alarms of a collapse.

    Readings do not change the trained weights.
    """

    every: int | None = field(default=None, metadata=_IF_IT_STOPS)
    """Optimizer steps from one reading of the training's own batches to the next; null reads nothing. The first reading
    is of the first step."""
    points: int = field(default=4096, metadata=_IF_IT_STOPS)
    """Maximum number of tokens of each state in a reading, at random; over all processes together."""
    measures: list[str] = field(
        default_factory=list,
        metadata=matters(as_=lambda config: config.monitor.measures if config.monitor.action == "stop" else []),
    )
    """Measures by name, such as [inter_sim,isoscore,effective_rank]. An empty list takes those of `istar.Monitor` by
    default."""
    probe_examples: int | None = field(default=64, metadata=NEVER_MATTERS)
    """Number of examples of the first validation set that are also measured, in eval mode: before training, after every
    `every` steps, and at the end. They are a random sample, always the same one; null measures none."""
    action: str | None = field(default="warn", metadata=matters(as_=lambda config: config.monitor.action == "stop"))
    """What the default alarms of `istar.Monitor` do if a state seems to have collapsed: warn, or stop, which ends the
    training with a validation; null switches them off."""
    stop_at_inter_sim: float | None = None
    """InterSim in [-1, 1]. Training ends with a validation once any state is above it in consecutive readings; null
    never stops."""
    readings: int = field(default=3, metadata=_IF_IT_STOPS)
    """Number of consecutive readings that set off an alarm."""

    def __post_init__(self) -> None:
        for name in ("every", "probe_examples", "readings"):
            check_at_least(1, f"monitor.{name}", getattr(self, name))
        check_at_least(2, "monitor.points", self.points)
        if self.action is not None:
            check_one_of("monitor.action", self.action, ("warn", "stop"))
        if self.stop_at_inter_sim is not None and not -1 <= self.stop_at_inter_sim <= 1:
            value = f"monitor.stop_at_inter_sim={self.stop_at_inter_sim:g}"
            raise UserError(f"{value} is not an average cosine; expected -1 to 1")
        if self.every is None and self.stops:
            key = "action=stop" if self.action == "stop" else f"stop_at_inter_sim={self.stop_at_inter_sim:g}"
            raise UserError(f"monitor.{key} stops nothing without readings; set monitor.every, such as 50 steps")
        self._check_measures()

    @property
    def stops(self) -> bool:
        """Whether an alarm may end the training."""
        return self.action == "stop" or self.stop_at_inter_sim is not None

    @property
    def reading_settings(self) -> dict[str, Any]:
        """The settings that decide which readings a run has, by key."""
        return {f"monitor.{name}": getattr(self, name) for name in ("every", "points", "measures", "probe_examples")}

    def _check_measures(self) -> None:
        if not isinstance(self.measures, list) or not all(isinstance(name, str) for name in self.measures):
            raise UserError(f"monitor.measures={self.measures} is not a list of names, e.g. [inter_sim,isoscore]")
        if not self.measures:
            return
        # torch takes seconds to import, and most configs name no measures.
        from istar.monitoring.stacked_measures import SAMPLE_MEASURES

        for name in self.measures:
            check_one_of("monitor.measures", name, SAMPLE_MEASURES)
        if self.stop_at_inter_sim is not None and "inter_sim" not in self.measures:
            raise UserError("monitor.stop_at_inter_sim needs inter_sim among monitor.measures")
