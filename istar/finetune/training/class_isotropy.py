"""A callback that measures the isotropy within and between classes on the validation data of a classification task."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.finetune.training.layer_isotropy import LayerStatisticsCallback
from istar.finetune.training.validation_geometry import first_token_positions, last_token_positions
from istar.inputs.architectures import is_decoder
from istar.measures import ClassMoments

SCORE_NAMES = ("within", "between", "between_share")
"""Names of the scores of a layer; `istar.measures.class_isotropy` explains them."""


class ClassIsotropyCallback(LayerStatisticsCallback):
    """Measure the isotropy of each layer within and between the classes of the first validation set.

    Each sequence contributes one point, the hidden state of one token, whose class is the sequence's true label. The
    token is the one that the model's head reads in the last layer: the first token ([CLS]) of an encoder, or the last
    token of a decoder.

    Attributes:
        scores: latest scores by layer number as a string (0 is the embedding output) and then by the names in
            `SCORE_NAMES`. An undefined score is None. All three are None if the states of a layer are equal up to
            rounding, as is the case for the embedding outputs of [CLS].
    """

    accumulator_class = ClassMoments

    def __init__(self) -> None:
        self.scores: dict[str, dict[str, float | None]] = {}

    def update_layer(
        self, accumulator: ClassMoments, states: Tensor, mask: Tensor, batch: Any, module: L.LightningModule
    ) -> None:
        """Add the hidden state of one token of each sequence, with its class, to the statistics of a layer."""
        model: Any = module.model
        positions = last_token_positions(mask) if is_decoder(model.config) else first_token_positions(mask)
        accumulator.update(states[torch.arange(len(mask), device=mask.device), positions], batch["labels"])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compute the scores of all layers from the points of all processes."""
        moments_by_layer = [moments.all_reduce() for moments in self._accumulators]
        self._accumulators = []
        try:
            self.scores = {str(layer): compute_class_scores(moments) for layer, moments in enumerate(moments_by_layer)}
        except NonFiniteError as error:
            raise NonFiniteError(f"validation after step {trainer.global_step}: {error}") from error


def compute_class_scores(moments: ClassMoments) -> dict[str, float | None]:
    """Return the isotropy within and between classes by the names in `SCORE_NAMES`; None stands for an undefined score.

    Raises:
        NonFiniteError: if points are not finite.
    """
    rounding_error = 4 * torch.finfo(torch.float32).eps * moments.mean.norm()
    if moments.total_covariance().trace() <= rounding_error.square():
        return dict.fromkeys(SCORE_NAMES)
    measures = (moments.isoscore_within, moments.isoscore_between, moments.between_share)
    return {name: _compute_or_none(measure) for name, measure in zip(SCORE_NAMES, measures, strict=True)}


def _compute_or_none(measure: Any) -> float | None:
    """Call a measure without arguments and return its value, or None if it is undefined and raises a `UserError`."""
    try:
        return float(measure())
    except NonFiniteError:
        raise
    except UserError:
        return None
