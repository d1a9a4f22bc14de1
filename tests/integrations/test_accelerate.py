"""A loop with accelerate: `backward` divides task loss and penalty by the number of micro-batches alike."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

import istar
from tests.integrations.naive import (
    CLOSE,
    WEIGHT,
    ZETA,
    collate,
    compute_gradients,
    compute_penalty,
    make_classifier,
    make_examples,
    task_loss_and_points,
)

accelerate = pytest.importorskip("accelerate")
BATCH_SIZE = 3


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_gradient_is_that_of_the_mean_over_micro_batches(accumulation):
    rows = make_examples("classification", BATCH_SIZE * accumulation)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = make_classifier("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows, BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, prepared_loader = accelerator.prepare(model, optimizer, loader)
    watch = istar.attach(model, istar.IStar(WEIGHT, ZETA))
    watch.refresh(loader)

    gradients_by_step = []
    for batch in prepared_loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss + watch.loss())
            if accelerator.sync_gradients:
                gradients_by_step.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()

    naive_model = make_classifier("gpt2")
    losses = []
    for start in range(0, len(rows), BATCH_SIZE):
        task_loss, points = task_loss_and_points(naive_model, collate(rows[start : start + BATCH_SIZE]))
        losses.append(task_loss + compute_penalty(points, watch.penalty.shrinkage_covariance))
    [actual] = gradients_by_step
    assert_close(actual, compute_gradients(naive_model, torch.stack(losses).mean()), **CLOSE)
