"""A callback that measures the IsoScore of every layer on the validation data during training."""

import math
from typing import Any

import lightning as L

from istar.finetune.training.final_geometry import call_or_none, unite_layers
from istar.finetune.training.module import naming_step
from istar.measures import Moments, isoscore
from istar.runs.names import FINAL_NORM, isotropy_key


class ValidationIsoScore(L.Callback):
    r"""Measure the isotropy of every layer over the tokens of the first validation set, of all processes.

    IsoScore of each layer, of layers 1 to L together, and after a final norm is logged. Layer 0 is the embedding
    output, and layer l the output of layer l before the final norm, as in `istar measure`. Unlike IsoScore\*, IsoScore
    uses no shrinkage: a whole validation set has enough points, and models trained without I-STAR have no Sigma_S.

    The module's `validation_step` must return `hidden_states` and `attention_mask`, as `FineTuner` does.

    Attributes:
        scores: latest IsoScores by layer: `0`, `1` to `L`, and `union`, layers 1 to L together.
        num_points: number of tokens of each layer in the scores.
    """

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.num_points = 0
        self._moments: dict[str, Moments] = {}

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._moments = {}

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if dataloader_idx > 0:
            return
        for layer, states in outputs["hidden_states"].items():
            if layer not in self._moments:
                self._moments[layer] = Moments(states.shape[-1], states.device)
            self._moments[layer].update(states, outputs["attention_mask"])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        moments = {layer: layer_moments.all_reduce() for layer, layer_moments in self._moments.items()}
        self._moments = {}
        self.num_points = int(moments["0"].count)
        with naming_step("validation", trainer):
            scores = {layer: _score_or_nan(layer_moments) for layer, layer_moments in moments.items()}
            layers = [layer_moments for layer, layer_moments in moments.items() if layer.isdigit()]
            scores["union"] = _score_or_nan(unite_layers(layers))
        self.scores = {layer: score for layer, score in scores.items() if layer != FINAL_NORM}
        pl_module.log_dict({isotropy_key(layer): score for layer, score in scores.items()}, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.num_points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_points = state_dict["points"]


def _score_or_nan(moments: Moments) -> float:
    """Return IsoScore, or NaN if all points are equal because a layer has collapsed."""
    score = call_or_none(lambda: isoscore(moments))
    return math.nan if score is None else score
