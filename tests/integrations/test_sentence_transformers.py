"""The penalty beside losses of sentence-transformers: gradients against the formula, logs, Sigma_S and resuming."""

import os
import random
import shutil
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("sentence_transformers")
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import istar
from istar.integrations.sentence_transformers import PenaltyLoss, RefreshCallback
from tests.integrations.naive import BERT, CLOSE, WEIGHT, ZETA, gradients, penalty_of
from tests.oracles import stack

WORDS = list("abcdefghijklmnopqrstuvwxyz")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT and its tokenizer, on disk."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**BERT)).save_pretrained(path)
    hf.BertTokenizer(vocab={word: i for i, word in enumerate(SPECIAL + WORDS)}).save_pretrained(path)
    return path


def encoder(folder: Path) -> SentenceTransformer:
    modules = [Transformer(str(folder)), Pooling(12)]
    return SentenceTransformer(modules=modules, device="cpu").double()


def pairs(number: int, with_labels: bool = False) -> Dataset:
    draw = random.Random(2)
    texts = [[" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(number)] for _ in range(2)]
    columns: dict[str, Any] = {"anchor": texts[0], "positive": texts[1]}
    return Dataset.from_dict(columns | ({"label": [draw.random() for _ in range(number)]} if with_labels else {}))


class Recorded(nn.Module):
    """Keeps what the trainer gives to a loss."""

    def __init__(self, model: SentenceTransformer, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.calls: list[Any] = []

    def forward(self, sentence_features: Any, labels: Tensor | None = None) -> Tensor:
        columns = [{name: features[name] for name in ("input_ids", "attention_mask")} for features in sentence_features]
        self.calls.append((columns, labels))
        return self.loss(sentence_features, labels)


class Gradients(hf.TrainerCallback):
    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.first:
            named = model.named_parameters()
            self.first = {name: each.grad.clone() for name, each in named if each.grad is not None}


def trainer(
    folder: Path, model: SentenceTransformer, loss: nn.Module, data: Dataset, *callbacks: Any, **settings: Any
) -> SentenceTransformerTrainer:
    chosen = {
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": "none",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "logging_steps": 1,
    }
    args = SentenceTransformerTrainingArguments(str(folder), **(chosen | settings))
    return SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, callbacks=list(callbacks))


def naive_loss(base: nn.Module, columns: list[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
    """Contrastive without labels, else the squared error of cosines; also the points of all columns."""
    embeddings = []
    for column in columns:
        mask = column["attention_mask"][..., None].double()
        embeddings.append((base(**column).last_hidden_state * mask).sum(1) / mask.sum(1))
    first, second = (nn.functional.normalize(each) for each in embeddings)
    if labels is None:
        return nn.functional.cross_entropy(20 * first @ second.T, torch.arange(len(first)))
    return (((first * second).sum(-1) - labels) ** 2).mean()


def naive_points(base: nn.Module, columns: list[dict[str, Tensor]], on: str) -> Tensor:
    clouds = []
    for column in columns:
        states, mask = base(**column, output_hidden_states=True).hidden_states, column["attention_mask"]
        if on == "tokens":
            clouds.append(stack(states[1:], mask))
        else:
            weights = mask[..., None].double()
            clouds.append((states[-1] * weights).sum(1) / weights.sum(1))
    return torch.cat(clouds)


@pytest.mark.parametrize(
    ("kind", "on", "accumulation"),
    [
        ("MultipleNegativesRankingLoss", "tokens", 1), ("MultipleNegativesRankingLoss", "pooled", 2),
        ("MultipleNegativesRankingLoss", "tokens", 4), ("CosineSimilarityLoss", "tokens", 2),
        ("CosineSimilarityLoss", "pooled", 4), ("CosineSimilarityLoss", "pooled", 1),
    ],
)  # fmt: skip
def test_the_gradient_is_that_of_the_mean_over_micro_batches(folder, tmp_path, kind, on, accumulation):
    model, base = encoder(folder), hf.BertModel.from_pretrained(folder).double()
    data = pairs(4 * accumulation, with_labels=kind == "CosineSimilarityLoss")
    recorded = Recorded(model, getattr(losses, kind)(model))
    loss = PenaltyLoss(model, recorded, istar.IStar(WEIGHT, ZETA), on)
    kept = Gradients()
    fitted = trainer(
        tmp_path, model, loss, data, RefreshCallback(loss), kept, gradient_accumulation_steps=accumulation, max_steps=1
    )
    fitted.train()

    covariance = loss.penalty.shrinkage_covariance
    points = torch.cat([naive_points(base, columns, on) for columns, _ in recorded.calls])
    assert_close(covariance.double(), torch.cov(points.T), rtol=1e-4, atol=1e-6)
    assert len(recorded.calls) == accumulation
    expected_losses, expected_penalties = [], []
    for columns, labels in recorded.calls:
        expected_losses.append(naive_loss(base, columns, labels))
        expected_penalties.append(penalty_of(naive_points(base, columns, on), covariance))
    expected = gradients(base, (torch.stack(expected_losses) + torch.stack(expected_penalties)).mean())
    computed = {name.removeprefix("0.model."): grad for name, grad in kept.first.items()}
    assert_close(computed, expected, **CLOSE)

    logged = fitted.state.log_history[0]
    assert logged["task_loss"] == pytest.approx(torch.stack(expected_losses).mean().item(), abs=1e-3)
    assert logged["penalty"] == pytest.approx(torch.stack(expected_penalties).mean().item(), abs=1e-3)
    assert logged["loss"] == pytest.approx(logged["task_loss"] + logged["penalty"], abs=1e-3)
    assert not model[0].model.config.output_hidden_states


def run_in_process(rank: int, port: int, folder: Path, data: Dataset, on: str) -> None:
    """One of two processes, as torchrun starts them."""
    warnings.simplefilter("ignore")
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    model = encoder(folder)
    recorded = Recorded(model, losses.CosineSimilarityLoss(model))
    loss = PenaltyLoss(model, recorded, istar.IStar(WEIGHT, ZETA), on)
    kept = Gradients()
    settings = {"gradient_accumulation_steps": 2, "max_steps": 1, "ddp_backend": "gloo"}
    # The pooler of BERT has no gradient.
    settings["ddp_find_unused_parameters"] = True
    trainer(folder / "output", model, loss, data, RefreshCallback(loss), kept, **settings).train()
    torch.save((kept.first, recorded.calls, loss.penalty.shrinkage_covariance), folder / f"{rank}.pt")


@pytest.mark.parametrize("on", ["tokens", "pooled"])
def test_over_two_processes_the_penalty_is_that_of_one_cloud(folder, tmp_path, on):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(run_in_process, (port, tmp_path, pairs(16, with_labels=True), on), 2, start_method="fork")
    outcomes = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]

    base = hf.BertModel.from_pretrained(folder).double()
    covariance = outcomes[0][2]
    expected = []
    for step in range(2):
        parts = [calls[step] for _, calls, _ in outcomes]
        cloud = torch.cat([naive_points(base, columns, on) for columns, _ in parts])
        for columns, labels in parts:
            expected.append(naive_loss(base, columns, labels) + penalty_of(cloud, covariance))
    mean = gradients(base, torch.stack(expected).mean())
    for computed, _, _ in outcomes:
        named = {name.removeprefix("module.").removeprefix("0.model."): grad for name, grad in computed.items()}
        assert_close({name: named[name] for name in mean}, mean, **CLOSE)
    assert torch.equal(covariance, outcomes[1][2])


@pytest.mark.slow
def test_a_resumed_training_ends_as_one_that_was_not_interrupted(folder, tmp_path):
    # Checkpoints in the middle of an epoch, whose Sigma_S must be that of the epoch's beginning.
    def fit(resume: Path | None = None) -> dict[str, Tensor]:
        model = encoder(folder)
        loss = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.IStar(WEIGHT, ZETA))
        settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
        fitted = trainer(tmp_path, model, loss, pairs(12), RefreshCallback(loss, num_points=60), **settings)
        fitted.train(resume_from_checkpoint=None if resume is None else str(resume))
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    uninterrupted = fit()
    for step in (2, 3, 4):
        assert_close(fit(tmp_path / f"checkpoint-{step}"), uninterrupted, rtol=0, atol=0)


def test_a_refresh_leaves_the_order_of_the_batches_alone(folder, tmp_path):
    def batches(zeta: float) -> list[Any]:
        model = encoder(folder)
        recorded = Recorded(model, losses.MultipleNegativesRankingLoss(model))
        loss = PenaltyLoss(model, recorded, istar.IStar(WEIGHT, zeta))
        settings = {"num_train_epochs": 2, "batch_sampler": "no_duplicates"}
        trainer(tmp_path, model, loss, pairs(12), RefreshCallback(loss), **settings).train()
        return [[column["input_ids"].tolist() for column in columns] for columns, _ in recorded.calls]

    with_refresh = batches(ZETA)
    assert len(with_refresh) == 6
    assert with_refresh == batches(0)


def test_in_evaluation_there_is_no_penalty_and_with_lambda_0_it_is_0(folder):
    model = encoder(folder)
    loss = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0))
    features = [model.preprocess(["a b", "c d e"]), model.preprocess(["f", "g h"])]
    assert set(loss([dict(each) for each in features], None)) == {"task_loss", "penalty"}
    with torch.no_grad():
        assert set(loss([dict(each) for each in features], None)) == {"task_loss"}
    loss.penalty.weight = 0.0
    assert "penalty" not in loss([dict(each) for each in features], None)


def test_losses_that_compute_embeddings_again_are_refused(folder):
    model = encoder(folder)
    loss = PenaltyLoss(model, losses.CachedMultipleNegativesRankingLoss(model), istar.CosReg(1.0))
    features = [model.preprocess(["a b", "c d e"]), model.preprocess(["f", "g h"])]
    with pytest.raises(istar.UserError, match="CachedMultipleNegativesRankingLoss does not run the model with grad"):
        loss(features, None)
    with pytest.raises(istar.UserError, match="expected one of tokens, pooled"):
        PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0), on="words")


def test_a_real_encoder_is_penalized_on_tokens_and_on_embeddings(minilm):
    model = SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    features = [model.preprocess(["A cat sat.", "It rained."]), model.preprocess(["A cat.", "Rain fell in the night."])]
    tokens = sum(int(each["attention_mask"].sum()) for each in features)
    for on, points in (("tokens", 6 * tokens), ("pooled", 4)):
        loss = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.IStar(-1.0, zeta=0), on)
        components = loss([dict(each) for each in features], None)
        assert loss.penalty.last.points == points
        sum(components.values()).backward()
        assert all(each.grad is not None for name, each in model.named_parameters() if "pooler" not in name)
        model.zero_grad()
