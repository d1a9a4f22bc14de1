"""Small models, examples of unequal lengths, and naive losses and gradients that integrations are compared with."""

import copy
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from istar import PenaltySettings
from tests.oracles import algorithm_1, stack

WEIGHT, ZETA = -0.7, 0.3
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def make_settings(refresh: str | int | None = "epoch", **settings: Any) -> PenaltySettings:
    """Return settings with a refresh of Sigma_S before each epoch, also every n steps, or never (None)."""
    interval = refresh if isinstance(refresh, int) else None
    return PenaltySettings(refresh=refresh is not None, refresh_every_n_steps=interval, **settings)


SHAPE: dict[str, Any] = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SHAPE, **NO_DROPOUT, "pad_token_id": 0}
GPT2: dict[str, Any] = {
    "n_embd": 12, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32, **SPECIAL_IDS
} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # fmt: skip
DISTILBERT = {"dim": 12, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "vocab_size": 40, "max_position_embeddings": 32}
LLAMA = {**SHAPE, **SPECIAL_IDS, "num_key_value_heads": 1}

MODELS = {
    "bert classification": lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT)),
    "bert question answering": lambda: hf.BertForQuestionAnswering(hf.BertConfig(**BERT)),
    "albert classification": lambda: hf.AlbertForSequenceClassification(
        hf.AlbertConfig(**BERT, bos_token_id=1, eos_token_id=1, embedding_size=6, classifier_dropout_prob=0.0)
    ),
    "distilbert classification": lambda: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(**DISTILBERT, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, pad_token_id=0)
    ),
    "gpt2 language model": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gpt2 classification": lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2)),
    "llama language model": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "llama classification": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**LLAMA)),
}


def make_model(name: str) -> hf.PreTrainedModel:
    torch.manual_seed(5)
    return MODELS[name]().double()


def make_classifier(name: str) -> hf.PreTrainedModel:
    return make_model(f"{name} classification")


def make_sigma(dim: int = 12) -> Tensor:
    root = torch.randn(dim, dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return root @ root.T / dim


def make_examples(name: str, count: int = 64) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    examples = []
    for index in range(count):
        length = int(torch.randint(3, 9, (), generator=generator))
        tokens = torch.randint(2, 40, (length,), generator=generator).tolist()
        example: dict[str, Any] = {"input_ids": tokens}
        if "question" in name:
            example |= {"start_positions": index % 3, "end_positions": length - 1}
        else:
            example["labels"] = tokens if "language" in name else index % 2
        examples.append(example)
    return examples


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch of the examples, padded to the longest one."""
    length = max(len(example["input_ids"]) for example in examples)

    def pad(rows: list[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (length - len(row)) for row in rows])

    rows = [example["input_ids"] for example in examples]
    batch = {"input_ids": pad(rows, 0), "attention_mask": pad([[1] * len(row) for row in rows], 0)}
    for name in set(examples[0]) - {"input_ids"}:
        values = [example[name] for example in examples]
        batch[name] = pad(values, -100) if isinstance(values[0], list) else torch.tensor(values)
    return batch


SGD: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 1,
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Plain SGD with learning rate 1: a step changes the parameters by minus the gradient."""


def sgd_arguments(folder: Any, **arguments: Any) -> hf.TrainingArguments:
    return hf.TrainingArguments(str(folder), **(SGD | {"remove_unused_columns": False} | arguments))


def task_loss(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of a batch of classification or question answering."""
    if "start_positions" in batch:
        start = functional.cross_entropy(outputs.start_logits, batch["start_positions"])
        return (start + functional.cross_entropy(outputs.end_logits, batch["end_positions"])) / 2
    return functional.cross_entropy(outputs.logits, batch["labels"])


def expected_gradient(
    model: nn.Module,
    steps: list[list[dict[str, Tensor]]],
    weight: float,
    sigma: Tensor,
    zeta: float,
    factor: float = 1.0,
    num_items: Tensor | None = None,
) -> dict[str, Tensor]:
    """The gradient of the mean over micro-batches of (task loss + penalty), times a factor.

    Args:
        steps: for each micro-step the batches of all processes, whose points are one cloud.
        weight: lambda.
        sigma: Sigma_S.
        zeta: weight of Sigma_S.
        factor: factor by which Trainer multiplies the mean.
        num_items: number of tokens to predict in all batches, as Trainer counts them; for language models.
    """
    model = copy.deepcopy(model).train()
    model.zero_grad()
    batches = [batch for step in steps for batch in step]
    is_language_model = batches[0].get("labels", torch.zeros(1)).dim() == 2
    total = torch.zeros((), dtype=torch.float64)
    for step in steps:
        points = []
        for batch in step:
            if is_language_model:
                outputs = model(**batch, num_items_in_batch=num_items, output_hidden_states=True)
                total = total + outputs.loss
            else:
                outputs = model(**batch, output_hidden_states=True)
                total = total + task_loss(outputs, batch) / len(batches)
            points.append(stack(outputs.hidden_states[1:], batch.get("attention_mask")))
        score = algorithm_1(torch.cat(points), sigma, zeta, torch.linalg.eigvalsh)
        total = total + weight * (1 - score) / len(steps)
    (factor * total).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def task_loss_and_points(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the hidden states of its real tokens, `(n, d)`."""
    output = model(**batch, output_hidden_states=True)
    return output.loss, stack(output.hidden_states[1:], batch["attention_mask"])


def compute_penalty(points: Tensor, covariance: Tensor) -> Tensor:
    """lambda (1 - IsoScore*), with the eigenvalues of Algorithm 1."""
    return WEIGHT * (1 - algorithm_1(points, covariance.double(), ZETA, torch.linalg.eigvalsh))


def compute_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    computed = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, computed, strict=True) if grad is not None}
