"""Language models on several processes: the parameters and the metrics of one process with the same global batches."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from istar.config import DataConfig, OptimConfig
from istar.models import tiny
from istar.regularizers import CosReg, attach
from istar.tasks import demo
from istar.tasks.language_modelling import (
    BlockCollator,
    BlockRows,
    LanguageModelEvaluator,
    cut_into_blocks,
    load_or_tokenize_corpus,
)
from istar.tasks.masking import Masking
from istar.tasks.specs import TASKS
from istar.training import FineTuningData
from istar.training.language_model import LanguageModelTuner
from tests.forks import run_in_processes
from tests.training.conftest import trainer

TASK_NAMES = ("clm", "mlm")
BATCH, STEPS = 8, 6


class Sgd(LanguageModelTuner):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.optim.lr, fused=True)


def rows_of(name: str, split: str, count: int, tokenizer: Any, folder: Path) -> BlockRows:
    documents = Dataset.from_dict({"text": demo.generate(name, split)["text"][:count]})
    corpus = load_or_tokenize_corpus(documents, tokenizer, folder)
    masking = Masking(tokenizer) if name == "mlm" else None
    # Blocks of one document differ in length, so that processes have different numbers of tokens.
    return BlockRows(cut_into_blocks(TASKS[name], corpus, tokenizer, 24, packing=False), masking, seed=3)


def model_of(name: str, vocabulary: int) -> Any:
    torch.manual_seed(0)
    if name == "clm":
        options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocabulary, n_positions=32, n_embd=16, n_layer=2, n_head=2, **options)
        )
    config = tiny.make_config(vocabulary)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForMaskedLM(config)


def outcome(name: str, world_size: int, folder: Path) -> dict[str, Any]:
    """Train for some steps and validate, with global batches of the same size whatever the number of processes."""
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    train, validation = (rows_of(name, split, 41, tokenizer, folder) for split in ("train", "validation"))
    validation = validation.take_first(len(validation) - 1 + len(validation) % 2)  # an odd number
    model = model_of(name, len(tokenizer)).double().train()
    module = Sgd(
        model,
        attach(model, CosReg(0.5)),
        OptimConfig(lr=0.05),
        {"": LanguageModelEvaluator(TASKS[name], len(validation))},
        is_causal=name == "clm",
    )
    collate = BlockCollator(tokenizer.pad_token_id, None, is_causal=name == "clm")
    config = DataConfig(batch_size=BATCH // world_size, eval_batch_size=4, group_by_length=False)
    data = FineTuningData(train, [validation], [], collate, config, seed=3)
    start = parameters_to_vector(module.parameters()).detach().clone()
    processes = {"strategy": "ddp", "devices": world_size} if world_size > 1 else {}
    fitted = trainer(max_epochs=1, limit_train_batches=STEPS, limit_val_batches=1.0, **processes)
    fitted.fit(module, datamodule=data)
    return {"start": start, "end": parameters_to_vector(module.parameters()).detach(), "metrics": module.metrics}


def work(rank: int, world_size: int, folder: str) -> None:
    # With LOCAL_RANK set, Lightning does not start processes and joins the existing process group.
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save({name: outcome(name, world_size, Path(folder)) for name in TASK_NAMES}, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gloo")
    run_in_processes(work, (2, str(folder)), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", TASK_NAMES)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], name: str, tmp_path: Path) -> None:
    alone = outcome(name, 1, tmp_path)
    assert (alone["end"] - alone["start"]).abs().max() > 1e-3
    for rank in ranks:
        assert torch.equal(rank[name]["start"], alone["start"])
        # The losses of tokens are computed in float32.
        assert_close(rank[name]["end"], alone["end"], rtol=0, atol=1e-7)
        assert rank[name]["metrics"] == pytest.approx(alone["metrics"], rel=1e-7)
