"""The callback that watches the geometry of every layer while a model is trained, and may end the training by it."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from istar.measures import AverageCosine, Moments, effective_rank, isoscore, singular_values
from istar.training.layer_isotropy import OverLayers


class IsotropyMonitor(OverLayers):
    """After every validation: InterSim, norms, effective rank and participation ratio of each layer's tokens.

    Over the first validation set, padding left out, exactly the same for any number of processes. Logged as
    `isotropy/layer_<l>/<measure>` (0 is the embedding output), and the mean InterSim of layers 1 to L as
    `isotropy/inter_sim`.

    *Anisotropy is Not Inherent to Transformers* sees models turn anisotropic in the middle of their training and
    suggests to watch for it. With `stop_at`, the training ends when the mean InterSim was below it once, and then is at
    or above it in `patience` validations in a row: a passing peak does not count, and neither does a model that has
    been anisotropic from the start.

    Args:
        stop_at: mean InterSim in [-1, 1]; None never stops.
        patience: validations in a row.

    Attributes:
        measures: the latest figures, by layer and name.
    """

    def __init__(self, stop_at: float | None = None, patience: int = 2) -> None:
        super().__init__(_Layer)
        self.stop_at, self.patience = stop_at, patience
        self.measures: list[dict[str, float]] = []
        self._was_below, self._above = False, 0

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.measures = [layer.measures() for layer in self._layers]
        self._layers = []
        for number, own in enumerate(self.measures):
            pl_module.log_dict(
                {f"isotropy/layer_{number}/{name}": value for name, value in own.items()}, sync_dist=True
            )
        pl_module.log("isotropy/inter_sim", self._inter_sim(), sync_dist=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.stop_at is None or trainer.sanity_checking or not self.measures:
            return
        is_above = self._inter_sim() >= self.stop_at
        self._above = self._above + 1 if is_above and self._was_below else 0
        self._was_below = self._was_below or not is_above
        if trainer.state.fn == "fit" and self._above >= self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"was_below": self._was_below, "above": self._above}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._was_below, self._above = state_dict["was_below"], state_dict["above"]

    def _inter_sim(self) -> float:
        layers = [own["inter_sim"] for own in self.measures[1:]]
        return sum(layers) / len(layers)


class _Layer:
    """The sums of one layer, which several processes add up."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self._moments, self._cosine = Moments(dim, device), AverageCosine(dim, device)
        self._norms = torch.zeros_like(self._moments.count)

    def update(self, points: Tensor, mask: Tensor) -> None:
        points = points[mask.bool()]
        self._moments.update(points)
        self._cosine.update(points)
        self._norms = self._norms + torch.linalg.vector_norm(points.to(self._norms.dtype), dim=-1).sum()

    def measures(self) -> dict[str, float]:
        moments, cosine = self._moments.all_reduce(), self._cosine
        cosine.count, cosine.total, norms = _over_processes(cosine.count, cosine.total, self._norms)
        average, mean = norms / moments.count, torch.linalg.vector_norm(moments.mean)
        found = {
            "inter_sim": cosine.compute(),
            "average_norm": average,
            "norm_ratio": mean / average,
            "effective_rank": effective_rank(singular_values(moments)),
            "participation_ratio": 1 + (moments.dim - 1) * isoscore(moments),
        }
        return {name: float(value) for name, value in found.items()}


def _over_processes(*sums: Tensor) -> list[Tensor]:
    """The sums of all processes together, equal on each of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(sums)
    packed = torch.cat([part.reshape(-1) for part in sums])
    dist.all_reduce(packed)
    parts = packed.split([part.numel() for part in sums])
    return [part.reshape(own.shape) for part, own in zip(parts, sums, strict=True)]
