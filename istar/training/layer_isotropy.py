"""A callback that measures the isotropy of every layer on the validation data."""

from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
from torch import Tensor

from istar.errors import NonFiniteError
from istar.measures import Moments, isoscore


def isotropy_key(layer: str) -> str:
    """Return the name under which a layer's IsoScore is logged; the layer `union` is the union of layers 1 to L."""
    return "isotropy/isoscore_star" if layer == "union" else f"isotropy/layer_{layer}/isoscore_star"


def union_of_layers(layers: Sequence[Moments]) -> Moments:
    """Return the moments of layers 1 to L together; the first of `layers` is the embedding output, which is left out.

    Raises:
        UserError: if the layers have different widths.
    """
    union = Moments(layers[0].dim, layers[0].scatter.device)
    for moments in layers[1:]:
        union.merge(moments)
    return union


class LayerStatisticsCallback(L.Callback):
    """Base class of callbacks that accumulate statistics of each layer over the first validation set.

    `validation_step` must return `hidden_states` and `attention_mask`, as that of `FineTuner` does.
    """

    accumulator: ClassVar[type]
    """Class that is made from a number of dimensions and a device."""

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._layers: list[Any] = []

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
        states = outputs["hidden_states"]
        if not self._layers:
            self._layers = [self.accumulator(state.shape[-1], state.device) for state in states]
        for layer, state in zip(self._layers, states, strict=True):
            self.add(layer, state, outputs["attention_mask"], batch, pl_module)

    def add(self, layer: Any, state: Tensor, mask: Tensor, batch: Any, module: L.LightningModule) -> None:
        """Add the hidden states `(batch, tokens, d)` of a batch to the accumulator of their layer: all real tokens.

        Args:
            layer: an `accumulator`.
            state: the hidden states of the layer.
            mask: `(batch, tokens)`, 1 for real tokens and 0 for padding.
            batch: the inputs of the model.
            module: the module that is validated.
        """
        layer.update(state, mask)


class LayerIsotropy(LayerStatisticsCallback):
    """Measure IsoScore of each layer and of the union of all layers over the tokens of the first validation set.

    The scores use no shrinkage, which IsoScore* has: the whole validation set has enough points to do without it, and
    models trained without I-STAR have no shrinkage covariance. The scores are logged under the names of `isotropy_key`,
    in which layer 0 is the embedding output.

    Attributes:
        scores: the latest scores, by layer number as a string, and `union`.
        points: number of tokens per layer that the scores are computed from.
    """

    accumulator = Moments

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.points = 0

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        layers: list[Moments] = [moments.all_reduce() for moments in self._layers]
        union = union_of_layers(layers)
        self.points = int(layers[0].count)
        try:
            self.scores = {str(number): isoscore(moments).item() for number, moments in enumerate(layers)}
        except NonFiniteError as error:
            raise NonFiniteError(f"validation after step {trainer.global_step}: {error}") from error
        self.scores["union"] = isoscore(union).item()
        pl_module.log_dict({isotropy_key(layer): score for layer, score in self.scores.items()}, sync_dist=True)
        self._layers = []

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]
