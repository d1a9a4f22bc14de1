"""The settings of the optimizers."""

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from istar.errors import UserError, check_one_of, check_range, did_you_mean, shorten


@dataclass
class OptimConfig:
    """What all optimizers have: a learning rate with its schedule, and weight decay."""

    name: str = MISSING
    """Name of the optimizer, a key of `OPTIMIZERS`, or with optim=torch the name of a class of torch.optim."""
    lr: float = 3e-5
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Weight decay of all parameters except biases and the parameters of normalization layers."""
    schedule: str = "constant"
    """Learning rate after the warmup: constant, linear (decays to 0) or cosine (decays to 0)."""
    warmup: float = 0.0
    """Optimizer steps over which the learning rate rises linearly from 0: a fraction of all steps, in [0, 1], or a
    whole number of steps above 1."""

    def __post_init__(self) -> None:
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise UserError(f"optim.lr={self.lr:g} is not a positive number; the paper uses 1e-5, 3e-5 and 5e-5")
        check_one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        is_number_of_steps = self.warmup > 1 and float(self.warmup).is_integer()
        if not 0 <= self.warmup <= 1 and not is_number_of_steps:
            raise UserError(
                f"optim.warmup={self.warmup:g} is neither a fraction of the optimizer steps, in [0, 1], nor a whole "
                "number of steps above 1"
            )
        check_range("optim.weight_decay", self.weight_decay, 0)


@dataclass
class AdamWConfig(OptimConfig):
    """AdamW alone, or together with `coupled_adam` or `muon`, which train only some of the parameters."""

    name: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's running averages of the gradient and of its square."""
    eps: float = 1e-8
    """Constant added to AdamW's denominator for numerical stability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_pair = isinstance(self.betas, list) and len(self.betas) == 2
        if not is_pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas={self.betas} is not a pair of numbers in [0, 1), e.g. [0.9,0.999]")
        check_range("optim.eps", self.eps, 0, is_exclusive=True)


@dataclass
class TorchOptimConfig(OptimConfig):
    """Any optimizer of `torch.optim` that can train all parameters of a model; conf/optim/ has some by name."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer by name, for example optim.arguments.momentum=0.9."""

    def __post_init__(self) -> None:
        super().__post_init__()
        import torch  # takes seconds, and `check_keys` does without

        unsuitable = ("LBFGS", "Muon", "Optimizer", "SparseAdam")
        classes: dict[str, Any] = {
            name: member for name, member in vars(torch.optim).items() if inspect.isclass(member)
        }
        check_one_of("optim.name", self.name, sorted(classes.keys() - unsuitable))
        known = inspect.signature(classes[self.name]).parameters
        if self.weight_decay != 0 and "weight_decay" not in known:
            raise UserError(f"optim.name={self.name} has no weight decay; add optim.weight_decay=0")
        further = [name for name in known if name not in ("params", "lr", "weight_decay")]
        if not isinstance(self.arguments, dict):
            raise UserError(f"optim.arguments={self.arguments} is not a mapping, e.g. {{momentum: 0.9}}")
        for name, value in self.arguments.items():
            if name not in further:
                raise UserError(
                    f"optim.arguments.{name}: {self.name} has no such further argument{did_you_mean(name, further)}; "
                    f"expected one of {', '.join(further)}"
                )
            if isinstance(known[name].default, bool) and not isinstance(value, bool):
                raise UserError(f"optim.arguments.{name}={value}; expected true or false")
        # Values are tried in a step, because torch does not check all before. `capturable` is for GPUs only.
        arguments = {name: value for name, value in self.arguments.items() if name != "capturable"}
        weight = torch.ones(2, 2, requires_grad=True)
        weight.grad = torch.ones(2, 2)
        try:
            classes[self.name]([weight], lr=self.lr, **arguments).step()
        except Exception as error:
            raise UserError(
                f"optim.arguments={self.arguments}: {self.name} refuses them: {shorten(error)}; the documentation of "
                f"torch.optim.{self.name} has the allowed values"
            ) from error


OPTIMIZERS: dict[str, Any] = {
    **dict.fromkeys(("adamw", "coupled_adam", "muon"), AdamWConfig),
    "torch": TorchOptimConfig,
}
"""The dataclass of each option of `optim`; conf/optim/ has further ones, which are values of `torch`."""
