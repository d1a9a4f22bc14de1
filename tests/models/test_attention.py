"""Isolation of packed documents, compared with each document alone in the model, without packing or a mask."""

from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from istar.finetune.execute.build_config import make_config
from istar.finetune.tasks.features import Collator, make_position_ids
from istar.models.architectures import is_decoder
from istar.models.attention import accepts_position_ids, isolation, make_isolating_inputs
from istar.texts.new_tokenizer import train_tokenizer

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "gpt2": ("positions", {}), "gpt_neox": ("positions", {"intermediate_size": 64}),
    "llama": ("positions", {"intermediate_size": 64}), "qwen2": ("positions", {"intermediate_size": 64}),
    "qwen3": ("positions", {"intermediate_size": 64, "head_dim": 8}),
    "mistral": ("positions", {"intermediate_size": 64}),
    "gemma": ("positions", {"intermediate_size": 64, "head_dim": 8}), "gptj": ("positions", {"rotary_dim": 4}),
    "phi": ("positions", {"intermediate_size": 64}), "opt": ("mask", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bert": ("mask", {"intermediate_size": 64}), "distilbert": ("mask", {"hidden_dim": 64}),
    "albert": ("mask", {"intermediate_size": 64, "embedding_size": 16}),
    "electra": ("mask", {"intermediate_size": 64, "embedding_size": 16}),
    "modernbert": ("mask", {"intermediate_size": 64, "cls_token_id": 1, "sep_token_id": 1}), "bloom": (None, {}),
    "roberta": (None, {"intermediate_size": 64}), "mpnet": (None, {"intermediate_size": 64}),
}  # fmt: skip


def make_small_model(architecture: str, auto_class: Any = AutoModel) -> PreTrainedModel:
    values = {**SHAPE, **ARCHITECTURES[architecture][1]}
    if architecture == "bloom":
        del values["max_position_embeddings"]
    config = make_config(architecture, values)
    if is_decoder(config):
        config.use_cache = False
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class.from_config(config)
    # The usual initialization is so small that tokens hardly depend on each other.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_have_the_states_that_they_have_alone(architecture: str) -> None:
    model = make_small_model(architecture)
    method = isolation(model)
    assert method == ARCHITECTURES[architecture][0]
    if method is None:
        return
    lengths = [[4, 1, 7], [12]]
    documents = torch.tensor([[0] * 4 + [1] + [2] * 7 + [-1] * 2, [0] * 12 + [-1] * 2])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 50, documents.shape, generator=generator)
    model.double().eval()
    inputs = make_isolating_inputs(method, documents, is_decoder(model.config))
    with torch.no_grad():
        packed = model(ids, **inputs).last_hidden_state
        for row, row_lengths in enumerate(lengths):
            parts = zip(ids[row, :12].split(row_lengths), packed[row, :12].split(row_lengths), strict=True)
            for document, states in parts:
                expected_states = model(document[None]).last_hidden_state[0]
                torch.testing.assert_close(states, expected_states, rtol=1e-6, atol=1e-6)
    assert packed.isfinite().all()


def test_isolation_leaves_no_trace() -> None:
    model = make_small_model("gpt2")
    model.train()
    model.h[1].eval()  # type: ignore[union-attr, index, operator]
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert isolation(model) == "positions"
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_isolation_of_other_data_types() -> None:
    cached = make_small_model("llama")
    cached.config.use_cache = True
    assert isolation(cached) == "mask"
    assert not any(map(accepts_position_ids, (make_small_model("bert"), make_small_model("bloom"))))
    for dtype in (torch.float64, torch.bfloat16):
        assert isolation(make_small_model("llama").to(dtype)) == "positions"
        assert isolation(make_small_model("bert").to(dtype)) == "mask"
        assert isolation(make_small_model("bloom").to(dtype)) is None


def test_isolating_inputs() -> None:
    documents = torch.tensor([[0, 0, 3, -1], [2, 3, 3, 3]])
    inputs = make_isolating_inputs("positions", documents)
    assert list(inputs) == ["position_ids"]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 0], [0, 0, 1, 2]]
    inputs = make_isolating_inputs("mask", documents)
    assert inputs["attention_mask"].shape == (2, 1, 4, 4)
    assert inputs["attention_mask"].dtype == torch.bool
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]]
    assert inputs["attention_mask"][0, 0].int().tolist() == expected
    causal = make_isolating_inputs("mask", documents, is_causal=True)["attention_mask"]
    assert causal[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]]


def test_make_position_ids() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    assert make_position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 1, 1, 1]]


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama", "qwen2", "opt", "gptj"])
def test_padding_on_either_side_gives_the_logits_of_the_text_alone(architecture: str) -> None:
    model: Any = make_small_model(architecture, AutoModelForSequenceClassification).double().eval()
    assert accepts_position_ids(model)
    ids = torch.randint(2, 50, (9,), generator=torch.Generator().manual_seed(1))
    short_ids, padding = ids[:5], torch.zeros(4, dtype=torch.long)
    left_padded = torch.stack([ids, torch.cat([padding, short_ids])])
    right_padded = torch.stack([ids, torch.cat([short_ids, padding])])
    with torch.no_grad():
        expected_logits = torch.cat([model(ids[None]).logits, model(short_ids[None]).logits])
        for batch in (left_padded, right_padded):
            mask = (batch != 0).long()
            logits = model(batch, attention_mask=mask, position_ids=make_position_ids(mask)).logits
            torch.testing.assert_close(logits, expected_logits, rtol=1e-6, atol=1e-6)
        if architecture == "gpt2":
            logits_without_positions = model(left_padded, attention_mask=(left_padded != 0).long()).logits
            assert not torch.allclose(logits_without_positions, expected_logits, rtol=1e-3)


def test_batches_contain_positions_if_they_are_padded_on_the_left() -> None:
    tokenizer: Any = train_tokenizer(["a b c"], 300, "bpe")
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n, "feature_id": n} for n in (2, 4)]
    tokenizer.padding_side = "left"
    batch = Collator(tokenizer, with_positions=True)(rows)
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert "position_ids" not in Collator(tokenizer)(rows)
    tokenizer.padding_side = "right"
    assert "position_ids" not in Collator(tokenizer, with_positions=True)(rows)
