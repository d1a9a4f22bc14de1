"""What the integrations say of arguments of other types, before any training begins."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import istar
from istar.errors import UserError
from istar.integrations import lightning
from istar.integrations.sentence_transformers import PenaltyLoss
from istar.integrations.transformers import PenaltyTrainer

PENALTY = istar.CosReg()


def make_model() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=10, **sizes))


def make_transformers_trainer(penalty: Any, settings: Any) -> object:
    arguments = TrainingArguments("unused", use_cpu=True, report_to="none")
    return PenaltyTrainer(make_model(), arguments, penalty=penalty, settings=settings)


def make_sentence_loss(penalty: Any, settings: Any) -> object:
    return PenaltyLoss(nn.Sequential(nn.Identity()), nn.Identity(), penalty, "pooled", settings)  # type: ignore[arg-type]


MAKERS: list[Callable[[Any, Any], object]] = [
    make_transformers_trainer,
    lightning.PenaltyCallback,
    make_sentence_loss,
    lambda penalty, settings: istar.attach_with_settings(make_model(), penalty, settings),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("penalty", "settings", "message"),
    [
        (-1, istar.PenaltySettings(), r"^penalty is -1; expected a Penalty, such as istar\.IStar\(weight=-1\.0\)$"),
        (istar.IStar, istar.PenaltySettings(), r"^penalty is <class 'istar.*IStar'>; expected a Penalty"),
        (make_model(), istar.PenaltySettings(), r"^penalty is BertForSequenceClassification\(.*expected a Penalty"),
        (PENALTY, {"schedule": "linear"}, r"^settings is {'schedule': 'linear'}; expected a PenaltySettings"),
        (PENALTY, istar.Points("last"), r"^settings is Points\(which='last'.*; expected a PenaltySettings, such as "),
        (PENALTY, None, r"^settings is None; expected a PenaltySettings"),
    ],
)
def test_another_penalty_or_other_settings_are_refused_in_one_line(make, penalty, settings, message):
    with pytest.raises(UserError, match=message) as error:
        make(penalty, settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        ("bert", nn.Identity(), r"^model is 'bert'; expected a Sequential, such as SentenceTransformer\(name\)$"),
        (nn.Identity(), nn.Sequential(), r"^model is Identity\(\); expected a Sequential"),
        (nn.Sequential(), "mnr", r"^loss is 'mnr'; expected a Module, such as CoSENTLoss\(model\)$"),
    ],
)
@pytest.mark.parametrize("on", ["tokens", "pooled"])
def test_another_model_or_loss_is_refused_in_one_line(model, loss, message, on):
    with pytest.raises(UserError, match=message):
        PenaltyLoss(model, loss, PENALTY, on)
