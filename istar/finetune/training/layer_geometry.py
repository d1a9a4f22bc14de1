"""Callbacks that measure the geometry of every layer on validation data during training."""

import math
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import lightning as L
import torch

from istar.errors import UserError
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate
from istar.finetune.training.final_geometry import EvaluationPasses, call_or_none, list_layers, unite_layers
from istar.finetune.training.module import FineTuner, log_immediately, naming_step
from istar.hidden_states.model_modes import preserve_rng_states
from istar.hidden_states.sharding import is_sharded_module
from istar.measures import Moments, isoscore
from istar.measures.layer_sums import LayerSums
from istar.runs.names import FINAL_NORM, geometry_key, isotropy_key

MONITORED = ("inter_sim", "average_norm", "norm_ratio", "effective_rank", "participation_ratio")
"""Measures that are logged after every validation with `trainer.monitor_isotropy`."""
SAMPLED = ("isoscore", "inter_sim", "effective_rank", "mean_kurtosis", "average_norm")
"""Measures that are logged every n steps with `trainer.measure_every_n_steps`."""
SECONDS_KEY = "geometry/seconds"
"""Name under which the duration of a measurement is logged."""
_SAMPLE_SEED = 0


class ValidationGeometry(L.Callback):
    r"""Measure the isotropy of every layer over the tokens of the first validation set, of all processes.

    Layer 0 is the embedding output, and layer l the output of layer l before the final norm, as in `istar measure`. The
    module's `validation_step` must return `hidden_states` and `attention_mask`, as `FineTuner` does.

    IsoScore of each layer, of layers 1 to L together, and after a final norm is measured and logged. Unlike IsoScore\*,
    it uses no shrinkage: a whole validation set has enough points, and models trained without I-STAR have no Sigma_S.

    *Anisotropy is Not Inherent to Transformers* observes that models become anisotropic during training and recommends
    monitoring it. With `stop_at`, training stops once the mean InterSim of layers 1 to L has been below `stop_at` and
    is then at or above it in `patience` consecutive validations. Short peaks, and models that are anisotropic from the
    start, do not stop the training.

    Args:
        is_monitored: also log the measures in `MONITORED` as `isotropy/layer_<l>/<measure>`, and the mean InterSim of
            layers 1 to L as `isotropy/inter_sim`.
        stop_at: mean InterSim in [-1, 1] that stops training, and is then monitored; None never stops it.
        patience: number of consecutive validations at or above `stop_at` before training stops.

    Attributes:
        scores: latest IsoScores by layer: `0`, `1` to `L`, and `union`, layers 1 to L together.
        inter_sim: latest mean InterSim of layers 1 to L; NaN if it is not monitored.
        num_points: number of tokens of each layer in the scores.
    """

    def __init__(self, is_monitored: bool = False, stop_at: float | None = None, patience: int = 2) -> None:
        self.is_monitored = is_monitored or stop_at is not None
        self.stop_at, self.patience = stop_at, patience
        self.scores: dict[str, float] = {}
        self.inter_sim = math.nan
        self.num_points = 0
        self._was_below, self._num_above = False, 0

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sums: dict[str, Any] = {}

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
        sums_class: Any = LayerSums if self.is_monitored else Moments
        _add_layers(self._sums, outputs["hidden_states"], outputs["attention_mask"], sums_class)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        all_sums = {layer: sums.all_reduce() for layer, sums in self._sums.items()}
        moments = {layer: sums.moments if self.is_monitored else sums for layer, sums in all_sums.items()}
        self._sums = {}
        self.num_points = int(moments["0"].count)
        with naming_step("validation", trainer):
            scores = {layer: _score_or_nan(layer_moments) for layer, layer_moments in moments.items()}
            scores["union"] = _score_or_nan(unite_layers(list_layers(moments)))
            measures = {layer: sums.compute(MONITORED) for layer, sums in all_sums.items()} if self.is_monitored else {}
        self.scores = {layer: score for layer, score in scores.items() if layer != FINAL_NORM}
        logged = {isotropy_key(layer): score for layer, score in scores.items()}
        for layer, layer_measures in measures.items():
            logged |= {isotropy_key(layer, name): value for name, value in layer_measures.items()}
        if measures:
            self.inter_sim = fmean(layer_measures["inter_sim"] for layer_measures in list_layers(measures)[1:])
            logged[isotropy_key("union", "inter_sim")] = self.inter_sim
        pl_module.log_dict(logged, sync_dist=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the training if the mean InterSim has been too high for `patience` consecutive validations."""
        if self.stop_at is None or trainer.sanity_checking or math.isnan(self.inter_sim):
            return
        is_above = self.inter_sim >= self.stop_at
        self._num_above = self._num_above + 1 if is_above and self._was_below else 0
        self._was_below = self._was_below or not is_above
        if trainer.state.fn == "fit" and self._num_above >= self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.num_points, "was_below": self._was_below, "above": self._num_above}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_points = state_dict["points"]
        self._was_below, self._num_above = state_dict["was_below"], state_dict["above"]


def _add_layers(sums: dict[str, Any], states_by_layer: dict[str, Any], mask: torch.Tensor, sums_class: Any) -> None:
    """Add the tokens of a batch to the sums of each layer, which are created if they are missing."""
    for layer, states in states_by_layer.items():
        if layer not in sums:
            sums[layer] = sums_class(states.shape[-1], states.device)
        sums[layer].update(states, mask)


def _score_or_nan(moments: Moments) -> float:
    """Return IsoScore, or NaN for points without variance, as of a layer that has collapsed."""
    score = call_or_none(lambda: isoscore(moments))
    return math.nan if score is None else score


@dataclass(eq=False)
class GeometryProbe(L.Callback):
    """Log the measures in `SAMPLED` of every layer before training, after every n-th optimizer step and at the end.

    Rank 0 alone measures them on the tokens of a fixed sample of validation examples. The callback does not change the
    trained weights by a single bit. It must precede the callback that writes checkpoints, so that the checkpoint of a
    step contains the measures of that step.

    `rows` are the tokenized validation set to sample from.
    """

    rows: TokenizedRows
    collate: Collate
    batch_size: int
    every_n_steps: int
    num_examples: int
    _step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(_SAMPLE_SEED))
        self.sample = sorted(order[: self.num_examples].tolist())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if self._step == 0:
            self._measure_and_log(trainer, pl_module, trainer.current_epoch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        is_optimizer_step = trainer.global_step > self._step
        self._step = trainer.global_step
        if is_optimizer_step and self._step % self.every_n_steps == 0:
            self._measure_and_log(trainer, pl_module, trainer.current_epoch)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the model after the last step, unless it has just been measured."""
        # Unlike on_train_end, this is called even if a resumed training is already complete.
        if trainer.global_step % self.every_n_steps:
            # `current_epoch` differs by one between a training that ends and a finished one that is resumed.
            epochs: Any = trainer.fit_loop.epoch_progress.current
            self._measure_and_log(trainer, pl_module, epochs.processed - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"every_n_steps": self.every_n_steps, "num_examples": self.num_examples}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise a `UserError` if the interrupted training was measured at different steps or not at all."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state != self.state_dict():
            previous = "trainer.measure_every_n_steps=null"
            if state is not None:
                steps, examples = state["every_n_steps"], state["num_examples"]
                previous = f"trainer.measure_every_n_steps={steps} and trainer.measure_examples={examples}"
            raise UserError(
                f"the interrupted run has been measured with {previous}; the same settings go on with it, "
                "run.overwrite=true starts again"
            )

    def _measure_and_log(self, trainer: L.Trainer, pl_module: L.LightningModule, epoch: int) -> None:
        assert isinstance(pl_module, FineTuner)
        # Of a sharded model, all processes compute the states together.
        if not trainer.is_global_zero and not is_sharded_module(pl_module.model):
            return
        start = time.perf_counter()
        passes = EvaluationPasses(trainer, pl_module, self.collate, self.batch_size)
        sums: dict[str, LayerSums] = {}
        with preserve_rng_states(trainer.strategy.root_device), naming_step("geometry", trainer):
            for _, states_by_layer, mask in passes.iterate(self.rows, self.sample):
                _add_layers(sums, states_by_layer, mask, LayerSums)
            measures = {layer: layer_sums.compute(SAMPLED) for layer, layer_sums in sums.items()}
        values = {geometry_key(layer, name): value for layer in measures for name, value in measures[layer].items()}
        log_immediately(trainer, {"epoch": epoch, **values, SECONDS_KEY: time.perf_counter() - start})
