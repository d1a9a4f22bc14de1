"""Small models of the architectures whose hidden states are read."""

from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers import PreTrainedModel

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50
}  # fmt: skip
OPT: dict[str, Any] = {**SHAPE, "ffn_dim": 64, "bos_token_id": 1, "eos_token_id": 1}
del OPT["intermediate_size"]
ENDS = {"bos_token_id": 1, "eos_token_id": 1}

Make = Callable[[], PreTrainedModel]
# By architecture: a function that builds the model, the path of its blocks, and the path of its final normalization.
MODELS: dict[str, tuple[Make, str, str | None]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SHAPE)), "encoder.layer", None),
    "albert": (
        lambda: hf.AlbertModel(hf.AlbertConfig(**SHAPE, embedding_size=16, **ENDS)), "encoder.albert_layer_groups", None
    ),
    "distilbert": (
        lambda: hf.DistilBertModel(hf.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=50)),
        "transformer.layer",
        None,
    ),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**SHAPE)), "encoder.layer", None),
    "gpt2": (lambda: hf.GPT2Model(hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=50, **ENDS)), "h", "ln_f"),
    "gpt_neox": (lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**SHAPE, **ENDS)), "layers", "final_layer_norm"),
    "opt": (
        lambda: hf.OPTModel(hf.OPTConfig(**OPT, word_embed_proj_dim=32)), "decoder.layers", "decoder.final_layer_norm"
    ),
    # OPT-350m normalizes within its layers, and projects the output of the last one to the width of the embeddings.
    "opt_350m": (
        lambda: hf.OPTModel(hf.OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False)),
        "decoder.layers",
        None,
    ),
    "falcon": (
        lambda: hf.FalconModel(hf.FalconConfig(**{k: v for k, v in SHAPE.items() if "inter" not in k}, **ENDS)),
        "h",
        "ln_f",
    ),
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**SHAPE, **ENDS)), "layers", "norm"),
}  # fmt: skip
