r"""Coupled Adam, from *Better Embeddings with Coupled Adam* (Stollenwerk and Stollenwerk, ACL 2025, arXiv 2502.08441).

Adam divides the update of each token's embedding by the root of its own second moment. The embeddings of rare tokens
thereby move about as far as those of frequent tokens, and away from the origin in one direction. The paper takes this
for the cause of anisotropic embeddings, and gives all tokens a common second moment.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from istar.hidden_states.sharding import is_sharded_tensor


class CoupledAdam(Optimizer):
    r"""AdamW for embedding matrices, whose rows, one for each token, share one second moment.

    With learning rate :math:`\eta`, weight decay :math:`\lambda` and the gradient :math:`g_i` of row i of V, step t is

    .. math::

        m_i &\leftarrow \beta_1 m_i + (1 - \beta_1) g_i \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) \frac{1}{V} \sum_{j=1}^V g_j^2 \\
        w_i &\leftarrow (1 - \eta \lambda) w_i
            - \eta \frac{m_i / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \varepsilon}

    The mean over the tokens is taken before the running average, which is linear, so that the result is the paper's
    mean of the second moments of AdamW, and only one row of it is stored.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all matrices that have a gradient, and return the loss that `closure` returns, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    mean_square = gradient.square().mean(dim=0, keepdim=True)
    if is_sharded_tensor(mean_square):
        from torch.distributed.tensor import Replicate

        mean_square = mean_square.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(mean_square)
    beta1, beta2 = group["betas"]
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].lerp_(mean_square, 1 - beta2)
    step = state["step"].item()
    denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))
