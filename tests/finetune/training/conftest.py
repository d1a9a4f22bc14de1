import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from istar.finetune.config import AdamWConfig, DataConfig
from istar.finetune.tasks.evaluation import Evaluator
from istar.finetune.tasks.features import Collator, FeatureRows, featurize
from istar.finetune.training.data import FineTuningData
from istar.finetune.training.module import FineTuner
from istar.hidden_states import HiddenStatePenalty, PenaltySettings
from istar.models import tiny
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.tasks.builders import load_splits
from tests.oracles import algorithm_1


@dataclass
class Setting:
    """The tokenized demo task and a tiny model, of which `module` gives each test a fresh copy."""

    model: Any
    collate: Collator
    train: Any
    validation: Any
    evaluators: dict[str, Evaluator]

    def module(self, regularizer=None, skip_nonfinite=False, **optim) -> FineTuner:
        optim = AdamWConfig(**({"lr": 1e-3} | optim))
        model = copy.deepcopy(self.model)
        settings = PenaltySettings(num_points=5_000)
        penalty = None if regularizer is None else HiddenStatePenalty(model, regularizer, settings)
        return FineTuner(model, penalty, optim, self.evaluators, skip_nonfinite)

    def data(self, batch_size=8, seed=3, **settings) -> FineTuningData:
        config = DataConfig(batch_size=batch_size, eval_batch_size=16, **settings)
        return FineTuningData(FeatureRows(self.train), [FeatureRows(self.validation)], [], self.collate, config, seed)


@pytest.fixture(scope="session")
def setting() -> Setting:
    spec = TASKS["demo"]
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    splits = load_splits(spec, None, ["train", "validation"])
    examples = {"train": splits["train"].select(range(200)), "validation": splits["validation"].select(range(40))}
    features = {
        name: featurize(spec, rows, tokenizer, 64, training=name == "train", cache_dir=None)
        for name, rows in examples.items()
    }
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny.make_tiny_config(len(tokenizer))).train()
    evaluators = {"": Evaluator(spec, examples["validation"], features["validation"])}
    return Setting(model, Collator(tokenizer), features["train"], features["validation"], evaluators)


@torch.no_grad()
def compute_states_by_example(setting, module, rows):
    """Yield the hidden states of each example, computed alone and without padding."""
    model = copy.deepcopy(module.model).eval()
    for row in rows:
        batch = setting.collate([row])
        inputs = {name: value for name, value in batch.items() if name not in ("feature_id", "labels")}
        yield model(**inputs, output_hidden_states=True).hidden_states


def stack_states_by_example(setting, module, rows):
    """Yield the states `(L + 1, tokens, d)` of each example in float64."""
    for states in compute_states_by_example(setting, module, rows):
        yield torch.cat(states).double().numpy()


def compute_measures_naively(points, names):
    """Return measures of a layer's points `(n, d)` by name, from all cosines and the singular values."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    n, norms = len(points), np.linalg.norm(points, axis=1)
    singular = np.linalg.svd(points - points.mean(0), compute_uv=False)
    shares = singular[singular > 0] / singular.sum()
    measures = {
        "isoscore": float(algorithm_1(torch.from_numpy(points))),
        "inter_sim": ((unit @ unit.T).sum() - n) / (n * (n - 1)),
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        "participation_ratio": (singular**2).sum() ** 2 / (singular**4).sum(),
        "average_norm": norms.mean(),
    }
    return {name: measures[name] for name in names}


@pytest.fixture
def start(own_cache):
    from tests.jobs import starting  # which skips the tests where there is no /proc

    with starting(own_cache) as start:
        yield start


class Losses(L.Callback):
    """Records the loss of every micro-batch."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item() * trainer.accumulate_grad_batches)


def trainer(*callbacks, **settings) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "max_epochs": 1,
        "limit_val_batches": 0,
    }
    return L.Trainer(callbacks=list(callbacks), **(defaults | settings))


@pytest.fixture
def harness():
    return SimpleNamespace(Losses=Losses, trainer=trainer)
