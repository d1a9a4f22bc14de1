"""Language models on several processes: the parameters and the metrics of one process with the same global batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from istar.finetune.config import AdamWConfig, DataConfig
from istar.finetune.tasks.blocks import cut_blocks, load_or_tokenize_corpus
from istar.finetune.tasks.language_modelling import (
    BlockCollator,
    BlockRows,
    LanguageModelEvaluator,
    Masking,
    find_block_tokens,
)
from istar.finetune.training.data import FineTuningData
from istar.finetune.training.language_model import LanguageModelTuner
from istar.hidden_states import attach
from istar.models import tiny
from istar.regularizers import CosReg
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.training.conftest import trainer
from tests.forks import compute_in_group

TASK_NAMES = ("clm", "mlm")
BATCH, STEPS = 8, 4


class Sgd(LanguageModelTuner):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.optim.lr, fused=True)


def read_documents() -> list[str]:
    return demo.generate("clm", "validation")["text"][:64]


def make_rows(name: str, documents: list[str], tokenizer: Any, folder: Path) -> BlockRows:
    corpus = load_or_tokenize_corpus(Dataset.from_dict({"text": documents}), tokenizer, folder)
    masking = Masking(tokenizer) if name == "mlm" else None
    # Blocks of one document differ in length, so that processes have different numbers of tokens.
    blocks = cut_blocks(corpus, 24, *find_block_tokens(TASKS[name], tokenizer), packing=False)
    return BlockRows(blocks, masking, seed=3)


def make_model(name: str, vocabulary: int) -> Any:
    torch.manual_seed(0)
    if name == "clm":
        options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocabulary, n_positions=32, n_embd=16, n_layer=2, n_head=2, **options)
        )
    config = tiny.make_tiny_config(vocabulary)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForMaskedLM(config)


def train_and_validate(name: str, world_size: int, folder: Path, documents: list[str]) -> dict[str, Any]:
    """Train for some steps and validate, with global batches of the same size whatever the number of processes."""
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    train, validation = (make_rows(name, part, tokenizer, folder) for part in (documents[:41], documents[41:]))
    validation = validation.take_first(len(validation) - 1 + len(validation) % 2)  # an odd number
    model = make_model(name, len(tokenizer)).double().train()
    module = Sgd(
        model,
        attach(model, CosReg(0.5)),
        AdamWConfig(lr=0.05),
        {"": LanguageModelEvaluator(TASKS[name], len(validation))},
        is_causal=name == "clm",
    )
    collate = BlockCollator(tokenizer.pad_token_id, None, is_causal=name == "clm")
    config = DataConfig(batch_size=BATCH // world_size, eval_batch_size=4, group_by_length=False)
    data = FineTuningData(train, [validation], [], collate, config, seed=3)
    start = parameters_to_vector(module.parameters()).detach().clone()
    distributed_options = {"strategy": "ddp", "devices": world_size} if world_size > 1 else {}
    lightning_trainer = trainer(max_epochs=1, limit_train_batches=STEPS, limit_val_batches=1.0, **distributed_options)
    lightning_trainer.fit(module, datamodule=data)
    return {"start": start, "end": parameters_to_vector(module.parameters()).detach(), "metrics": module.metrics}


def train_on_rank(rank: int, folder: Path, documents: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train_and_validate(name, 2, folder, documents) for name in TASK_NAMES}


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gloo")
    return compute_in_group(train_on_rank, (folder, read_documents()), 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASK_NAMES)
def test_two_processes_equal_one(rank_results: list[dict[str, Any]], name: str, tmp_path: Path) -> None:
    single_result = train_and_validate(name, 1, tmp_path, read_documents())
    assert (single_result["end"] - single_result["start"]).abs().max() > 1e-3
    for rank_result in rank_results:
        assert torch.equal(rank_result[name]["start"], single_result["start"])
        # The losses of tokens are computed in float32.
        assert_close(rank_result[name]["end"], single_result["end"], rtol=0, atol=1e-7)
        assert rank_result[name]["metrics"] == pytest.approx(single_result["metrics"], rel=1e-7)
