"""A callback that measures the isotropy of every layer on the validation data."""

from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
from torch import Tensor

from istar.errors import NonFiniteError
from istar.measures import Moments, isoscore
from istar.records.metric_names import isotropy_key


def merge_layers(layers: Sequence[Moments]) -> Moments:
    """Return the moments of the union of layers 1 to L. The first of `layers`, the embedding output, is left out.

    Raises:
        UserError: if the layers have different widths.
    """
    union = Moments(layers[0].dim, layers[0].scatter.device)
    for moments in layers[1:]:
        union.merge(moments)
    return union


class LayerStatisticsCallback(L.Callback):
    """Base class of callbacks that accumulate statistics of each layer over the first validation set.

    The module's `validation_step` must return `hidden_states` and `attention_mask`, as that of `FineTuner` does.
    """

    accumulator_class: ClassVar[type]
    """Class that accumulates the statistics of one layer, constructed from its number of dimensions and a device."""

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Discard the statistics of the previous validation."""
        self._accumulators: list[Any] = []

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch of the first validation set to the statistics of each layer."""
        if dataloader_idx > 0:
            return
        states_by_layer = outputs["hidden_states"]
        if not self._accumulators:
            self._accumulators = [self.accumulator_class(states.shape[-1], states.device) for states in states_by_layer]
        for accumulator, states in zip(self._accumulators, states_by_layer, strict=True):
            self.update_layer(accumulator, states, outputs["attention_mask"], batch, pl_module)

    def update_layer(
        self, accumulator: Any, states: Tensor, mask: Tensor, batch: Any, module: L.LightningModule
    ) -> None:
        """Add the hidden states of a batch to the statistics of one layer. By default, all tokens but padding count.

        Args:
            accumulator: statistics of the layer, an instance of `accumulator_class`.
            states: hidden states of the layer, `(batch, tokens, d)`.
            mask: `(batch, tokens)`, 1 for tokens and 0 for padding.
            batch: inputs of the model.
            module: module that is validated.
        """
        accumulator.update(states, mask)


class LayerIsotropy(LayerStatisticsCallback):
    """Measure IsoScore of each layer and of the union of all layers over the tokens of the first validation set.

    Unlike IsoScore*, the scores use no shrinkage: a whole validation set has enough points without it, and models
    trained without I-STAR have no shrinkage covariance. The scores are logged under the names of `isotropy_key`.

    Attributes:
        scores: latest scores by layer: `0` (embedding output), `1` to `L`, and `union` (layers 1 to L together).
        num_points: number of tokens of each layer from which the scores are computed.
    """

    accumulator_class = Moments

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.num_points = 0

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compute and log the scores of all layers from the tokens of all processes."""
        moments_by_layer: list[Moments] = [moments.all_reduce() for moments in self._accumulators]
        union_moments = merge_layers(moments_by_layer)
        self.num_points = int(moments_by_layer[0].count)
        try:
            self.scores = {str(layer): isoscore(moments).item() for layer, moments in enumerate(moments_by_layer)}
        except NonFiniteError as error:
            raise NonFiniteError(f"validation after step {trainer.global_step}: {error}") from error
        self.scores["union"] = isoscore(union_moments).item()
        pl_module.log_dict({isotropy_key(layer): score for layer, score in self.scores.items()}, sync_dist=True)
        self._accumulators = []

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.num_points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_points = state_dict["points"]
