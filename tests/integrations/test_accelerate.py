"""A loop with accelerate: `backward` divides task loss and penalty by the number of micro-batches alike; monitors."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset

import istar
from istar.hidden_states.sharding import is_sharded_module
from istar.integrations.loaders import iterate_in_new_order
from tests.forks import run_in_processes
from tests.integrations.builders import (
    CLOSE,
    WEIGHT,
    ZETA,
    collate,
    compute_gradients,
    compute_penalty,
    make_classifier,
    make_examples,
    make_sigma,
    task_loss_and_points,
)
from tests.oracles import mean_pair_cosine, stack

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


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_monitor_of_the_optimizer_counts_real_steps_and_reads_all_their_micro_batches(is_prepared):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = make_classifier("bert")
    own_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_examples("classification", 48), BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, prepared_loader = accelerator.prepare(model, own_optimizer, loader)
    monitor = istar.Monitor(model, every=3, optimizer=optimizer if is_prepared else own_optimizer, alarms=[])
    points_by_reading = []
    for number, batch in enumerate(prepared_loader):
        if number in (0, 12):
            points_by_reading.append([])
        with accelerator.accumulate(model):
            output = model(**batch, output_hidden_states=True)
            if number in (*range(4), *range(12, 16)):
                points_by_reading[-1].append(stack(output.hidden_states[2:3], batch["attention_mask"]).detach())
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    assert number == 15
    assert monitor.count == 4
    assert [reading.step for reading in monitor.readings] == [0, 3]
    for reading, points in zip(monitor.readings, points_by_reading, strict=True):
        expected = mean_pair_cosine(torch.cat(points).numpy())
        assert reading.values["layer_2"]["inter_sim"] == pytest.approx(expected, rel=1e-9)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10)


def test_each_process_gets_its_share_of_a_stream():
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(Stream(), 2))
    assert len(list(iterate_in_new_order(loader, seed=0))) == 5
    for process_index, expected in enumerate(([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]])):
        loader.state = SimpleNamespace(process_index=process_index, num_processes=2)
        assert [batch.tolist() for batch in iterate_in_new_order(loader, seed=0)] == expected


def train_sharded(rank: int, folder: str) -> None:
    """Compute the gradients of a model that accelerate's FSDP2 plugin has sharded, and save them."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
    model = make_classifier("gpt2")
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert is_sharded_module(model)
    watch = istar.attach(model, istar.IStar(WEIGHT, ZETA))
    watch.penalty.shrinkage_covariance = make_sigma()
    batch = {
        name: values.to(accelerator.device) for name, values in collate(make_examples("classification", 6)).items()
    }
    accelerator.backward(model(**batch).loss + watch.loss())
    gradients = {
        name: parameter.grad.full_tensor().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    torch.save(gradients, Path(folder) / "gradients.pt")


@pytest.mark.gpu
def test_the_gradient_of_a_model_that_accelerate_shards(tmp_path):
    run_in_processes(train_sharded, (str(tmp_path),), 1)
    model = make_classifier("gpt2")
    task_loss, points = task_loss_and_points(model, collate(make_examples("classification", 6)))
    expected = compute_gradients(model, task_loss + compute_penalty(points, make_sigma()))
    assert_close(torch.load(tmp_path / "gradients.pt"), expected, **CLOSE)
