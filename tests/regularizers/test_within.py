"""I-STAR within classes, against naive centering: derivatives, models of transformers, and bad input."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

from istar.errors import UserError
from istar.hidden_states import EmbeddingPenalty, PenaltySettings, attach, shrinkage_covariance
from istar.records.config.penalties import PENALTIES
from istar.regularizers import IStar, Points, RandomDirection, SetPoint
from istar.regularizers.placebos import random_rotation
from istar.regularizers.points import Tokens
from tests.oracles import steps_6_to_9
from tests.penalties import gradients
from tests.regularizers.clouds import CLOSE, MASK, states, value_and_gradients

SIGMA = torch.diag(torch.linspace(1, 2, 4, dtype=torch.float64))
LABELS = torch.tensor([1, 0, 1])


def naive_within_covariance(layers, mask, labels):
    """Return the pooled covariance of the points of all layers, each centered on the mean of its class."""
    rows, classes = [], []
    for state in layers:
        for i in range(state.shape[0]):
            for j in range(state.shape[1]):
                if mask is None or mask[i, j]:
                    rows.append(state[i, j])
                    classes.append(int(labels[i]))
    scatter, class_labels = 0, sorted(set(classes))
    for class_label in class_labels:
        members = torch.stack([row for row, row_class in zip(rows, classes, strict=True) if row_class == class_label])
        centered = members - members.mean(0)
        scatter = scatter + sum(torch.outer(row, row) for row in centered)
    return scatter / (len(rows) - len(class_labels))


def naive_penalty(layers, mask, labels, zeta=0.0, sigma=SIGMA):
    covariance = (1 - zeta) * naive_within_covariance(layers, mask, labels) + zeta * sigma
    return 1 - steps_6_to_9(torch.linalg.eigvalsh(covariance))


def build_penalty(weight=-0.7, zeta=0.3, layers="with_embeddings", penalty_class=IStar, sigma=SIGMA, **arguments):
    penalty = penalty_class(weight, zeta, layers=layers, within="label", **arguments)
    if zeta:
        penalty.shrinkage_covariance = sigma
    return penalty


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("zeta", [0.0, 0.3])
@pytest.mark.parametrize("labels", [LABELS, torch.tensor([4, 0, 2]), torch.zeros(3).long()], ids=str)
def test_value_and_gradient_are_those_of_naive_centering(zeta, mask, labels):
    hidden_states = [state + 3 * labels[:, None, None] for state in states()]
    penalty = build_penalty(zeta=zeta)
    actual = value_and_gradients(lambda s: penalty(s, mask, labels), hidden_states)
    expected = value_and_gradients(lambda s: -0.7 * naive_penalty(s, mask, labels, zeta), hidden_states)
    assert_close(actual, expected, **CLOSE)
    assert penalty.last.points == (30 if mask is None else 2 * MASK.sum())
    # The positions of the classes do not matter.
    moved = [state + 50 * labels[:, None, None] for state in hidden_states]
    assert_close(penalty(moved, mask, labels), actual[0], rtol=1e-8, atol=1e-10)


def test_a_single_class_is_i_star():
    labels = torch.full((3,), 2)
    istar_penalty = IStar(-0.7, 0.3, layers="all")
    istar_penalty.shrinkage_covariance = SIGMA
    assert_close(build_penalty(layers="all")(states(3), MASK, labels), istar_penalty(states(3), MASK), **CLOSE)


def test_first_and_second_derivatives_are_those_of_finite_differences():
    inputs = [state.requires_grad_() for state in states()]
    for zeta in (0.0, 0.3):
        penalty = build_penalty(zeta=zeta)
        assert torch.autograd.gradcheck(lambda *s, penalty=penalty: penalty(s, MASK, LABELS), inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(
            lambda *s, penalty=penalty: penalty(s, MASK, LABELS), inputs, fast_mode=True
        )


def test_padding_is_no_point_unless_it_is_asked_for():
    padded_states = [state.masked_fill(~MASK.bool()[..., None], torch.nan) for state in states()]
    value, state_gradients = value_and_gradients(lambda s: build_penalty()(s, MASK, LABELS), padded_states)
    assert_close(value, -0.7 * naive_penalty(padded_states, MASK, LABELS, 0.3), **CLOSE)
    assert not any(gradient[~MASK.bool()].any() for gradient in state_gradients)
    penalty_with_padding = build_penalty(include_padding=True)
    assert_close(
        penalty_with_padding(states(), MASK, LABELS), -0.7 * naive_penalty(states(), None, LABELS, 0.3), **CLOSE
    )
    assert build_penalty()(padded_states, None, LABELS).isnan()


def test_a_class_with_one_point_adds_nothing_but_the_point():
    labels, mask = torch.tensor([0, 0, 1]), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    penalty, penalty_without_the_class = build_penalty(zeta=0.3, layers="last"), build_penalty(zeta=0.3, layers="last")
    layers = states()
    value, state_gradients = value_and_gradients(lambda s: penalty(s, mask, labels) + 0 * s[0].sum(), layers)
    assert_close(value, penalty_without_the_class([state[:2] for state in layers], mask[:2], labels[:2]), **CLOSE)
    assert (penalty.last.points, penalty_without_the_class.last.points) == (8, 7)
    assert state_gradients[1][2].abs().max() < 1e-15


def test_the_set_point_and_products_in_bfloat16():
    penalty = build_penalty(0.7, layers="all", set_point=SetPoint(0.2))
    value = penalty(states(3), MASK, LABELS)
    score = 1 - naive_penalty(states(3)[1:], MASK, LABELS, 0.3)
    assert_close(value, 0.7 * (score - 0.2) ** 2, **CLOSE)
    layers = [state.float() for state in states()]
    float32_value, bfloat16_value = (
        build_penalty(compute=dtype)(layers, MASK, LABELS) for dtype in ("float32", "bf16")
    )
    assert float32_value != bfloat16_value
    assert float32_value.dtype == bfloat16_value.dtype == torch.float32
    assert_close(bfloat16_value, float32_value, rtol=0.01, atol=0)


def test_the_placebo_has_the_gradient_within_classes_rotated():
    value, placebo_gradients = value_and_gradients(
        lambda s: build_penalty(penalty_class=RandomDirection, seed=3)(s, MASK, LABELS), states()
    )
    expected_value, istar_gradients = value_and_gradients(lambda s: build_penalty()(s, MASK, LABELS), states())
    assert value == expected_value
    rotated_gradients = [torch.einsum("ij,btj->bti", random_rotation(4, 3), gradient) for gradient in istar_gradients]
    assert_close(placebo_gradients, rotated_gradients, **CLOSE)


# Models of transformers ---------------------------------------------------------------------------------------


def make_classifier() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.BertConfig(
        hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20, num_labels=3,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.5,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config).double().eval()


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(3, 20, (3, 5), generator=generator),
        "attention_mask": MASK,
        "labels": torch.tensor([2, 0, 2]) if seed == 0 else torch.tensor([1, 0, 2]),
    }


def test_a_model_gives_its_labels_to_the_penalty_and_to_sigma_s():
    model, batches = make_classifier(), [make_batch(0), make_batch(1)]
    with torch.no_grad():
        states_by_batch = [model(**inputs, output_hidden_states=True).hidden_states[1:] for inputs in batches]
    joined_states = [torch.cat([first, second]) for first, second in zip(*states_by_batch, strict=True)]
    labels = torch.cat([inputs["labels"] for inputs in batches])
    expected_covariance = naive_within_covariance(joined_states, torch.cat([MASK, MASK]), labels)
    covariance = shrinkage_covariance(model, batches, within="label")
    assert_close(covariance.double(), expected_covariance, rtol=1e-5, atol=1e-6)
    assert (covariance - shrinkage_covariance(model, batches)).abs().max() > 1e-3

    penalty = IStar(-0.7, 0.3, within="label")
    with attach(model, penalty) as watch:
        assert watch.refresh(batches) == 2 * 2 * MASK.sum()
        assert torch.equal(penalty.shrinkage_covariance, covariance)
        task_loss = model(**make_batch()).loss
        actual = gradients(model, task_loss + watch.loss())
    outputs = model(**make_batch(), output_hidden_states=True)
    expected = outputs.loss - 0.7 * naive_penalty(
        outputs.hidden_states[1:], MASK, make_batch()["labels"], 0.3, covariance.double()
    )
    assert_close(actual, gradients(model, expected), rtol=1e-9, atol=1e-9)


def test_points_of_one_token_for_each_sequence():
    model, inputs = make_classifier(), make_batch()
    with attach(model, IStar(1.0, 0, layers="last", within="label"), points=Points("last")) as watch:
        model(**inputs)
        value = watch.loss()
    state = model(**inputs, output_hidden_states=True).hidden_states[-1]
    is_last = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]])
    assert_close(value, naive_penalty([state], is_last, inputs["labels"]), **CLOSE)


# Bad input ----------------------------------------------------------------------------------------------------


def run_loss(labels: Any, points: Points = Points(), **arguments: Any) -> None:  # noqa: B008
    model = make_classifier()
    with attach(model, IStar(1.0, 0, within="label", **arguments), points=points) as watch:
        inputs = {name: value for name, value in make_batch().items() if name != "labels"}
        model(**inputs, **({} if labels is None else {"labels": labels}))
        watch.loss()


def pass_token_labels() -> None:
    config = hf.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, bos_token_id=1, eos_token_id=1)
    model = hf.GPT2LMHeadModel(config)
    ids = torch.arange(10).view(2, 5)
    with attach(model, IStar(1.0, 0, within="label")):
        model(input_ids=ids, labels=ids)


def pass_regression_labels() -> None:
    model = make_classifier()
    model.config.num_labels, model.config.problem_type = 1, "regression"
    with attach(model, IStar(1.0, 0, within="label")):
        model(**{**make_batch(), "labels": torch.tensor([0.5, 1.0, 2.0])})


INVALID_CALLS = {
    "name": (lambda: IStar(1.0, 0, within="class"), "within=class is not known"),
    "unbiased": (lambda: IStar(1.0, 0, estimator="unbiased", within="label"), "within=label needs estimator=shrinkage"),
    "auto": (lambda: IStar(1.0, "auto", within="label"), "within=label needs estimator=shrinkage"),
    "no labels": (lambda: run_loss(None), "within='label' needs labels, which this call of the model does not have"),
    "labels of tokens": (pass_token_labels, r"integers of shape \(2,\); the labels are torch.int64 of shape \(2, 5\)"),
    "regression": (
        pass_regression_labels, r"the labels are torch.float32 of shape \(3,\): leave out within for regression"
    ),
    "negative": (lambda: build_penalty()(states(), MASK, LABELS - 1), "a label is -1; expected"),
    "rows of an embedding": (
        lambda: EmbeddingPenalty(
            make_classifier(), IStar(1.0, 0, within="label"), PenaltySettings(target="input_embeddings")
        ).loss(),
        "within='label' needs labels",
    ),
    "sentence labels for tokens": (
        lambda: run_loss(make_batch()["labels"], Points("labelled")),
        r"points='labelled' needs labels of shape \(3, 5\)",
    ),
    "Sigma_S": (
        lambda: shrinkage_covariance(make_classifier(), [{"input_ids": torch.ones(2, 3).long()}], within="label"),
        "within='label' needs labels",
    ),
    "name of Sigma_S": (
        lambda: shrinkage_covariance(make_classifier(), [], within="class"), "within=class is not known"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_bad_input_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_labels_are_counted_once_in_a_pass():
    tokens = Tokens(MASK, labels=LABELS)
    first, second = tokens.classes_of(states()[0]), tokens.classes_of(states()[1])
    assert torch.equal(first[0], LABELS.repeat_interleave(5))
    assert first[1] == second[1] == 2


@pytest.mark.parametrize("kind", [PENALTIES["istar"], PENALTIES["random_direction"]])
def test_the_setting_reaches_the_penalty(kind):
    assert kind().build().within is None
    assert kind(within="label").build().within == "label"
