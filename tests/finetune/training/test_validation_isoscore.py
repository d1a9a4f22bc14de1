"""IsoScore of the validation data by layer: a layer without variance, and a model with a final norm."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from istar.finetune.config import AdamWConfig, Config
from istar.finetune.execute.run import run
from istar.finetune.training.module import FineTuner
from istar.finetune.training.validation_isoscore import ValidationIsoScore
from istar.geometry.collect.layer_outputs import BlockReader
from istar.measures import isoscore
from istar.models import tiny
from istar.runs.record import read_result
from istar.texts import demo

Build = Callable[..., Config]


def get_run_folder(config: Config, name: str) -> Path:
    return Path(config.run.root) / name


def test_a_layer_without_variance_ends_no_run(small: Build, tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    model = BertModel(BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    torch.nn.init.zeros_(model.encoder.layer[1].output.LayerNorm.weight)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    record = run(small("model=auto", f"model.name={tmp_path / 'model'}", "reg=none"))
    assert record.status == "finished"
    before = record.isotropy["before"]
    assert [layer for layer, score in before.items() if math.isnan(score)] == ["2"]
    assert not math.isnan(record.isotropy["after"]["2"])
    assert read_result(get_run_folder(small(), record.name)).isotropy["before"].keys() == before.keys()


def test_layers_of_gpt2_are_those_of_istar_measure(setting, harness) -> None:
    """Layer L is the output of the last layer, before the final norm, which transformers return after it."""
    vocab_size = setting.model.config.vocab_size
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=vocab_size, n_positions=64, pad_token_id=0,
                        bos_token_id=1, eos_token_id=1)  # fmt: skip
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.uniform_(0.1, 9.0)
    module = FineTuner(model, None, AdamWConfig(), setting.evaluators)
    batch = setting.collate(list(setting.validation)[:5])
    inputs = {name: values for name, values in batch.items() if name not in ("feature_id", "labels")}
    block_reader = BlockReader(copy.deepcopy(model.transformer))
    assert block_reader.names == ("embeddings", "layer_1", "layer_2", "final_norm")
    expected = block_reader(inputs)
    with torch.no_grad():
        states = module.hidden_states(batch)
    assert list(states) == ["0", "1", "2", "final_norm"]
    assert_close(list(states.values()), list(expected.values()), rtol=1e-5, atol=1e-6)
    isotropy, data = ValidationIsoScore(), setting.data()
    trainer = harness.trainer(isotropy, limit_val_batches=1.0)
    trainer.validate(module, datamodule=data, verbose=False)
    points, normed_points = [], []
    for row in setting.validation:
        row_inputs = {name: values for name, values in setting.collate([row]).items() if name in inputs}
        row_states = block_reader(row_inputs)
        points.append(row_states["layer_2"][0])
        normed_points.append(row_states["final_norm"][0])
    assert isotropy.scores["2"] == pytest.approx(isoscore(torch.cat(points)).item(), rel=1e-4)
    # The state after the norm is logged, and is not a layer of the record.
    logged = trainer.callback_metrics
    expected_score = isoscore(torch.cat(normed_points)).item()
    assert logged["isotropy/final_norm/isoscore"].item() == pytest.approx(expected_score, rel=1e-4)
    assert list(isotropy.scores) == ["0", "1", "2", "union"]
