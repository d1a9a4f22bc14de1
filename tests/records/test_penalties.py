"""The options of the group `reg` and the penalties that are built from them."""

from typing import Any

import pytest
import transformers as hf
from torch import nn

from istar.errors import UserError
from istar.hidden_states import EmbeddingWatch, Watch
from istar.records.config.penalties import (
    PENALTIES,
    CosRegConfig,
    DropoutConfig,
    IStarConfig,
    KurtosisConfig,
    NoRegConfig,
    WeightDecayConfig,
)
from istar.regularizers import Points, SetPoint

COSREG = {"weight": -2.0, "layers": [1], "include_padding": True, "sync": False}
ISTAR = {**COSREG, "zeta": 0.3, "compute": "bfloat16"}


@pytest.mark.parametrize(("kind", "settings"), [(CosRegConfig, COSREG), (IStarConfig, ISTAR)])
def test_every_setting_reaches_the_penalty(kind: type[CosRegConfig], settings: dict[str, Any]) -> None:
    default, changed = kind().build(), kind(**settings).build()
    for name, value in settings.items():
        assert getattr(default, name) != value
        assert getattr(changed, name) == value


def test_the_estimator_reaches_the_penalty() -> None:
    for name in ("shrinkage", "unbiased", "unbiased_by_sentence"):
        assert IStarConfig(estimator=name).build().estimator == name


def make_tiny_model() -> hf.PreTrainedModel:
    """Return a tiny GPT-2 with random weights."""
    config = hf.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, bos_token_id=1, eos_token_id=1)
    return hf.GPT2LMHeadModel(config)


def test_every_choice_of_points_reaches_the_watch() -> None:
    watch = CosRegConfig(points="content", max_norm_ratio=4.0).attach(make_tiny_model(), (1, 2), seed=3)
    assert isinstance(watch, Watch)
    assert watch.points == Points("content", 4.0, (1, 2))
    assert isinstance(watch := CosRegConfig().attach(make_tiny_model(), (1, 2), seed=3), Watch)
    assert watch.points.are_all


def test_the_target_its_rows_and_the_seed_reach_the_watch() -> None:
    watches = [
        CosRegConfig(target="output_embeddings", rows=rows).attach(make_tiny_model(), (), seed=seed)
        for rows, seed in ((5, 3), (5, 4), (None, 3))
    ]
    assert all(isinstance(watch, EmbeddingWatch) and watch.target == "output_embeddings" for watch in watches)
    losses = [watch.loss().item() for watch in watches]
    assert len(set(losses)) == 3
    points = [watch.penalty.last.points.item() for watch in watches if watch.penalty.last is not None]
    assert points == [5, 5, 20]


def test_zeta_is_0_for_embeddings() -> None:
    assert IStarConfig(target="input_embeddings").zeta == 0
    assert isinstance(IStarConfig(target="input_embeddings", zeta=0.8).attach(make_tiny_model(), (), 0), EmbeddingWatch)


def test_the_schedule_has_every_setting() -> None:
    schedule = CosRegConfig(weight=-2.0, schedule="linear", warmup=0.5).weight_schedule()
    assert schedule is not None
    assert [schedule(step, 4) for step in range(5)] == [0, -1, -2, -1, 0]
    assert CosRegConfig().weight_schedule() is None
    assert NoRegConfig().weight_schedule() is None
    assert NoRegConfig().attach(make_tiny_model(), (), 0) is None


SPECIFIC_SETTINGS: dict[str, dict[str, Any]] = {
    "vicreg": {"variance_weight": 2.0, "covariance_weight": 3.0, "gamma": 0.5},
    "decorrelation": {},
    "gor": {},
    "uniformity": {"temperature": 3.0},
    "kurtosis": {},
    "simctg": {"margin": 0.3},
    "sigreg": {"directions": 5, "seed": 3},
    "spectrum": {"decay": "exponential", "rate": 2.0},
    "random_direction": {"zeta": 0.3, "compute": "bfloat16", "seed": 5},
}
"""By penalty: its settings beyond those of COSREG."""


@pytest.mark.parametrize("name", SPECIFIC_SETTINGS)
def test_every_setting_reaches_its_penalty(name: str) -> None:
    kind = PENALTIES[name]
    assert issubclass(kind, CosRegConfig)
    settings = {**COSREG, "weight": 2.0, **SPECIFIC_SETTINGS[name]}
    default, changed = kind().build(), kind(**settings).build()
    assert type(changed) is kind.kind
    for key, value in settings.items():
        assert getattr(default, key) != value
        assert getattr(changed, key) == value
    target = {"uniformity": -0.5, "kurtosis": 2.5}.get(name, 0.5)
    assert kind(target_score=target).build().set_point == SetPoint(target)
    assert isinstance(kind().attach(make_tiny_model(), (), seed=0), Watch)


def test_the_placebos_without_a_penalty() -> None:
    decay, dropout = WeightDecayConfig(weight=0.3), DropoutConfig(weight=0.4)
    assert (decay.weight_decay(0.01), dropout.weight_decay(0.01)) == (0.3, 0.01)
    model = make_tiny_model()
    probabilities = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert (decay.attach(model, (), 0), decay.build(), dropout.build()) == (None, None, None)
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
        ("uniformity", {"target_score": 0.5}, r"reg\.target_score is 0\.5; expected a number above -inf and below 0"),
        ("kurtosis", {"target_score": 0.5}, r"reg\.target_score is 0\.5; expected a number above 1"),
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
    assert KurtosisConfig().build().set_point == SetPoint(1.8)
    assert KurtosisConfig(target_score=None).build().set_point is None


@pytest.mark.parametrize("kind", [CosRegConfig, IStarConfig])
def test_the_set_point_reaches_the_penalty(kind: type[CosRegConfig]) -> None:
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
        ({"target_score": 1.5}, r"reg\.target_score is 1\.5; expected a number above 0 and below 1, or keep"),
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
        ({"warmup": 0.1}, r"reg\.warmup=0\.1 has no effect with reg\.schedule=constant"),
        ({"schedule": "warmup"}, r"reg\.schedule=warmup needs reg\.warmup above 0"),
        ({"rows": 1, "target": "input_embeddings"}, r"reg\.rows=1 is too small"),
        ({"rows": 10}, r"reg\.rows=10 needs reg\.target=input_embeddings or output_embeddings"),
        ({"max_norm_ratio": 1.0}, r"reg\.max_norm_ratio=1 "),
        ({"include_padding": True, "points": "last"}, r"reg\.include_padding=true counts all tokens"),
        ({"points": "last", "target": "input_embeddings"}, r"reg\.target=input_embeddings has rows: leave"),
        ({"refresh_every_n_steps": 0}, r"reg\.refresh_every_n_steps=0 is too small"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        IStarConfig(**settings)
    assert "\n" not in str(error.value)


def test_content_needs_a_tokenizer_with_special_tokens() -> None:
    with pytest.raises(UserError, match=r"reg\.points=content: the tokenizer has no special tokens"):
        CosRegConfig(points="content").attach(make_tiny_model(), (), seed=0)
