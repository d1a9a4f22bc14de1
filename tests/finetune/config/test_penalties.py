"""The options of the group `reg` and the penalties that are built from them."""

from typing import Any

import pytest
import transformers as hf
from torch import nn

from istar.errors import UserError
from istar.finetune.config.penalties import PENALTIES, NoRegConfig, PenaltyConfig
from istar.hidden_states import EmbeddingPenalty, HiddenStatePenalty
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


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_its_penalty(name: str) -> None:
    kind, options = PENALTIES[name], {**COMMON, **OPTIONS[name]}
    assert issubclass(kind, PenaltyConfig)
    default, changed = kind().build(), kind(**options).build()
    assert type(changed) is kind.penalty_class
    for key, value in options.items():
        assert getattr(default, key) != value
        assert getattr(changed, key) == value
    target = {"uniformity": -0.5, "kurtosis": 2.5}.get(name, 0.5)
    assert kind(target_score=target).build().set_point == SetPoint(target)


def test_every_setting_reaches_the_attached_penalty() -> None:
    config = PENALTIES["istar"](
        points="content", max_norm_ratio=4.0, num_points=70, refresh_every_n_steps=3, schedule="linear", warmup=0.5
    )
    attached = config.attach(make_tiny_model(), (1, 2), seed=3)
    assert isinstance(attached, HiddenStatePenalty)
    settings = attached.settings
    assert (settings.points, settings.num_points, settings.seed) == (Points("content", 4.0, (1, 2)), 70, 3)
    assert settings.refresh_every_n_steps == 3
    assert [settings.weight_at(step, 4, -2.0) for step in range(5)] == [0, -1, -2, -1, 0]
    assert PENALTIES["cosreg"]().attach(make_tiny_model(), (1, 2), seed=3).settings.points.are_all
    assert NoRegConfig().attach(make_tiny_model(), (), 0) is None


def test_the_target_its_rows_and_the_seed_reach_the_attached_penalty() -> None:
    penalties = [
        PENALTIES["cosreg"](target="output_embeddings", rows=rows).attach(make_tiny_model(), (), seed=seed)
        for rows, seed in ((5, 3), (5, 4), (None, 3))
    ]
    assert all(isinstance(attached, EmbeddingPenalty) for attached in penalties)
    assert len({attached.loss().item() for attached in penalties}) == 3
    assert [attached.penalty.last.points.item() for attached in penalties] == [5, 5, 20]
    config = PENALTIES["istar"](target="input_embeddings", zeta=0.8)
    assert config.zeta == 0
    assert isinstance(config.attach(make_tiny_model(), (), 0), EmbeddingPenalty)


def test_the_placebos_without_a_penalty() -> None:
    decay, dropout = PENALTIES["weight_decay"](weight=0.3), PENALTIES["dropout"](weight=0.4)
    assert (decay.weight_decay(0.01), dropout.weight_decay(0.01)) == (0.3, 0.01)
    model = make_tiny_model()
    probabilities = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert decay.attach(model, (), 0) is None
    assert probabilities == [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    dropout.attach(model, (), 0)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.4}
    with pytest.raises(UserError, match="reg=dropout: Linear has no dropout modules"):
        dropout.attach(nn.Linear(2, 2), (), 0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("weight_decay", {"weight": 0.0}, r"reg\.lambda=0; expected a finite number above 0"),
        ("dropout", {"weight": 1.0}, r"reg\.lambda=1; with reg=dropout, expected a probability between 0 and 1"),
        ("dropout", {"weight": 0.0}, r"reg\.lambda=0; with reg=dropout, expected"),
        ("vicreg", {"variance_weight": -1.0}, r"reg\.variance_weight=-1; expected a finite number of at least 0"),
        ("vicreg", {"covariance_weight": float("nan")}, r"reg\.covariance_weight=nan; expected"),
        ("uniformity", {"temperature": 0.0}, r"reg\.temperature=0; expected a finite number above 0"),
        ("uniformity", {"target_score": 0.5}, r"reg\.target_score=0\.5; expected a number above -inf and below 0"),
        ("kurtosis", {"target_score": 0.5}, r"reg\.target_score=0\.5; expected a number above 1"),
        ("sigreg", {"directions": 0}, r"reg\.directions=0 is too small"),
        ("spectrum", {"decay": "linear"}, r"reg\.decay=linear is not known"),
        ("spectrum", {"rate": -1.0}, r"reg\.rate=-1; expected a finite number of at least 0"),
        ("simctg", {"margin": 2.0}, r"reg\.margin=2; expected a number from -1 to 1"),
        ("simctg", {"points": "first"}, r"reg\.points=first leaves no pairs"),
        ("simctg", {"points": "last"}, r"reg\.points=last leaves no pairs"),
        ("simctg", {"target": "input_embeddings"}, r"reg\.target=input_embeddings has no sequences"),
        ("vicreg", {"gamma": 0.0}, r"reg\.gamma=0; expected a finite number above 0"),
    ],
)
def test_settings_of_a_peer_that_do_not_fit_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PENALTIES[name](**settings)


def test_the_kurtosis_has_the_paper_s_target() -> None:
    assert PENALTIES["kurtosis"]().build().set_point == SetPoint(1.8)
    assert PENALTIES["kurtosis"](target_score=None).build().set_point is None


@pytest.mark.parametrize("name", ["cosreg", "istar"])
def test_the_set_point_reaches_the_penalty(name: str) -> None:
    kind = PENALTIES[name]
    config = kind(weight=-2.0, target_score=0.2, side="above")
    assert config.build().set_point == SetPoint(0.2, "above")
    assert config.weight == 2  # the sign has no meaning, so that both signs are one run
    assert kind(target_score="keep", target_batches=3).build().set_point == SetPoint("keep", batches=3)
    assert kind(target_score="0.2").build().set_point == SetPoint(0.2)
    assert kind(weight=-2.0).weight == -2
    assert kind().build().set_point is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_score": 1.5}, r"reg\.target_score=1\.5; expected a number above 0 and below 1, or keep"),
        ({"target_score": "held"}, r"reg\.target_score=held is neither a number nor keep"),
        ({"target_score": 0.1, "side": "left"}, r"reg\.side=left is not known"),
        ({"side": "above"}, r"reg\.side=above has no effect without reg\.target_score"),
        ({"target_batches": 3, "target_score": 0.2}, r"reg\.target_batches=3 has no effect without"),
        ({"target_batches": 0, "target_score": "keep"}, r"reg\.target_batches=0 is too small"),
        ({"target_score": "keep", "schedule": "warmup", "warmup": 0.1}, r"reg\.target_score=keep takes the score"),
        ({"points": "contents"}, r"reg\.points=contents is not known; did you mean content"),
        ({"target": "embeddings"}, r"reg\.target=embeddings is not known"),
        ({"schedule": "exponential"}, r"reg\.schedule=exponential is not known"),
        ({"schedule": "linear", "warmup": 2.0}, r"reg\.warmup=2 is outside \[0, 1\]"),
        ({"warmup": 0.1}, r"reg\.warmup=0\.1 has no effect with schedule=constant"),
        ({"schedule": "warmup"}, r"reg\.schedule=warmup needs a warmup above 0"),
        ({"rows": 1, "target": "input_embeddings"}, r"reg\.rows=1 is too small"),
        ({"rows": 10}, r"reg\.rows=10 needs target=input_embeddings or output_embeddings"),
        ({"max_norm_ratio": 1.0}, r"reg\.max_norm_ratio=1 "),
        ({"points": "last", "target": "input_embeddings"}, r"reg\.target=input_embeddings has rows"),
        ({"refresh_every_n_steps": 0}, r"reg\.refresh_every_n_steps=0 is too small"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        PENALTIES["istar"](**settings)
    assert "\n" not in str(error.value)


def test_content_needs_a_tokenizer_with_special_tokens() -> None:
    with pytest.raises(UserError, match=r"reg\.points=content leaves out special tokens, but the tokenizer has none"):
        PENALTIES["cosreg"](points="content").attach(make_tiny_model(), (), seed=0)
