"""A callback that measures the isotropy within and between classes on the validation data of a classification task."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures import ClassMoments
from istar.models import is_decoder
from istar.training.layer_isotropy import LayerStatisticsCallback
from istar.training.validation_geometry import first_tokens, last_tokens

NAMES = ("within", "between", "between_share")
"""Names of the scores of a layer, see `istar.measures.class_isotropy`."""


class ClassIsotropyCallback(LayerStatisticsCallback):
    """Measure the isotropy of the first validation set within and between its classes, in each layer.

    A point is the state of one token of each sequence, and its class is the true label of the sequence. The token is
    the first one ([CLS]) of an encoder, and the last one of a decoder, as in
    `istar.training.validation_geometry.geometry`; in the last layer, the head of the model reads the state of this
    token.

    Attributes:
        scores: the latest scores, by layer number as a string (0 is the embedding output), each by the names of
            `NAMES`. A score is None where it is not defined: all three if the states of the layer are equal up to
            rounding, as the embedding outputs of [CLS] are.
    """

    accumulator = ClassMoments

    def __init__(self) -> None:
        self.scores: dict[str, dict[str, float | None]] = {}

    def add(self, layer: ClassMoments, state: Tensor, mask: Tensor, batch: Any, module: L.LightningModule) -> None:
        """Add one token of each sequence with the label of the sequence."""
        model: Any = module.model
        positions = last_tokens(mask) if is_decoder(model.config) else first_tokens(mask)
        layer.update(state[torch.arange(len(mask), device=mask.device), positions], batch["labels"])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        layers = [moments.all_reduce() for moments in self._layers]
        self._layers = []
        try:
            self.scores = {str(number): class_scores(moments) for number, moments in enumerate(layers)}
        except NonFiniteError as error:
            raise NonFiniteError(f"validation after step {trainer.global_step}: {error}") from error


def class_scores(moments: ClassMoments) -> dict[str, float | None]:
    """Return the measures of `istar.measures.class_isotropy` by the names of `NAMES`; None where one is not defined.

    Raises:
        NonFiniteError: if points are not finite.
    """
    rounding = 4 * torch.finfo(torch.float32).eps * moments.mean.norm()
    if moments.total_covariance().trace() <= rounding.square():
        return dict.fromkeys(NAMES)
    measures = (moments.isoscore_within, moments.isoscore_between, moments.between_share)
    return {name: _value_or_none(measure) for name, measure in zip(NAMES, measures, strict=True)}


def _value_or_none(measure: Any) -> float | None:
    try:
        return float(measure())
    except NonFiniteError:
        raise
    except UserError:
        return None
