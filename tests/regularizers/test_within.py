"""I-STAR within classes: naive centering, derivatives, gloo processes, models of transformers, and bad input."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from istar.config.penalties import IStarConfig, RandomDirectionConfig
from istar.errors import UserError
from istar.regularizers import EmbeddingWatch, IStar, Points, RandomDirection, SetPoint, attach, shrinkage_covariance
from istar.regularizers.points import Tokens
from istar.regularizers.random_direction import random_rotation
from tests.forks import run_in_processes
from tests.oracles import steps_6_to_9
from tests.penalties import gradients
from tests.regularizers.clouds import CLOSE, MASK, states, value_and_gradients

SIGMA = torch.diag(torch.linspace(1, 2, 4, dtype=torch.float64))
LABELS = torch.tensor([1, 0, 1])


def naive_within(layers, mask, labels):
    """The pooled covariance of the union of the layers, each point centered on the mean of its class."""
    rows, classes = [], []
    for state in layers:
        for i in range(state.shape[0]):
            for j in range(state.shape[1]):
                if mask is None or mask[i, j]:
                    rows.append(state[i, j])
                    classes.append(int(labels[i]))
    scatter, names = 0, sorted(set(classes))
    for name in names:
        members = torch.stack([row for row, other in zip(rows, classes, strict=True) if other == name])
        centered = members - members.mean(0)
        scatter = scatter + sum(torch.outer(row, row) for row in centered)
    return scatter / (len(rows) - len(names))


def naive_penalty(layers, mask, labels, zeta=0.0, sigma=SIGMA):
    covariance = (1 - zeta) * naive_within(layers, mask, labels) + zeta * sigma
    return 1 - steps_6_to_9(torch.linalg.eigvalsh(covariance))


def build(weight=-0.7, zeta=0.3, layers="with_embeddings", kind=IStar, sigma=SIGMA, **arguments):
    penalty = kind(weight, zeta, layers, within="label", **arguments)
    if zeta:
        penalty.shrinkage_covariance = sigma
    return penalty


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("zeta", [0.0, 0.3])
@pytest.mark.parametrize("labels", [LABELS, torch.tensor([4, 0, 2]), torch.zeros(3).long()], ids=str)
def test_value_and_gradient_are_those_of_naive_centering(zeta, mask, labels):
    hidden_states = [state + 3 * labels[:, None, None] for state in states()]
    penalty = build(zeta=zeta)
    actual = value_and_gradients(lambda s: penalty(s, mask, labels), hidden_states)
    expected = value_and_gradients(lambda s: -0.7 * naive_penalty(s, mask, labels, zeta), hidden_states)
    assert_close(actual, expected, **CLOSE)
    assert penalty.last.points == (30 if mask is None else 2 * MASK.sum())
    # Where the classes lie does not matter.
    moved = [state + 50 * labels[:, None, None] for state in hidden_states]
    assert_close(penalty(moved, mask, labels), actual[0], rtol=1e-8, atol=1e-10)


def test_a_single_class_is_i_star():
    labels = torch.full((3,), 2)
    plain = IStar(-0.7, 0.3, "all")
    plain.shrinkage_covariance = SIGMA
    assert_close(build(layers="all")(states(3), MASK, labels), plain(states(3), MASK), **CLOSE)


def test_first_and_second_derivatives_are_those_of_finite_differences():
    inputs = [state.requires_grad_() for state in states()]
    for zeta in (0.0, 0.3):
        penalty = build(zeta=zeta)
        assert torch.autograd.gradcheck(lambda *s, penalty=penalty: penalty(s, MASK, LABELS), inputs)
        assert torch.autograd.gradgradcheck(lambda *s, penalty=penalty: penalty(s, MASK, LABELS), inputs)


def test_padding_is_no_point_unless_it_is_asked_for():
    padded = [state.masked_fill(~MASK.bool()[..., None], torch.nan) for state in states()]
    value, found = value_and_gradients(lambda s: build()(s, MASK, LABELS), padded)
    assert_close(value, -0.7 * naive_penalty(padded, MASK, LABELS, 0.3), **CLOSE)
    assert not any(gradient[~MASK.bool()].any() for gradient in found)
    counted = build(include_padding=True)
    assert_close(counted(states(), MASK, LABELS), -0.7 * naive_penalty(states(), None, LABELS, 0.3), **CLOSE)
    assert build()(padded, None, LABELS).isnan()


def test_a_class_with_one_point_adds_nothing_but_the_point():
    labels, mask = torch.tensor([0, 0, 1]), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    penalty, alone = build(zeta=0.3, layers="last"), build(zeta=0.3, layers="last")
    layers = states()
    value, found = value_and_gradients(lambda s: penalty(s, mask, labels) + 0 * s[0].sum(), layers)
    assert_close(value, alone([state[:2] for state in layers], mask[:2], labels[:2]), **CLOSE)
    assert (penalty.last.points, alone.last.points) == (8, 7)
    assert found[1][2].abs().max() < 1e-15


def test_the_set_point_and_products_in_bfloat16():
    pulled = build(0.7, layers="all", set_point=SetPoint(0.2))
    value = pulled(states(3), MASK, LABELS)
    score = 1 - naive_penalty(states(3)[1:], MASK, LABELS, 0.3)
    assert_close(value, 0.7 * (score - 0.2) ** 2, **CLOSE)
    layers = [state.float() for state in states()]
    exact, coarse = (build(compute=dtype)(layers, MASK, LABELS) for dtype in ("float32", "bfloat16"))
    assert exact != coarse
    assert exact.dtype == coarse.dtype == torch.float32
    assert_close(coarse, exact, rtol=0.01, atol=0)


def test_the_placebo_has_the_gradient_within_classes_rotated():
    value, found = value_and_gradients(
        lambda s: build(kind=RandomDirection, seed=3)(s, MASK, LABELS), states()
    )  # fmt: skip
    expected_value, expected = value_and_gradients(lambda s: build()(s, MASK, LABELS), states())
    assert value == expected_value
    rotated = [torch.einsum("ij,btj->bti", random_rotation(4, 3), gradient) for gradient in expected]
    assert_close(found, rotated, **CLOSE)


# Models of transformers ---------------------------------------------------------------------------------------


def classifier() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.BertConfig(
        hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20, num_labels=3,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.5,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config).double().eval()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(3, 20, (3, 5), generator=generator),
        "attention_mask": MASK,
        "labels": torch.tensor([2, 0, 2]) if seed == 0 else torch.tensor([1, 0, 2]),
    }


def test_a_model_gives_its_labels_to_the_penalty_and_to_sigma_s():
    model, batches = classifier(), [batch(0), batch(1)]
    with torch.no_grad():
        each = [model(**inputs, output_hidden_states=True).hidden_states[1:] for inputs in batches]
    both = [torch.cat([first, second]) for first, second in zip(*each, strict=True)]
    labels = torch.cat([inputs["labels"] for inputs in batches])
    sigma = naive_within(both, torch.cat([MASK, MASK]), labels)
    covariance = shrinkage_covariance(model, batches, within="label")
    assert_close(covariance.double(), sigma, rtol=1e-5, atol=1e-6)
    assert (covariance - shrinkage_covariance(model, batches)).abs().max() > 1e-3

    penalty = IStar(-0.7, 0.3, within="label")
    with attach(model, penalty) as watch:
        assert watch.refresh(batches) == 2 * 2 * MASK.sum()
        assert torch.equal(penalty.shrinkage_covariance, covariance)
        task_loss = model(**batch()).loss
        actual = gradients(model, task_loss + watch.loss())
    outputs = model(**batch(), output_hidden_states=True)
    expected = outputs.loss - 0.7 * naive_penalty(
        outputs.hidden_states[1:], MASK, batch()["labels"], 0.3, covariance.double()
    )
    assert_close(actual, gradients(model, expected), rtol=1e-9, atol=1e-9)


def test_points_of_one_token_for_each_sequence():
    model, inputs = classifier(), batch()
    with attach(model, IStar(1.0, 0, "last", within="label"), points=Points("last")) as watch:
        model(**inputs)
        value = watch.loss()
    state = model(**inputs, output_hidden_states=True).hidden_states[-1]
    is_last = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]])
    assert_close(value, naive_penalty([state], is_last, inputs["labels"]), **CLOSE)


# Processes ----------------------------------------------------------------------------------------------------


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)).double()

    def forward(self, hidden_state, attention_mask=None, labels=None):
        for layer in self.layers:
            hidden_state = torch.tanh(layer(hidden_state))
        return hidden_state


SHARDS = {
    "equal": ((torch.tensor([0, 2, 0]), MASK), (torch.tensor([0, 1, 2]), MASK)),
    # The second process has a class that the first one does not know, and none of the first one's.
    "unlike": ((torch.tensor([0, 1, 1]), MASK), (torch.tensor([5, 5, 5]), MASK)),
    "a shard of padding": ((torch.tensor([0, 1, 1]), MASK), (torch.tensor([3, 0, 0]), 0 * MASK)),
}


def points_of(rank):
    return 2 * torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) + rank


def train(model, layers, points, mask, labels, sync=True):
    """Three steps of plain SGD on the penalty alone; returns its values and the parameters."""
    penalty = IStar(0.7, 0.3, within="label", sync=sync)
    watch = attach(model, penalty, layers)
    optimizer, values = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(3):
        watch.refresh([{"hidden_state": points, "attention_mask": mask, "labels": labels}])
        model(points, mask, labels)
        loss = watch.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    return torch.cat([torch.stack(values), torch.nn.utils.parameters_to_vector(model.parameters()).detach()])


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, shards in SHARDS.items():
        labels, mask = shards[rank]
        model = DistributedDataParallel(Tower())
        results[name] = train(model, model.module.layers, points_of(rank), mask, labels)
    labels, mask = SHARDS["equal"][rank]
    model = Tower()
    results["alone"] = train(model, model.layers, points_of(rank), mask, labels, sync=False)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    # Not through the end of the interpreter, where what is left of a process group may abort.
    os._exit(0)


def test_two_processes_train_as_one_does_with_the_union(tmp_path):
    run_in_processes(work, (str(tmp_path),), 2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    union = torch.cat([points_of(0), points_of(1)])
    start = torch.nn.utils.parameters_to_vector(Tower().parameters())
    for name, shards in SHARDS.items():
        model = Tower()
        masks, labels = (torch.cat([shard[i] for shard in shards]) for i in (1, 0))
        expected = train(model, model.layers, union, masks, labels)
        assert (expected[3:] - start).abs().max() > 1e-3
        for result in results:
            # Sigma_S is float32.
            assert_close(result[name], expected, rtol=1e-5, atol=1e-6)
    for rank, result in enumerate(results):
        labels, mask = SHARDS["equal"][rank]
        model = Tower()
        assert_close(result["alone"], train(model, model.layers, points_of(rank), mask, labels), **CLOSE)
    assert not torch.allclose(results[0]["alone"], results[0]["equal"])


# Bad input ----------------------------------------------------------------------------------------------------


def call(labels: Any, points: Points = Points(), **arguments: Any) -> None:  # noqa: B008
    model = classifier()
    with attach(model, IStar(1.0, 0, within="label", **arguments), points=points) as watch:
        inputs = {name: value for name, value in batch().items() if name != "labels"}
        model(**inputs, **({} if labels is None else {"labels": labels}))
        watch.loss()


def language_model() -> None:
    config = hf.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, bos_token_id=1, eos_token_id=1)
    model = hf.GPT2LMHeadModel(config)
    ids = torch.arange(10).view(2, 5)
    with attach(model, IStar(1.0, 0, within="label")):
        model(input_ids=ids, labels=ids)


def regression() -> None:
    model = classifier()
    model.config.num_labels, model.config.problem_type = 1, "regression"
    with attach(model, IStar(1.0, 0, within="label")):
        model(**{**batch(), "labels": torch.tensor([0.5, 1.0, 2.0])})


WRONG = {
    "name": (lambda: IStar(1.0, 0, within="class"), "within is 'class'; expected label or None"),
    "unbiased": (lambda: IStar(1.0, 0, estimator="unbiased", within="label"), "within needs estimator shrinkage"),
    "auto": (lambda: IStar(1.0, "auto", within="label"), "within needs estimator shrinkage"),
    "no labels": (lambda: call(None), "within='label' needs labels, which this call of the model does not have"),
    "labels of tokens": (language_model, r"integers of shape \(2,\); the labels are torch.int64 of shape \(2, 5\)"),
    "regression": (regression, r"the labels are torch.float32 of shape \(3,\): leave out within for regression"),
    "negative": (lambda: build()(states(), MASK, LABELS - 1), "a label is -1; expected"),
    "no class with two points": (
        lambda: call(torch.tensor([0, 1, 2]), Points("last"), layers="last"), "no class has two points"
    ),
    "rows of an embedding": (
        lambda: EmbeddingWatch(classifier(), IStar(1.0, 0, within="label"), "input_embeddings").loss(),
        "within='label' needs labels",
    ),
    "sentence labels for tokens": (
        lambda: call(batch()["labels"], Points("labelled")), r"points='labelled' needs labels of shape \(3, 5\)"
    ),
    "Sigma_S": (
        lambda: shrinkage_covariance(classifier(), [{"input_ids": torch.ones(2, 3).long()}], within="label"),
        "within='label' needs labels",
    ),
    "name of Sigma_S": (lambda: shrinkage_covariance(classifier(), [], within="class"), "within is 'class'"),
    "config name": (lambda: IStarConfig(within="class"), r"reg\.within=class is not known"),
    "config unbiased": (
        lambda: IStarConfig(within="label", estimator="unbiased"), r"reg\.within=label needs reg\.estimator=shrinkage"
    ),
    "config auto": (lambda: IStarConfig(within="label", zeta="auto"), r"reg\.within=label needs reg\.estimator"),
    "config points": (lambda: IStarConfig(within="label", points="labelled"), r"reg\.points=labelled one for each"),
    "config target": (
        lambda: IStarConfig(within="label", target="input_embeddings"), r"reg\.target=input_embeddings has no labels"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_bad_input_is_refused_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_labels_are_counted_once_in_a_pass():
    tokens = Tokens(MASK, labels=LABELS)
    first, second = tokens.classes_of(states()[0]), tokens.classes_of(states()[1])
    assert torch.equal(first[0], LABELS.repeat_interleave(5))
    assert first[1] == second[1] == 2


@pytest.mark.parametrize("kind", [IStarConfig, RandomDirectionConfig])
def test_the_setting_reaches_the_penalty(kind):
    assert kind().build().within is None
    assert kind(within="label").build().within == "label"
