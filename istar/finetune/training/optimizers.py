"""The optimizer of a training, from the config group `optim`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from istar.errors import UserError
from istar.finetune.config.optim_config import AdamWConfig, OptimConfig, TorchOptimConfig
from istar.hidden_states.model_layers import find_head_model
from istar.hidden_states.sharding import is_sharded_tensor
from istar.models.model_files import get_embedding_weight


class JointOptimizer(Optimizer):
    """Optimizers of different parameters as one, because Lightning's automatic optimization has only one.

    They have their parameter groups and states in common with it. A schedule thus sets the learning rates of all.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._optimizers = optimizers
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for optimizer in self._optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state


def make_optimizer(model: nn.Module, optim: OptimConfig) -> Optimizer:
    """Return the optimizer of all trainable parameters of a model.

    Raises a `UserError` if `muon` or `coupled_adam` has nothing to train.
    """
    group = partial(make_parameter_groups, weight_decay=optim.weight_decay)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optim, TorchOptimConfig):
        optimizer: Optimizer = getattr(torch.optim, optim.name)(group(trained), lr=optim.lr, **optim.arguments)
        return optimizer
    assert isinstance(optim, AdamWConfig)
    options: dict[str, Any] = {"lr": optim.lr, "betas": (optim.betas[0], optim.betas[1]), "eps": optim.eps}
    if optim.name == "adamw":
        return AdamW(group(trained), **options, fused=True)
    weights = _list_layer_matrices(model) if optim.name == "muon" else _list_token_embeddings(model)
    ids = {id(weight) for weight in weights}
    chosen = [parameter for parameter in trained if id(parameter) in ids]
    if not chosen:
        raise UserError(f"optim={optim.name}: what it trains in other models is frozen in this one; use optim=adamw")
    adamw = AdamW(group([parameter for parameter in trained if id(parameter) not in ids]), **options, fused=True)
    if optim.name == "muon":
        return JointOptimizer(Muon(group(chosen), lr=optim.lr, adjust_lr_fn="match_rms_adamw"), adamw)
    return JointOptimizer(CoupledAdam(group(chosen), **options), adamw)


def make_parameter_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of parameters: weights with weight decay, and biases and gains without."""
    return [
        {"params": [weight for weight in parameters if weight.dim() > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in parameters if weight.dim() <= 1], "weight_decay": 0.0},
    ]


def _list_token_embeddings(model: nn.Module) -> list[Any]:
    head_model: Any = find_head_model(model)
    return [get_embedding_weight(head_model, "input"), get_embedding_weight(head_model, "output")]


def _list_layer_matrices(model: nn.Module) -> list[Any]:
    base_model: Any = find_head_model(model).base_model
    embeddings = [module.weight for module in base_model.modules() if isinstance(module, nn.Embedding)]
    excluded_ids = {id(weight) for weight in (*embeddings, *_list_token_embeddings(model))}
    return [weight for weight in base_model.parameters() if weight.dim() == 2 and id(weight) not in excluded_ids]


class CoupledAdam(Optimizer):
    r"""AdamW for embedding matrices, whose rows, one for each token, share one second moment.

    It is from *Better Embeddings with Coupled Adam* (Stollenwerk and Stollenwerk, ACL 2025, arXiv 2502.08441). Adam
    moves the embeddings of rare tokens about as far as those of frequent tokens, and away from the origin in one
    direction, which the paper takes for the cause of anisotropic embeddings.

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
