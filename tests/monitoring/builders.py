"""A training loop with a monitor on tiny models, and the naive reading of the same passes."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import istar

MEASURES = (
    *("isoscore_unbiased", "inter_sim", "participation_ratio", "average_norm", "outlier_severity"),
    *("largest_activation", "isoscore", "effective_rank"),
)
SHAPE: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50,
    "initializer_range": 0.2, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_bert(**settings: Any) -> Any:
    torch.manual_seed(0)
    settings = {**SHAPE, **NO_DROPOUT, "problem_type": "single_label_classification", **settings}
    return hf.BertForSequenceClassification(hf.BertConfig(**settings)).double()


def make_llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SHAPE, num_key_value_heads=1, bos_token_id=1, eos_token_id=2, use_cache=False, **settings)
    return hf.LlamaForCausalLM(config).double()


def make_batches(num_batches: int, batch_size: int = 6, with_token_labels: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yield batches of random ids of different lengths."""
    for number in range(num_batches):
        generator = torch.Generator().manual_seed(100 + number)
        ids = torch.randint(3, 50, (batch_size, 9), generator=generator)
        lengths = torch.randint(4, 10, (batch_size, 1), generator=generator)
        mask = (torch.arange(9) < lengths).long()
        labels = ids if with_token_labels else ids[:, 0] % 2
        yield {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def read_naively(model: Any, batch: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return the measures of the returned hidden states, without padding, of a model without a final norm."""
    with torch.no_grad():
        outputs = model(**batch, output_hidden_states=True)
    names = ["embeddings", *(f"layer_{number}" for number in range(1, len(outputs.hidden_states)))]
    mask = batch["attention_mask"].bool()
    clouds = {name: state[mask] for name, state in zip(names, outputs.hidden_states, strict=True)}
    table = istar.measure(clouds, measures="basic").table
    largest = {name: float(points.abs().max()) for name, points in clouds.items()}
    return {
        name: {
            measure: largest[name] if measure == "largest_activation" else float(table.loc[name, measure])
            for measure in MEASURES
        }
        for name in names
    }


def train(model: nn.Module, monitor: Any, batches: Sequence[Any], called: nn.Module | None = None) -> list[float]:
    """Train with SGD and call `step`; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = (model if called is None else called)(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
        losses.append(loss.item())
    return losses


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
