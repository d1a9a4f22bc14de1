"""The shrinkage covariance of a model's hidden states, and the state that its computation must not change."""

import copy
import inspect
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from istar.errors import NonFiniteError, UserError
from istar.hidden_states import PenaltySettings, attach, attach_with_settings, shrinkage_covariance
from istar.regularizers import CosReg, IStar, Points
from tests.operations import CountedOperations
from tests.oracles import stack

WIDTH = 16
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "vocab_size": 40, "initializer_range": 0.2, "max_position_embeddings": 64,
}  # fmt: skip


def make_model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**SHAPE)).train()


def make_batches(num_batches: int = 4, size: int = 3, tokens: int = 6) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    examples = []
    for _ in range(num_batches):
        lengths = torch.randint(2, tokens + 1, (size, 1), generator=generator)
        mask = (torch.arange(tokens) < lengths).long()
        ids = torch.randint(3, 40, (size, tokens), generator=generator) * mask
        examples.append({"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(size, dtype=torch.long)})
    return examples


def naive_covariance(
    encoder: nn.Module, data: list[dict[str, torch.Tensor]], layer_indices: list[int], padding: bool = False
) -> Any:
    """Return the covariance of the stacked states in eval mode by `np.cov`, and their number."""
    encoder = copy.deepcopy(encoder).eval()
    points = []
    with torch.no_grad():
        for batch in data:
            states = encoder(**batch, output_hidden_states=True).hidden_states
            points.append(stack([states[i] for i in layer_indices], None if padding else batch["attention_mask"]))
    all_points = torch.cat(points).double().numpy()
    return torch.from_numpy(np.cov(all_points, rowvar=False)), len(all_points)


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(
    ("layers", "numbers", "padding"),
    [("all", [1, 2, 3], True), ("last", [3], False), ("with_embeddings", [0, 1, 2, 3], False)],
)
def test_it_is_the_covariance_of_the_stacked_hidden_states(layers, numbers, padding):
    encoder = make_model()
    expected, points = naive_covariance(encoder, make_batches(), numbers, padding)
    actual = shrinkage_covariance(encoder, make_batches(), layers=layers, include_padding=padding)
    assert actual.dtype == torch.float32
    assert_close(actual.double(), expected, **CLOSE)
    penalty = IStar(1.0, 0.2, layers=layers, include_padding=padding)
    with attach(encoder, penalty) as watch:
        assert watch.refresh(make_batches()) == points
    assert torch.equal(penalty.shrinkage_covariance, actual)


@pytest.mark.parametrize("num_points", [2, 100, 10**6])
def test_batches_are_taken_until_there_are_enough_points(num_points):
    encoder, data, num_batches, points = make_model(), make_batches(), 0, 0
    while points < num_points and num_batches < len(data):
        points += 3 * int(data[num_batches]["attention_mask"].sum())
        num_batches += 1
    loaded_indices: list[int] = []

    def loader():
        for index, batch in enumerate(data):
            loaded_indices.append(index)
            yield batch

    penalty = IStar(1.0, "auto")
    with attach(encoder, penalty) as watch:
        assert watch.refresh(loader(), num_points) == points
    expected, _ = naive_covariance(encoder, data[:num_batches], [1, 2, 3])
    assert_close(penalty.shrinkage_covariance.double(), expected, **CLOSE)
    # One batch ahead at most.
    assert num_batches <= len(loaded_indices) <= num_batches + 1


@pytest.mark.parametrize("momentum", [0.0, 0.3])
def test_momentum_keeps_a_share_of_the_previous_one(momentum):
    encoder, penalty = make_model(), IStar(1.0, 0.2)
    first_covariance, second_covariance = (
        naive_covariance(encoder, make_batches()[i : i + 2], [1, 2, 3])[0] for i in (0, 2)
    )
    with attach(encoder, penalty) as watch:
        watch.refresh(make_batches()[:2], momentum=momentum)
        assert_close(penalty.shrinkage_covariance.double(), first_covariance, **CLOSE)
        watch.refresh(make_batches()[2:], momentum=momentum)
    assert_close(
        penalty.shrinkage_covariance.double(), momentum * first_covariance + (1 - momentum) * second_covariance, **CLOSE
    )


def test_penalties_without_a_shrinkage_covariance_run_no_pass():
    def loader():
        raise AssertionError
        yield

    for penalty in (CosReg(1.0), IStar(1.0, 0), IStar(1.0, 0, estimator="unbiased")):
        with attach(make_model(), penalty) as watch:
            assert watch.refresh(loader()) == 0


def read_generator_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()]


def test_modes_and_random_numbers_are_as_they_were_whatever_the_loader_draws():
    encoder = make_model()
    encoder.bert.encoder.layer[1].eval()
    modes = [module.training for module in encoder.modules()]
    is_training_during_loading = []

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            torch.rand(1)
            random.random()
            np.random.rand()
            is_training_during_loading.append(any(module.training for module in encoder.modules()))
            batch = make_batches(1, 12)[0]
            return {name: value[index] for name, value in batch.items()}

    loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)
    random.seed(1)
    np.random.seed(1)
    states_before = read_generator_states()
    with attach(encoder, IStar(1.0, 0.2)) as watch:
        num_points = watch.refresh(loader)
    states_after = read_generator_states()
    assert torch.equal(states_before[0], states_after[0])
    assert states_before[1] == states_after[1]
    assert (states_before[2] == states_after[2]).all()
    assert num_points == 3 * make_batches(1, 12)[0]["attention_mask"].sum()
    assert [module.training for module in encoder.modules()] == modes
    # The loader fetches its first batch before the first pass, in eval mode like the others.
    assert not any(is_training_during_loading)
    assert torch.is_grad_enabled()


def test_modes_and_random_numbers_are_as_they_were_after_an_error():
    encoder = make_model()

    def loader():
        yield make_batches()[0]
        torch.rand(1)
        random.random()
        np.random.rand()
        raise ZeroDivisionError

    states_before = read_generator_states()
    hook_counts = [len(module._forward_hooks) for module in encoder.modules()]
    with pytest.raises(ZeroDivisionError):
        shrinkage_covariance(encoder, loader())
    assert torch.equal(states_before[0], torch.get_rng_state())
    assert states_before[1] == random.getstate()
    assert (states_before[2] == np.random.get_state()[1]).all()
    assert all(module.training for module in encoder.modules())
    assert [len(module._forward_hooks) for module in encoder.modules()] == hook_counts


@pytest.mark.parametrize("names", [("input_ids", "attention_mask"), ("input_ids", "attention_mask", "labels")])
def test_batches_without_names_are_refused_for_transformers_models(names):
    """The third argument of BERT is the token types: labels would become token types without any message."""
    batches = [{**batch, "labels": torch.ones_like(batch["input_ids"])} for batch in make_batches()]
    data = TensorDataset(*(torch.cat([batch[name] for batch in batches[:1]]) for name in names))
    encoder, penalty = make_model(), IStar(1.0, 0.2)
    message = rf"has {len(names)} values without names; expected arguments of BertModel by name, such as "
    with attach(encoder, penalty) as watch, pytest.raises(UserError, match=message) as error:
        watch.refresh(DataLoader(data, batch_size=1))
    assert "\n" not in str(error.value)
    assert penalty.shrinkage_covariance is None
    with pytest.raises(UserError, match="has 2 values without names"):
        shrinkage_covariance(encoder, [({"input_ids": torch.ones(1, 2).long()}, torch.ones(1))])
    # A data set of token ids alone has one value.
    ids = TensorDataset(batches[0]["input_ids"])
    expected = shrinkage_covariance(encoder, [{"input_ids": batches[0]["input_ids"]}])
    assert_close(shrinkage_covariance(encoder, DataLoader(ids, batch_size=1)), expected)


@pytest.mark.parametrize("names", ["input_ids mask labels", "input_ids mask targets", "ids mask targets"])
def test_names_that_may_be_the_mask_are_refused(names):
    """Models swallow unknown names: padding would be attended to and counted, without any message."""
    batches = [dict(zip(names.split(), batch.values(), strict=True)) for batch in make_batches()]
    unknown = ", ".join(name for name in names.split() if name not in ("input_ids", "labels"))
    message = f"has the unknown names {unknown} and no attention_mask; expected arguments of BertModel by name"
    for model in (make_model(), make_model().bert, nn.Sequential(make_model())):
        with pytest.raises(UserError, match=message) as error:
            shrinkage_covariance(model, batches)
        assert "\n" not in str(error.value)


def test_other_columns_next_to_the_mask_and_names_for_packing_change_nothing():
    expected = shrinkage_covariance(make_model(), make_batches())
    columns = {"idx": torch.arange(3), "completion_mask": torch.ones(3, 6), "text": ["a", "b", "c"]}
    assert torch.equal(shrinkage_covariance(make_model(), [{**batch, **columns} for batch in make_batches()]), expected)
    ids = [{"input_ids": batch["input_ids"]} for batch in make_batches()]
    packed = [{**batch, "seq_idx": torch.zeros(3, 6), "max_length_q": 6} for batch in ids]
    assert torch.equal(shrinkage_covariance(make_model(), packed), shrinkage_covariance(make_model(), ids))


def test_columns_are_left_out_for_models_that_take_only_their_own_arguments():
    class Strict(hf.BertModel):
        def forward(self, input_ids, attention_mask=None):  # type: ignore[override]
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    model = Strict(make_model().config)
    batches = [{**batch, "idx": torch.arange(3), "next_sentence_label": torch.zeros(3)} for batch in make_batches()]
    assert torch.equal(shrinkage_covariance(model, batches), shrinkage_covariance(model, make_batches()))


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_decoder_needs_the_states_of_its_encoder(name):
    sizes = {
        "T5": {"d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        "Bart": {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    }[name]  # fmt: skip
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**sizes, d_model=WIDTH, vocab_size=40, decoder_start_token_id=1)
    model = getattr(hf, f"{name}ForConditionalGeneration")(config).eval()
    decoder_ids = torch.randint(3, 40, (3, 5))
    [batch] = make_batches(1)
    message = rf"has no encoder_hidden_states, such as .*, to which {type(model.get_decoder()).__name__} attends"
    with pytest.raises(UserError, match=message) as error:
        shrinkage_covariance(model.get_decoder(), [batch])
    assert "\n" not in str(error.value)
    with torch.no_grad():
        outputs = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=decoder_ids,
            output_hidden_states=True,
        )  # fmt: skip
    actual = shrinkage_covariance(model.get_encoder(), [{**batch, "decoder_input_ids": decoder_ids}])
    assert_close(actual, stack(outputs.encoder_hidden_states[1:], batch["attention_mask"]).T.cov(), **CLOSE)
    decoder_batch = {
        "input_ids": decoder_ids,
        "encoder_hidden_states": outputs.encoder_last_hidden_state,
        "encoder_attention_mask": batch["attention_mask"],
    }
    actual = shrinkage_covariance(model.get_decoder(), [decoder_batch])
    assert_close(actual, stack(outputs.decoder_hidden_states[1:], None).T.cov(), **CLOSE)


def test_sequences_are_the_arguments_of_other_models_if_they_fit():
    tower = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    points = torch.randn(20, 4)
    expected = shrinkage_covariance(tower, [points], modules=[tower[1]])
    assert torch.equal(shrinkage_covariance(tower, [(points,)], modules=[tower[1]]), expected)
    with pytest.raises(UserError, match=r"has 2 values without names; expected arguments of Sequential by name"):
        shrinkage_covariance(tower, [(points, torch.ones(20))], modules=[tower[1]])


def test_batches_may_be_mappings_or_tensors():
    encoder, data = make_model().bert, make_batches()
    expected = shrinkage_covariance(encoder, data)
    assert torch.equal(shrinkage_covariance(encoder, [hf.BatchEncoding(batch) for batch in data]), expected)
    all_ones_mask_batches = [
        {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])} for batch in data
    ]
    expected_without_mask, _ = naive_covariance(encoder, all_ones_mask_batches, [1, 2, 3])
    assert_close(
        shrinkage_covariance(encoder, [batch["input_ids"] for batch in data]).double(), expected_without_mask, **CLOSE
    )


def test_a_refresh_between_a_pass_and_its_loss_leaves_that_pass_alone():
    encoder, penalty = make_model(), IStar(1.0, 0.2)
    batch = make_batches()[0]
    with attach(encoder, penalty) as watch:
        watch.refresh(make_batches())
        encoder(**batch)
        watch.refresh(make_batches())
        loss = watch.loss()
    assert loss.requires_grad
    assert penalty.last.points == 3 * batch["attention_mask"].sum()


def test_under_autocast_it_is_that_of_the_states_in_that_precision():
    encoder = make_model()
    float32_covariance = shrinkage_covariance(encoder, make_batches())
    with torch.autocast("cpu", torch.bfloat16):
        bfloat16_covariance = shrinkage_covariance(encoder, make_batches())
        expected, _ = naive_covariance(encoder, make_batches(), [1, 2, 3])
    assert bfloat16_covariance.dtype == torch.float32
    assert_close(bfloat16_covariance.double(), expected, **CLOSE)
    assert not torch.equal(bfloat16_covariance, float32_covariance)


def make_model_with_nan() -> hf.PreTrainedModel:
    encoder = make_model()
    encoder.bert.encoder.layer[0].output.dense.weight.data.fill_(math.nan)
    return encoder


INVALID_CALLS = [
    (lambda: shrinkage_covariance(make_model(), []), "0 points have no covariance; expected at least 2"),
    (lambda: shrinkage_covariance(make_model(), make_batches(), num_points=1), "num_points is 1; expected at least 2"),
    (lambda: shrinkage_covariance(make_model_with_nan(), make_batches()), "the shrinkage covariance is not finite"),
    (lambda: shrinkage_covariance(make_model(), make_batches(), layers=[4]), "layer 4 does not exist"),
    (lambda: shrinkage_covariance(make_model(), None), "the loader .* is a NoneType; expected an iterable of batches"),
    (lambda: shrinkage_covariance(make_model(), {"a": make_batches()}), "the loader .* is a dict; expected"),
    (lambda: shrinkage_covariance(make_model(), hf.BatchEncoding(make_batches()[0])), "loader .* is a BatchEncoding"),
    (lambda: shrinkage_covariance(make_model(), ["text"]), "has input_ids of type str; expected arguments of BertM"),
    (lambda: shrinkage_covariance(make_model(), [{"input_ids": [[3, 4]]}]), r"has input_ids of type list; expected"),
    (lambda: shrinkage_covariance(make_model(), [{"input_ids": np.ones((1, 2))}]), "has input_ids of type ndarray"),
    (lambda: shrinkage_covariance(make_model(), [{"input_ids": torch.ones(4).long()}]), r"input_ids of shape \(4,\)"),
    (lambda: shrinkage_covariance(make_model().bert, [torch.ones(2, 3, 4).long()]), r"input_ids of shape \(2, 3, 4\)"),
    (lambda: shrinkage_covariance(make_model(), [{"labels": torch.ones(2)}]), "has no input_ids; expected"),
    (lambda: attach(make_model(), IStar(1.0, 0.2)).refresh(make_batches(), momentum=1), "momentum is 1; expected"),
    (lambda: attach(make_model(), IStar(1.0, 0.2)).refresh(make_batches(), momentum=-0.1), r"momentum is -0\.1"),
]


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS, ids=[message[:20] for _, message in INVALID_CALLS])
def test_what_has_no_shrinkage_covariance_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert isinstance(error.value, NonFiniteError) == ("finite" in message)


def test_a_refresh_that_fails_leaves_the_old_one():
    encoder, penalty = make_model(), IStar(1.0, 0.2)
    with attach(encoder, penalty) as watch:
        watch.refresh(make_batches())
        previous_covariance = penalty.shrinkage_covariance.clone()
        encoder.bert.encoder.layer[0].output.dense.weight.data.fill_(math.nan)
        with pytest.raises(NonFiniteError):
            watch.refresh(make_batches())
    assert torch.equal(penalty.shrinkage_covariance, previous_covariance)


def test_a_step_claims_one_refresh() -> None:
    with attach_with_settings(make_model(), IStar(), PenaltySettings(refresh_every_n_steps=2)) as watch:
        watch.penalty.shrinkage_covariance = torch.eye(WIDTH)
        claims = [watch.claim_refresh(step, is_epoch_start=False) for step in (1, 2, 2, 3, 4)]
    assert claims == [False, True, False, False, True]


def count_operations(call: Callable[[], object]) -> Counter[str]:
    with CountedOperations() as operations:
        call()
    counts = Counter(operations.counts)
    counts["synchronizations"] = operations.synchronizations
    return counts


def count_signatures(call: Callable[[], object]) -> int:
    """Return how often `inspect.signature` is called, by whatever name."""
    num_calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code is inspect.signature.__code__

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return num_calls


def run_pass(model: Any, batch: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        model.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


@pytest.mark.parametrize("num_points", [None, 10**6])
# Layers of the large size exceed a block of a CPU, and are summed one by one.
@pytest.mark.parametrize(("width", "size", "tokens", "most"), [(WIDTH, 3, 6, 10), (256, 16, 64, 50)])
def test_a_batch_costs_few_operations_and_no_signatures_next_to_its_pass(num_points, width, size, tokens, most):
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(
        hf.BertConfig(**{**SHAPE, "hidden_size": width, "num_hidden_layers": 6})
    ).eval()
    batches = make_batches(4, size, tokens)

    def count_for_last_batch(count: Callable[[Callable[[], object]], Any]) -> Any:
        """Return the count of a refresh with the last batch, minus that without it and that of its forward pass."""
        with_last, without_last = (
            count(lambda: shrinkage_covariance(model, data, num_points))  # noqa: B023
            for data in (batches, batches[:-1])
        )
        return with_last - without_last - count(lambda: run_pass(model, batches[-1]))

    assert count_for_last_batch(count_signatures) == 0
    counts = count_for_last_batch(count_operations)
    assert counts.total() - counts["synchronizations"] <= most, counts
    # Only the mask decides how many rows count; nothing else is read from the device.
    assert counts["nonzero"] == counts["synchronizations"] == 1


def test_large_means_cost_no_digits():
    """The last norm adds a bias of 300 deviations to all states of the last layer."""
    encoder = make_model()
    encoder.bert.encoder.layer[-1].output.LayerNorm.bias.data.fill_(300)
    expected, _ = naive_covariance(encoder, make_batches(), [3])
    error = shrinkage_covariance(encoder, make_batches(), layers=[3]).double() - expected
    assert error.norm() < 1e-6 * expected.norm()


def test_batches_without_points_decide_on_nothing():
    """The first batch has no labels: its states are no origin for the sums of the others."""
    encoder = hf.BertForTokenClassification(make_model().config).eval()
    data = [{**batch, "labels": torch.where(batch["attention_mask"] == 1, 1, -100)} for batch in make_batches()]
    data[0]["labels"] = torch.full_like(data[0]["labels"], -100)
    actual = shrinkage_covariance(encoder, data, points=Points("completion"))
    assert_close(actual, shrinkage_covariance(encoder, make_batches()[1:]))


def test_modules_may_be_called_more_often_in_one_pass_than_in_another():
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, points: torch.Tensor, num_calls: int) -> torch.Tensor:
            for _ in range(num_calls):
                points = self.layer(points)
            return points

    tower = Tower()
    batches = [{"points": torch.randn(10, 4), "num_calls": num_calls} for num_calls in (2, 1, 3)]
    states = []
    for batch in batches:
        points = batch["points"]
        for _ in range(batch["num_calls"]):
            points = tower.layer(points)
            states.append(points.detach())
    actual = shrinkage_covariance(tower, batches, modules=[tower.layer])
    assert_close(actual, torch.cat(states).double().T.cov().float(), **CLOSE)
