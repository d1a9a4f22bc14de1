r"""A placebo for I-STAR: the gradient of its penalty, turned into a random direction.

If training with I-STAR changes a result, the cause may be the isotropy, or any force of that size on the hidden states.
This penalty separates the two. Let :math:`g_i` be the gradient of the I-STAR penalty with respect to the point
:math:`x_i`. The point gets the gradient :math:`Q g_i` instead, where Q is one random rotation `(d, d)`, drawn from the
uniform (Haar) distribution with a seed and fixed for the whole training.

Norms of the points' gradients, and inner products of the gradients of different points and steps, are as with I-STAR
at the same hidden states: the force is as large, as low in rank and as persistent, but unrelated to the directions of
the hidden states. Its expected cosine with the gradient of I-STAR is 0, with a standard deviation of about
:math:`1 / \sqrt d` or less. The gradients of the parameters need not have the same norm. This definition is not from a
paper.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.measures.numerics import full_precision
from istar.regularizers.istar import IStar
from istar.regularizers.points import Tokens


@dataclass(eq=False, repr=False)
class RandomDirection(IStar):
    """A placebo: I-STAR with the gradient of each point rotated at random, with the same norm.

    The value, the score, Sigma_S and the options are as in `IStar`. Only the gradient differs, so that it is not the
    gradient of the value.
    """

    _: KW_ONLY
    seed: int = 0
    """Seed of the rotation, equal on all processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rotation: Tensor | None = None
        self.is_traceable = False  # the rotation is made in the first pass

    def summarize(self, hidden_states: Sequence[Tensor], tokens: Tokens) -> list[Any]:
        """Summarize hidden states as `IStar` does, with a rotation of their gradients in the backward pass."""
        rotated = [_RotateGradient.apply(state, self._rotation_for(state)) for state in hidden_states]
        return super().summarize(rotated, tokens)

    def _rotation_for(self, hidden_state: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_state.dtype, torch.float32)
        d, rotation = hidden_state.shape[-1], self._rotation
        if rotation is None or (len(rotation), rotation.dtype, rotation.device) != (d, dtype, hidden_state.device):
            # The rotation is kept between steps, because computing it takes O(d^3) time.
            with torch.inference_mode(False):  # Training would refuse a tensor of inference mode.
                self._rotation = rotation = random_rotation(d, self.seed).to(hidden_state.device, dtype)
        return rotation


def random_rotation(d: int, seed: int) -> Tensor:
    """Return a random orthogonal matrix `(d, d)` from the uniform (Haar) distribution, float64, on the CPU.

    It is the Q of a QR decomposition of a Gaussian matrix, with the signs that make the diagonal of R positive.
    """
    gaussian = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(gaussian)
    rotation: Tensor = q * r.diagonal().sign()
    return rotation


class _RotateGradient(torch.autograd.Function):
    """The identity; its backward pass multiplies the gradient of each point `(..., d)` by a matrix `(d, d)`."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        return points.view_as(points)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rotation,) = ctx.saved_tensors
        with full_precision(gradient.device):
            return (gradient.to(rotation.dtype) @ rotation.T).to(gradient.dtype), None


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the probability of all dropout modules of a model, including its attention and its head.

    Raises:
        UserError: for a model without dropout modules, such as Llama.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    if not modules:
        raise UserError(f"reg=dropout: {type(model).__name__} has no dropout modules; choose another penalty")
    for module in modules:
        module.p = probability
