"""What all penalties share: the options that `repr` shows, and the refusal of wrong ones."""

import copy
import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from istar import regularizers
from istar.errors import OptionError, UserError
from istar.regularizers import CosReg, IStar, Penalty, SetPoint, SimCtg, VicReg

PENALTIES = [
    penalty
    for penalty in vars(regularizers).values()
    if inspect.isclass(penalty) and issubclass(penalty, Penalty) and not inspect.isabstract(penalty)
]


@dataclass(eq=False, repr=False)
class Mine(CosReg):
    """A penalty of a user."""

    strength: float = 2.0


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        (IStar(), "IStar(weight=-1.0, zeta=0.4, layers='all')"),
        (IStar(0.5, "auto", layers=[1, 3]), "IStar(weight=0.5, zeta='auto', layers=[1, 3])"),
        (IStar(zeta=0, estimator="unbiased"), "IStar(weight=-1.0, zeta=0, layers='all', estimator='unbiased')"),
        (CosReg(), "CosReg(weight=1.0, layers='last')"),
        (CosReg(sync=False), "CosReg(weight=1.0, layers='last', sync=False)"),
        (SimCtg(), "SimCtg(weight=1.0, margin=0.5, layers='last')"),
        (VicReg(), "VicReg(weight=1.0, variance_weight=25.0, covariance_weight=1.0, gamma=1.0, layers='last')"),
        (Mine(), "Mine(weight=1.0, strength=2.0, layers='last')"),
    ],
)
def test_repr_shows_weight_zeta_and_layers_and_what_differs_from_the_defaults(penalty, expected):
    assert repr(penalty) == expected


@pytest.mark.parametrize("penalty", [*PENALTIES, Mine])
def test_repr_is_a_call_that_makes_the_same_penalty(penalty):
    made = penalty(weight=0.25, layers=[1])
    again = eval(repr(made), {penalty.__name__: penalty})
    names = [field for field, option in penalty.__dataclass_fields__.items() if option.init]
    assert {name: getattr(again, name) for name in names} == {name: getattr(made, name) for name in names}


@pytest.mark.parametrize("penalty", [*PENALTIES, Mine])
@pytest.mark.parametrize("name", ["lam", "lambda_", "zetta"])
def test_unknown_options_are_refused_with_those_that_exist(penalty, name):
    with pytest.raises(UserError) as error:
        penalty(**{name: -1})
    message = str(error.value)
    assert message.startswith(f"{penalty.__name__}: got an unexpected keyword argument '{name}'; ")
    assert "expected weight (lambda), " in message
    assert "layers" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IStar(zetta=0.4), r"^IStar: got .* 'zetta'; did you mean zeta\?; expected weight \(lambda\), "),
        (
            lambda: CosReg(zeta=0.4),
            r"^CosReg: got .* 'zeta'; expected weight \(lambda\), layers, inc",
        ),
        (lambda: CosReg(1.0, "all"), r"^CosReg: too many positional arguments; expected weight \(lambda\), layers, "),
        (
            lambda: SetPoint(0.3, sides="above"),
            r"^SetPoint: got .* 'sides'; did you mean side\?; expected score",
        ),
    ],
)
def test_the_nearest_option_is_suggested(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_penalty_with_its_own_arguments_takes_them():
    class Own(CosReg):
        def __init__(self, **options: Any) -> None:
            super().__init__(options["lam"])

    assert Own(lam=2.0).weight == 2.0


@pytest.mark.parametrize("weight", ["-1", None, nn.Linear(2, 2), float("nan"), [1.0]])
def test_a_weight_that_is_not_a_finite_number_is_refused(weight):
    penalty = CosReg()
    for set_weight in (lambda: CosReg(weight), lambda: setattr(penalty, "weight", weight)):
        with pytest.raises(OptionError, match=r"^lambda=.*; expected a finite number") as error:
            set_weight()
        assert "\n" not in str(error.value)
    assert penalty.weight == 1.0


@pytest.mark.parametrize("weight", [2, 0.5, np.float32(0.5), torch.tensor(0.5)])
def test_numbers_of_other_libraries_are_weights(weight):
    assert CosReg(weight).factor == weight


@pytest.mark.parametrize("penalty", PENALTIES)
def test_copies_and_pickles_keep_the_options(penalty):
    made = penalty(weight=0.25, layers=[1])
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert repr(copied) == repr(made)
