"""A callback that logs the geometry of every layer during training and can stop it when InterSim rises."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import lightning as L
import torch
from torch import Tensor

from istar.finetune.training.layer_isotropy import LayerStatisticsCallback
from istar.measures import AverageCosine, Moments, effective_rank, isoscore, singular_values
from istar.measures.processes import sum_over_processes
from istar.records.metric_names import isotropy_key


class _LayerGeometry:
    """Accumulator of the sums from which the measures of one layer are computed."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self._moments, self._cosine = Moments(dim, device), AverageCosine(dim, device)
        self._norm_sum = torch.zeros_like(self._moments.count)

    def update(self, points: Tensor, mask: Tensor) -> None:
        """Add the points `(batch, tokens, d)` where the mask `(batch, tokens)` is not 0."""
        points = points[mask.bool()]
        self._moments.update(points)
        self._cosine.update(points)
        self._norm_sum = self._norm_sum + torch.linalg.vector_norm(points.to(self._norm_sum.dtype), dim=-1).sum()

    def compute(self) -> dict[str, float]:
        """Return the measures by name, computed from the tokens of all processes. Call it only once."""
        moments, cosine = self._moments.all_reduce(), self._cosine
        cosine.count, cosine.total = sum_over_processes(cosine.count), sum_over_processes(cosine.total)
        average_norm = sum_over_processes(self._norm_sum) / moments.count
        measures = {
            "inter_sim": cosine.compute(),
            "average_norm": average_norm,
            "norm_ratio": torch.linalg.vector_norm(moments.mean) / average_norm,
            "effective_rank": effective_rank(singular_values(moments)),
            "participation_ratio": 1 + (moments.dim - 1) * isoscore(moments),
        }
        return {name: float(value) for name, value in measures.items()}


@dataclass(eq=False)
class IsotropyMonitor(LayerStatisticsCallback):
    """Log InterSim, norms, effective rank and participation ratio of each layer's tokens after every validation.

    The tokens are those of the first validation set, of all processes, without padding. The measures are logged as
    `isotropy/layer_<l>/<measure>` (0 is the embedding output), and the mean InterSim of layers 1 to L as
    `isotropy/inter_sim`.

    *Anisotropy is Not Inherent to Transformers* observes that models become anisotropic during training and recommends
    monitoring it. With `stop_at`, training stops once the mean InterSim has been below `stop_at` and is then at or
    above it in `patience` consecutive validations. Short peaks, and models that are anisotropic from the start, do not
    stop the training.

    Attributes:
        stop_at: mean InterSim in [-1, 1] from which training stops; None never stops it.
        patience: number of consecutive validations at or above `stop_at` before training stops.
        measures: latest measures by name, one dictionary for each layer.
    """

    accumulator_class = _LayerGeometry

    stop_at: float | None = None
    patience: int = 2
    measures: list[dict[str, float]] = field(default_factory=list, init=False)
    _was_below: bool = field(default=False, init=False)
    _num_above: int = field(default=0, init=False)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compute and log the measures of all layers and the mean InterSim."""
        self.measures = [accumulator.compute() for accumulator in self._accumulators]
        self._accumulators = []
        for layer, measures in enumerate(self.measures):
            value_by_key = {isotropy_key(layer, name): value for name, value in measures.items()}
            pl_module.log_dict(value_by_key, sync_dist=True)
        pl_module.log(isotropy_key("union", "inter_sim"), self._mean_inter_sim(), sync_dist=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the training if the mean InterSim has been too high for `patience` consecutive validations."""
        if self.stop_at is None or trainer.sanity_checking or not self.measures:
            return
        is_above = self._mean_inter_sim() >= self.stop_at
        self._num_above = self._num_above + 1 if is_above and self._was_below else 0
        self._was_below = self._was_below or not is_above
        if trainer.state.fn == "fit" and self._num_above >= self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"was_below": self._was_below, "above": self._num_above}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._was_below, self._num_above = state_dict["was_below"], state_dict["above"]

    def _mean_inter_sim(self) -> float:
        return fmean(measures["inter_sim"] for measures in self.measures[1:])
