r"""IsoScore\* in closed form: its errors, its twin by plain autograd, and what it adds to a step."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

from istar.hidden_states import attach
from istar.measures import batch_moments
from istar.measures.batch_moments import mask_to_indices, mean_and_scatter, mean_and_scatter_of_layers
from istar.measures.moments import merge_moments
from istar.regularizers import IStar, shrinkage_estimator
from istar.regularizers.shrinkage_estimator import ShrinkageEstimator, default_precision
from tests.forks import compute_in_group
from tests.operations import CountedOperations
from tests.oracles import algorithm_1, stack

LAYERS, BATCH, TOKENS, DIM = 6, 8, 16, 48
ZETA = 0.4


def make_states(mean: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return layers of points with deviations from 1 to 0.01, and means of some multiples of 1 that differ by layer."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(DIM, DIM, generator=generator) / DIM**0.5 * torch.logspace(0, -2, DIM)
    common = mean * torch.randn(DIM, generator=generator)
    return [
        (
            torch.randn(BATCH, TOKENS, DIM, generator=generator) @ mixing
            + common
            + 0.3 * mean * torch.randn(DIM, generator=generator)
        ).to(dtype)
        for _ in range(LAYERS)
    ]


def make_sigma() -> Tensor:
    return torch.cov(torch.randn(500, DIM, generator=torch.Generator().manual_seed(1)).T)


def make_mask(has_padding: bool) -> Tensor:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1:, 10:] = 0 if has_padding else 1
    return mask


def make_penalty(**options: Any) -> IStar:
    penalty = IStar(-1.0, ZETA, **options)
    penalty.shrinkage_covariance = make_sigma()
    return penalty


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("mean", [0.0, 5.0, 30.0])
@pytest.mark.parametrize(("compute", "max_errors"), [("float32", (1e-7, 1e-6)), ("bf16", (2e-4, 5e-3))])
def test_errors_of_float32_states(
    compute: str, max_errors: tuple[float, float], mean: float, has_padding: bool
) -> None:
    """The oracle is the paper's algorithm, by plain autograd in float64."""
    mask, states = make_mask(has_padding), [state.requires_grad_() for state in make_states(mean)]
    wide_states = [state.detach().double().requires_grad_() for state in states]
    score = algorithm_1(stack(wide_states, mask), make_sigma().double(), ZETA, torch.linalg.eigvalsh)
    expected = torch.stack(torch.autograd.grad(score, wide_states))
    penalty = make_penalty(compute=compute)
    loss = penalty([states[0], *states], mask)
    gradients = torch.stack(torch.autograd.grad(loss, states))
    assert penalty.last is not None
    assert abs(penalty.last.score.double() - score) < max_errors[0]
    assert abs(loss.double() - (score - 1)) < max_errors[0]
    assert relative_error(gradients, expected) < max_errors[1]


ROWS: dict[str, Callable[[], list[Tensor | None]]] = {
    "all": lambda: [None] * LAYERS,
    "the same": lambda: [torch.arange(0, 128, 3)] * LAYERS,
    "different ones": lambda: [torch.arange(0, 128, 3 + i % 2) for i in range(LAYERS)],
    "a mask": lambda: [torch.arange(128) % 3 == 0] * LAYERS,
    "none": lambda: [torch.arange(0)] * LAYERS,
    "an empty mask": lambda: [torch.zeros(128, dtype=torch.bool)] * LAYERS,
    "one of one layer": lambda: [torch.arange(1), *[torch.arange(0)] * (LAYERS - 1)],
}


def is_mask(rows: Tensor | None) -> bool:
    return rows is not None and rows.dtype == torch.bool


@pytest.mark.parametrize("weight", [None, -0.7])
@pytest.mark.parametrize("zeta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", ROWS)
def test_value_and_gradient_are_those_of_plain_autograd(rows: str, zeta: float, weight: float | None) -> None:
    """Plain autograd differentiates the moments of each layer and the score; undefined scores have gradient 0."""
    estimator, shrinkage = ShrinkageEstimator(zeta, None), make_sigma().double()
    chosen = ROWS[rows]()
    results = []
    for is_plain in (False, True):
        states = [state.requires_grad_() for state in make_states(2.0, torch.float64)]
        if is_plain:
            indices = [mask_to_indices(kept) if is_mask(kept) else kept for kept in chosen]
            moments = [mean_and_scatter(state, indices=kept) for state, kept in zip(states, indices, strict=True)]
            score, _ = estimator.score(merge_moments(moments), shrinkage if zeta > 0 else None)
            value = score if weight is None else weight * (1 - score)
            if score.isnan():
                value = 0 * sum(state.sum() for state in states) + (torch.nan if weight is None else 0)
        else:
            summaries = estimator.summarize(states, chosen)
            value = estimator.evaluate(summaries, shrinkage, False, None, weight).value
        gradients = torch.autograd.grad(value, states)
        results.append(
            [value.detach(), *(gradient.nan_to_num() if value.isnan() else gradient for gradient in gradients)]
        )
    assert_close(results[0], results[1], rtol=1e-10, atol=1e-13, equal_nan=True)


def count_step(penalty: IStar | None, has_padding: bool = False) -> Counter[str]:
    """Count the operations of a step of twelve layers with bfloat16 autocast."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=12, **sizes))
    inputs = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.tensor([0, 1])}
    inputs["attention_mask"] = torch.ones(2, 16, dtype=torch.int64)
    inputs["attention_mask"][1, 9:] = 0 if has_padding else 1
    attached = None if penalty is None else attach(model, penalty)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
            loss = loss if attached is None else loss + attached.loss()
        loss.backward()
        model.zero_grad()

    step()
    with CountedOperations() as operations:
        step()
    return operations.counts


@pytest.mark.parametrize(
    ("compute", "has_padding", "limit"), [("bf16", False, 39), ("float32", False, 39), ("bf16", True, 42)]
)
def test_operations_that_a_penalty_adds_to_a_step(
    compute: str, has_padding: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers are one stack, as on a GPU. Three of the operations are conversions that only a CPU needs."""
    monkeypatch.setattr(batch_moments, "BLOCK", batch_moments.STACK_ON_DEVICES)
    penalty = IStar(-1.0, ZETA, compute=compute)
    penalty.shrinkage_covariance = torch.eye(24)
    added = count_step(penalty, has_padding)
    added.subtract(count_step(None, has_padding))
    assert sum(added.values()) <= limit, +added


def count_collectives(rank: int) -> list[int]:
    """Return the numbers of collectives in the forward and in the backward pass of a penalty."""
    states = [state.requires_grad_() for state in make_states(1.0)]
    with CountedOperations() as forward:
        loss = make_penalty()([states[0], *states], make_mask(rank == 1))
    with CountedOperations() as backward:
        loss.backward()
    return [sum("reduce" in name for name in run.counts.elements()) for run in (forward, backward)]


def test_processes_exchange_their_sums_once(tmp_path: Path) -> None:
    assert compute_in_group(count_collectives, (), 2, tmp_path) == [[1, 0]] * 2


@pytest.mark.parametrize(
    ("device_type", "dtype", "is_autocast", "expected"),
    [
        ("cpu", torch.bfloat16, True, "float32"),
        ("cuda", torch.float32, False, "float32"),
        ("cuda", torch.float32, True, "tf32"),
        ("cuda", torch.bfloat16, False, "tf32"),
        ("cuda", torch.float64, False, "float32"),
    ],
)
def test_precision_of_products(device_type: str, dtype: torch.dtype, is_autocast: bool, expected: str) -> None:
    assert default_precision(device_type, dtype, is_autocast) == expected


def test_precision_of_products_depends_on_the_autocast_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = []

    def record(*args: Any) -> str:
        arguments.append(args)
        return default_precision(*args)

    monkeypatch.setattr(shrinkage_estimator, "default_precision", record)
    with torch.autocast("cpu", torch.bfloat16):
        make_penalty(layers="last")(make_states(0.0))
    assert arguments == [("cpu", torch.float32, True)]


def test_layers_of_four_million_numbers_are_not_copied_into_a_stack() -> None:
    small, large = torch.empty(1, 2**22 - 1, device="meta"), torch.empty(1, 2**22, device="meta")
    assert (batch_moments.layers_per_stack(small), batch_moments.layers_per_stack(large)) == (16, 1)


def test_moments_of_two_large_layers_are_two_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_moments, "MAX_STACKED_LAYER", 1)
    assert len(mean_and_scatter_of_layers(make_states(0.0), [None] * LAYERS)) == LAYERS
