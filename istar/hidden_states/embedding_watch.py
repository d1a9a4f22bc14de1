r"""Penalties on the rows of an embedding matrix, instead of hidden states.

*Representation Degeneration Problem in Training Natural Language Generation Models* (Gao et al., ICLR 2019) adds the
average cosine of the output embeddings to the loss of a language model, because they degenerate into a narrow cone. The
cost is O(V d) for V rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from istar.errors import UserError
from istar.hidden_states.attach import Watch, attach, warn_if_no_gradient
from istar.hidden_states.model_layers import find_head_model
from istar.regularizers.base import Penalty
from istar.regularizers.istar import IStar
from istar.regularizers.points import ALL_POINTS, Points, Tokens

HIDDEN_STATES, INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS = "hidden_states", "input_embeddings", "output_embeddings"
TARGETS = (HIDDEN_STATES, INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS)


def attach_to_target(
    model: nn.Module,
    penalty: Penalty,
    target: str = HIDDEN_STATES,
    points: Points = ALL_POINTS,
    rows: int | None = None,
    seed: int = 0,
    modules: Sequence[nn.Module] | None = None,
) -> "Watch | EmbeddingWatch":
    """Attach a penalty to what `target` names: the hidden states, by `attach`, or an embedding matrix.

    Args:
        model: as in `attach` and `EmbeddingWatch`.
        penalty: as in `attach` and `EmbeddingWatch`.
        target: `hidden_states`, `input_embeddings` or `output_embeddings`.
        points: as in `attach`; for hidden states only.
        rows: as in `EmbeddingWatch`; for embedding matrices only.
        seed: as in `EmbeddingWatch`; for embedding matrices only.
        modules: as in `attach`; for hidden states only.

    Raises:
        UserError: for an unknown target, and as `attach` and `EmbeddingWatch`.
    """
    if target == HIDDEN_STATES:
        if rows is not None:
            raise UserError(
                f"rows={rows} needs target={INPUT_EMBEDDINGS} or {OUTPUT_EMBEDDINGS}; hidden states have none"
            )
        return attach(model, penalty, modules, points)
    if not points.are_all:
        raise UserError(f"points are tokens, but target={target} has rows; expected points='all' without a ratio")
    return EmbeddingWatch(model, penalty, target, rows, seed)


class EmbeddingWatch:
    """A penalty on the rows of a model's embedding matrix, with the interface of `Watch`.

    `loss()` needs no forward pass; the training loop adds it to its loss once per micro-batch. Its gradient reaches the
    matrix directly. With tied embeddings, the two targets are one matrix.

    In distributed training, all processes have the same matrix and, if rows are sampled, the same rows. Each process
    therefore computes the whole penalty without communication, and DDP's average of the gradients over the processes is
    the gradient of the penalty. For this, `penalty.sync` is set to False.

    >>> import istar, transformers
    >>> config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> batch = {"input_ids": torch.arange(40).view(4, 10), "labels": torch.arange(40).view(4, 10)}
    >>> watch = EmbeddingWatch(model, istar.CosReg(weight=1.0), "output_embeddings")
    >>> loss = model(**batch).loss + watch.loss()
    >>> loss.backward()
    >>> watch.penalty.last.points.item()
    50.0

    Args:
        model: a transformers model, bare, with a head, or inside of PEFT, DDP or another module.
        penalty: `CosReg`, or `IStar` with zeta 0. Its `layers` have no meaning here.
        target: `input_embeddings` or `output_embeddings`.
        rows: number of rows that are sampled anew for each loss, without replacement; None uses all rows.
        seed: seed of the samples, equal on all processes.

    Attributes:
        penalty: the penalty; its attribute `last` holds the terms of the latest `loss()`.
        target: the target.

    Raises:
        UserError: for another target, a model without this matrix or with a sharded one, more rows than there are or
            fewer than 2, and an `IStar` with Sigma_S.
    """

    def __init__(
        self,
        model: nn.Module,
        penalty: Penalty,
        target: str = OUTPUT_EMBEDDINGS,
        rows: int | None = None,
        seed: int = 0,
    ) -> None:
        if target not in (INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS):
            raise UserError(
                f"target={target} is not an embedding matrix; expected {INPUT_EMBEDDINGS} or {OUTPUT_EMBEDDINGS}"
            )
        if isinstance(penalty, IStar) and penalty.needs_shrinkage_covariance:
            raise UserError(
                f"zeta is {penalty.zeta}; target={target} has no shrinkage covariance, since all rows are at hand: "
                "expected zeta=0"
            )
        self.penalty = penalty
        self.target = target
        self._head_model = find_head_model(model)
        num_rows = len(self.matrix)
        if rows is not None and not 2 <= rows <= num_rows:
            raise UserError(f"rows={rows}; expected 2 to {num_rows}, the number of rows of the {_describe(target)}")
        penalty.sync = False
        self._num_sampled_rows = rows
        self._generator = torch.Generator().manual_seed(seed)
        self._has_warned = False

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
            0-d tensor on the matrix' device, see `Penalty.forward`. It is 0 if the weight is 0; the sample of rows is
            drawn then, too, so that it does not depend on the weights of earlier steps.
        """
        matrix = self.matrix
        row_indices = None if self._num_sampled_rows is None else self._sample_rows(len(matrix)).to(matrix.device)
        if self.penalty.weight == 0:
            return torch.zeros((), device=matrix.device)
        points = matrix if row_indices is None else matrix.index_select(0, row_indices)
        loss = self.penalty.combine([self.penalty.summarize(points, Tokens())])
        reason = f"the {_describe(self.target)} are frozen"
        self._has_warned = self._has_warned or warn_if_no_gradient(loss, reason, stacklevel=2)
        return loss

    def refresh(self, loader: Iterable[Any], num_points: int | None = None, momentum: float = 0.0) -> int:
        """Do nothing and return 0, unlike `Watch.refresh`: an embedding matrix has no Sigma_S."""
        return 0

    def remove(self) -> None:
        """Do nothing: there are no hooks."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the generator that samples rows, to resume exactly; empty if all rows are used."""
        return {} if self._num_sampled_rows is None else {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        if "generator" in state:
            self._generator.set_state(state["generator"].cpu())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _sample_rows(self, num_rows: int) -> Tensor:
        """Return the indices of a random sample of the rows, without replacement."""
        return torch.randperm(num_rows, generator=self._generator)[: self._num_sampled_rows]


def _find_matrix(model: Any, target: str) -> Tensor:
    """Return the embedding matrix `target` that a transformers model has now.

    Raises:
        UserError: if the model has no such matrix, or a sharded one.
    """
    module = getattr(model, "get_input_embeddings" if target == INPUT_EMBEDDINGS else "get_output_embeddings")()
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise UserError(
            f"{type(model).__name__} has no {_describe(target)}, so that target={target} does not fit it; expected "
            f"a language model, or target={INPUT_EMBEDDINGS if target == OUTPUT_EMBEDDINGS else HIDDEN_STATES}"
        )
    if isinstance(weight, DTensor):
        raise UserError(f"the {_describe(target)} are sharded over processes (FSDP); target={target} needs DDP")
    return weight


def _describe(target: str) -> str:
    """Return the words for a target in messages, such as "output embeddings"."""
    return target.replace("_", " ")
