"""Tiny saved models, benchmarks and a text, and the papers' formulas in numpy, for the tests of embedding matrices."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from istar.models import tiny

UNUSED = [f"[unused{number}]" for number in range(5)]
TOKENIZER = tiny.make_tokenizer([*UNUSED, *["the", "cat", "dog", "house", "garden", "sees"]])
ROWS, WIDTH = len(TOKENIZER) + 3, 24
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48
}  # fmt: skip
INPUT = {"bert": "bert.embeddings.word_embeddings.weight", "neox": "gpt_neox.embed_in.weight"}


def build(kind: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    if kind == "bert":  # tied
        model: Any = hf.BertForMaskedLM(hf.BertConfig(**SHAPE))
    else:  # untied
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE, bos_token_id=1, eos_token_id=1))
    with torch.no_grad():  # a mean that is not zero, so that centering changes something
        model.get_input_embeddings().weight.copy_(torch.randn(ROWS, WIDTH) + torch.linspace(-1, 1, WIDTH))
    return model


def save_model(folder: Path, kind: str = "bert", **settings: Any) -> Path:
    build(kind).save_pretrained(folder, **settings)
    TOKENIZER.save_pretrained(folder)
    return folder


def compute_isotropy(matrix: np.ndarray) -> float:
    """Compute I(W) over both signs by its definition."""
    _, vectors = np.linalg.eigh(matrix.T @ matrix)
    z = np.exp(matrix @ np.concatenate([vectors, -vectors], 1)).sum(0)
    return float(z.min() / z.max())


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


PAIRS = [("cat", "dog", 8), ("house", "garden", 7), ("cat", "garden", 1), ("house", "dog", 3), ("the", "sees", 2)]
TEXT = "the cat the dog\n\nthe house sees the cat.\n"


def write_files(folder: Path) -> list[str]:
    """Write two benchmarks in different formats and a text; return the options that name them."""
    (folder / "MEN.txt").write_text("".join(f"{a} {b} {5 * rating}\n" for a, b, rating in PAIRS) + "cat unheard 1\n")
    (folder / "SimLex.txt").write_text("".join(f"{a}\t{b}\tN\t{10 - rating}\n" for a, b, rating in PAIRS[1:]))
    (folder / "text.txt").write_text(TEXT)
    return ["--wordsim", f"men={folder / 'MEN.txt'}", "--wordsim", str(folder / "SimLex.txt")]


def get_embeddings(kind: str = "bert") -> np.ndarray:
    model: Any = build(kind)
    return np.asarray(model.get_input_embeddings().weight.detach().double().numpy())


def compute_forms(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the paper's forms of a matrix by their definitions; return them by name."""
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    centered = matrix - matrix.mean(0)
    top = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, : math.ceil(WIDTH / 100)]
    return {
        "raw": matrix,
        "centered": centered,
        "scaled_centered": matrix - norms * (matrix / norms).mean(0),
        "all_but_the_top": centered - centered @ top @ top.T,
    }
