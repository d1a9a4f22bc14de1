r"""Penalties on the rows of an embedding matrix, instead of hidden states.

*Representation Degeneration Problem in Training Natural Language Generation Models* (Gao et al., ICLR 2019) adds the
average cosine of the output embeddings to the loss of a language model, because they degenerate into a narrow cone. The
cost is O(V d) for V rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states.attached_penalty import (
    HIDDEN_STATES,
    INPUT_EMBEDDINGS,
    OUTPUT_EMBEDDINGS,
    AttachedPenalty,
    PenaltySettings,
)
from istar.hidden_states.model_layers import find_head_model
from istar.hidden_states.sharding import is_sharded_tensor
from istar.regularizers.base import Penalty
from istar.regularizers.points import Tokens


class EmbeddingPenalty(AttachedPenalty):
    """A penalty on the rows of a model's embedding matrix.

    `loss()` needs no forward pass; the training loop adds it to its loss once per micro-batch. Its gradient reaches the
    matrix directly. With tied embeddings, the two targets are one matrix.

    In distributed training, all processes have the same matrix and, if rows are sampled, the same rows. Each process
    therefore computes the whole penalty without communication, and DDP's average of the gradients over the processes is
    the gradient of the penalty. For this, `penalty.sync` is set to False.

    >>> import istar, transformers
    >>> config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> batch = {"input_ids": torch.arange(40).view(4, 10), "labels": torch.arange(40).view(4, 10)}
    >>> settings = istar.PenaltySettings(target="output_embeddings")
    >>> attached = istar.EmbeddingPenalty(model, istar.CosReg(weight=1.0), settings)
    >>> loss = model(**batch).loss + attached.loss()
    >>> loss.backward()
    >>> attached
    EmbeddingPenalty(GPT2LMHeadModel, CosReg(weight=1.0, layers='last', sync=False), output embeddings)
    >>> attached.penalty.last.points.item()
    50.0

    Args:
        model: a transformers model, bare, with a head, or inside of PEFT, DDP or another module.
        penalty: `CosReg`, or `IStar` with zeta 0. Its `layers` are ignored.
        settings: with an embedding matrix as their target.

    Raises:
        UserError: for a model without this matrix or with a sharded one, more `rows` than the matrix has, and a penalty
            that needs Sigma_S.
    """

    def __init__(self, model: nn.Module, penalty: Penalty, settings: PenaltySettings) -> None:
        super().__init__(penalty, settings)
        target, rows = settings.target, settings.rows
        if target == HIDDEN_STATES:
            raise UserError(f"target={target} is not an embedding matrix; use istar.attach for hidden states")
        if penalty.needs_shrinkage_covariance:
            raise UserError(
                f"target={target} has no shrinkage covariance, since all rows are at hand: expected a penalty without "
                "one, such as IStar with zeta=0"
            )
        self.target = target
        self._head_model = find_head_model(model)
        num_rows = len(self.matrix)
        if rows is not None and rows > num_rows:
            raise UserError(f"rows={rows}; expected 2 to {num_rows}, the number of rows of the {_describe(target)}")
        penalty.sync = False

    def __repr__(self) -> str:
        return f"EmbeddingPenalty({type(self._head_model).__name__}, {self.penalty}, {_describe(self.target)})"

    @property
    def matrix(self) -> Tensor:
        """The embedding matrix, `(V, d)`. It is looked up at each use, because a model may replace it."""
        return _find_matrix(self._head_model, self.target)

    @property
    def num_layers(self) -> int:
        """Number of point clouds of a loss, which is 1."""
        return 1

    def loss(self) -> Tensor:
        """Compute the weighted penalty of the current matrix, to be added to the task loss.

        Returns:
            0-d tensor on the matrix' device, see `Penalty.forward`. It is 0 if the weight is 0. Even then rows are
            sampled, so that samples do not depend on earlier weights.
        """
        self._check_not_removed()
        matrix = self.matrix
        points = matrix
        if self.settings.rows is not None:
            row_indices = torch.randperm(len(matrix), generator=self._generator, device="cpu")[: self.settings.rows]
            points = matrix.index_select(0, row_indices.to(matrix.device))
        if self.penalty.weight == 0:
            self.penalty.last = None
            return torch.zeros((), device=matrix.device)
        loss = self.penalty.combine(self.penalty.summarize([points], Tokens()))
        self._warn_if_no_gradient(loss, f"the {_describe(self.target)} are frozen")
        return loss

    @property
    def _has_state_per_process(self) -> bool:
        """All processes compute the same penalty from the same rows."""
        return False


def _find_matrix(model: Any, target: str) -> Tensor:
    try:
        weight = (model.get_input_embeddings() if target == INPUT_EMBEDDINGS else model.get_output_embeddings()).weight
    except (AttributeError, NotImplementedError):  # models without such a layer have None or raise the latter
        weight = None
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UserError(
            f"{type(model).__name__} has no {_describe(target)}, so that target={target} does not fit it; expected "
            f"a language model, or target={INPUT_EMBEDDINGS if target == OUTPUT_EMBEDDINGS else HIDDEN_STATES}"
        )
    if is_sharded_tensor(weight):
        raise UserError(f"the {_describe(target)} are sharded over processes (FSDP); target={target} needs DDP")
    return weight


def _describe(target: str) -> str:
    return target.replace("_", " ")
