"""The options of the group `reg` and the penalties that are built from them."""

from dataclasses import asdict, fields
from typing import Any

import pytest
import transformers as hf
from torch import nn

from istar.errors import UserError
from istar.finetune.config.penalties import PENALTIES, NoRegConfig
from istar.finetune.config.reg_config import PenaltyConfig
from istar.hidden_states import EmbeddingPenalty, HiddenStatePenalty, PenaltySettings
from istar.regularizers import Points, SetPoint

COMMON = {"weight": 2.0, "layers": [1], "include_padding": True, "sync": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "cosreg": {},
    "istar": {"zeta": 0.3, "compute": "bf16"},
    "vicreg": {"variance_weight": 2.0, "covariance_weight": 3.0, "gamma": 0.5},
    "decorrelation": {},
    "gor": {},
    "uniformity": {"temperature": 3.0},
    "kurtosis": {},
    "simctg": {"margin": 0.3},
    "sigreg": {"directions": 5, "seed": 3},
    "spectrum": {"decay": "exponential", "rate": 2.0},
    "random_direction": {"zeta": 0.3, "compute": "bf16", "seed": 5},
}
"""By penalty: its options beyond those of all penalties."""


def make_tiny_model() -> hf.PreTrainedModel:
    """Return a tiny GPT-2 with random weights."""
    config = hf.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, bos_token_id=1, eos_token_id=1)
    return hf.GPT2LMHeadModel(config)


def penalty_config(name: str, **options: Any) -> Any:
    """Return the config of a penalty; other options of `reg` are no penalties."""
    kind = PENALTIES[name]
    assert issubclass(kind, PenaltyConfig)
    return kind(**options)


def attach(config: Any, special_ids: tuple[int, ...] = (1, 2), seed: int = 3, precision: str = "32-true") -> Any:
    return config.attach(make_tiny_model(), special_ids, seed, precision)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_defaults_of_the_penalty_and_reach_it(name: str) -> None:
    options = {**COMMON, **OPTIONS[name]}
    default, changed = penalty_config(name).make(), penalty_config(name, **options).make()
    kind = type(changed)
    assert repr(default) == repr(kind())
    assert {option.name for option in fields(kind) if option.init} == {*options, "group", "set_point"} | (
        {"estimator"} if "zeta" in options else set()
    )
    for key, value in options.items():
        assert getattr(default, key) != value
        assert getattr(changed, key) == value
    target = {"uniformity": -0.5, "kurtosis": 2.5}.get(name, 0.5)
    assert penalty_config(name, target_score=target).make().set_point == SetPoint(target)
    assert penalty_config(name, target_score=None).make().set_point is None


def test_settings_have_the_defaults_of_the_trainer_and_reach_it() -> None:
    assert attach(penalty_config("istar")).settings == PenaltySettings(Points(special_ids=(1, 2)), seed=3)
    options = {"num_points": 70, "refresh_every_n_steps": 3, "schedule": "linear", "warmup": 0.5, "sample": 0.5}
    attached = attach(penalty_config("istar", points="content", max_norm_ratio=4.0, **options))
    assert isinstance(attached, HiddenStatePenalty)
    settings = asdict(attached.settings)
    assert {key: settings[key] for key in options} == options
    assert attached.settings.points == Points("content", 4.0, (1, 2))
    assert attach(NoRegConfig()) is None


def test_the_target_its_rows_and_the_seed_reach_the_attached_penalty() -> None:
    penalties = [
        attach(penalty_config("cosreg", target="output_embeddings", rows=rows), seed=seed)
        for rows, seed in ((5, 3), (5, 4), (None, 3))
    ]
    assert len({attached.loss().item() for attached in penalties}) == 3
    assert [attached.penalty.last.points.item() for attached in penalties] == [5, 5, 20]
    # The rows of a matrix need no shrinkage covariance.
    assert isinstance(attach(penalty_config("istar", target="input_embeddings", zeta=0.8)), EmbeddingPenalty)


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        ("32-true", {}, "float32"),
        ("16-mixed", {}, "float32"),
        ("bf16-mixed", {}, "bf16"),
        ("bf16-mixed", {"compute": "float32"}, "float32"),
        ("32-true", {"compute": "bf16"}, "bf16"),
        ("bf16-mixed", {"zeta": "auto"}, "float32"),
        ("bf16-mixed", {"estimator": "unbiased"}, "float32"),
    ],
)
def test_products_follow_the_trainers_precision(precision: str, options: dict[str, Any], expected: str) -> None:
    assert attach(penalty_config("istar", **options), precision=precision).penalty.compute == expected


def test_the_placebos_without_a_penalty() -> None:
    decay, dropout = PENALTIES["weight_decay"](weight=0.3), PENALTIES["dropout"](weight=0.4)  # type: ignore[call-arg]
    assert (decay.weight_decay(0.01), dropout.weight_decay(0.01)) == (0.3, 0.01)
    model = make_tiny_model()
    probabilities = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert decay.attach(model, (), 0, "32-true") is None
    assert probabilities == [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    dropout.attach(model, (), 0, "32-true")
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.4}
    with pytest.raises(UserError, match="reg=dropout: Linear has no dropout modules"):
        dropout.attach(nn.Linear(2, 2), (), 0, "32-true")


@pytest.mark.parametrize("name", ["cosreg", "istar"])
def test_a_target_score_has_a_side_and_no_sign_of_lambda(name: str) -> None:
    penalty = penalty_config(name, weight=-2.0, target_score=0.2, side="above").make()
    assert (penalty.set_point, penalty.weight) == (SetPoint(0.2, "above"), 2)
    kept = penalty_config(name, weight=-2.0, target_score="keep", target_batches=3).make()
    assert (kept.set_point, kept.weight) == (SetPoint("keep", batches=3), 2)
    assert penalty_config(name, weight=-2.0).make().weight == -2


def test_the_kurtosis_has_the_paper_s_target() -> None:
    assert penalty_config("kurtosis").make().set_point == SetPoint(1.8)


def test_the_layers_of_the_penalty_must_exist() -> None:
    penalty_config("istar", layers=[0, 2]).check_layers(2)
    with pytest.raises(UserError, match=r"layer"):
        penalty_config("istar", layers=[3]).check_layers(2)


def test_content_needs_a_tokenizer_with_special_tokens() -> None:
    with pytest.raises(UserError, match=r"reg\.points=content leaves out special tokens, but the tokenizer has none"):
        attach(penalty_config("cosreg", points="content"), special_ids=())
