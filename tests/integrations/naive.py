"""What the integrations are compared with: small models in float64, and the loss of a batch written step by step."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.oracles import algorithm_1, stack

WEIGHT, ZETA = -0.7, 0.3
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
SHAPE: dict[str, Any] = {
    "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40
}  # fmt: skip
CONFIGS: dict[str, hf.PreTrainedConfig] = {
    "bert": hf.BertConfig(**SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "albert": hf.AlbertConfig(**SHAPE, **ENDS, embedding_size=8, classifier_dropout_prob=0.0),
    "distilbert": hf.DistilBertConfig(
        dim=12, n_layers=2, n_heads=2, hidden_dim=16, vocab_size=40, dropout=0.0, attention_dropout=0.0,
        seq_classif_dropout=0.0,
    ),
    "gpt2": hf.GPT2Config(
        n_embd=12, n_layer=2, n_head=2, vocab_size=40, **ENDS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": hf.LlamaConfig(**SHAPE, **ENDS),
}  # fmt: skip


def classifier(name: str) -> nn.Module:
    torch.manual_seed(0)
    return hf.AutoModelForSequenceClassification.from_config(CONFIGS[name]).double()


def examples(number: int, tokens: int = 6) -> list[dict[str, Tensor]]:
    """Padded on the right, to different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, tokens + 1, (number,), generator=generator)
    masks = (torch.arange(tokens) < lengths[:, None]).long()
    ids = torch.randint(2, 40, (number, tokens), generator=generator) * masks
    labels = torch.randint(2, (number,), generator=generator)
    return [{"input_ids": ids[i], "attention_mask": masks[i], "labels": labels[i]} for i in range(number)]


def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def task_loss_and_points(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the hidden states of its real tokens, `(n, d)`."""
    output = model(**batch, output_hidden_states=True)
    return output.loss, stack(output.hidden_states[1:], batch["attention_mask"])


def penalty_of(points: Tensor, covariance: Tensor) -> Tensor:
    """lambda (1 - IsoScore*), with the eigenvalues of Algorithm 1."""
    return WEIGHT * (1 - algorithm_1(points, covariance.double(), ZETA, torch.linalg.eigvalsh))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    computed = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, computed, strict=True) if grad is not None}
