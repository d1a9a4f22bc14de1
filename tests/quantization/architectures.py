"""Tiny random models, with a head for three classes, of the architectures that docs/quantization.md names."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.quantization.test_linear_layers import albert, bert, distilbert

SHAPE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
FEED_FORWARD: dict[str, Any] = {**SHAPE, "intermediate_size": 24}
RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": 16}


def make_random_model(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config).eval()


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "roberta": lambda: make_random_model(hf.RobertaForSequenceClassification, hf.RobertaConfig(**FEED_FORWARD)),
    "electra": lambda: make_random_model(
        hf.ElectraForSequenceClassification, hf.ElectraConfig(**FEED_FORWARD, embedding_size=8)
    ),
    "deberta-v2": lambda: make_random_model(
        hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config(**FEED_FORWARD, **RELATIVE)
    ),
    "deberta-v3": lambda: make_random_model(
        hf.DebertaV2ForSequenceClassification,
        hf.DebertaV2Config(
            **FEED_FORWARD, **RELATIVE, share_att_key=True, position_buckets=4, norm_rel_ebd="layer_norm"
        ),
    ),
    "albert": albert,
    "distilbert": distilbert,
    "llama": lambda: make_random_model(hf.LlamaForSequenceClassification, hf.LlamaConfig(**FEED_FORWARD)),
    "opt": lambda: make_random_model(
        hf.OPTForSequenceClassification,
        hf.OPTConfig(
            **{name: value for name, value in SHAPE.items() if name != "initializer_range"},
            ffn_dim=24, word_embed_proj_dim=16, init_std=0.3,
        ),
    ),
}  # fmt: skip
"""Architectures with both controls."""
