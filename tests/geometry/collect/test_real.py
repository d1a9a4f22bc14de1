"""`istar measure` on a real encoder and real sentences, checked against naive computations."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from istar.cli.main import main
from tests.geometry.collect.test_stream import compute_naive_measures

pytestmark = pytest.mark.slow

SENTENCES, LENGTH = 16, 64


@pytest.fixture(scope="module")
def sentences(real_data: Path) -> list[str]:
    path = real_data / "glue_data" / "RTE" / "train.tsv"
    lines = path.read_text(encoding="utf-8").splitlines()[1 : SENTENCES + 1]
    return [line.split("\t")[1].strip() for line in lines]


@pytest.fixture(scope="module")
def measures_folder(minilm: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    (folder / "rte.txt").write_text("\n".join(sentences), encoding="utf-8")
    out = folder / "geometry"
    arguments = ["--text", str(folder / "rte.txt"), "--length", str(LENGTH), "--dtype", "float64", "--device", "cpu"]
    assert main(["measure", str(minilm), *arguments, "--measures", "all", "--out", str(out)]) == 0
    return out


def compute_states(folder: Path, sentences: list[str]) -> tuple[list[Any], Any]:
    """Return the hidden states by layer and the tokens of all sentences, without special tokens, piece by piece."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    layers: list[list[Any]] = [[] for _ in range(model.config.num_hidden_layers + 1)]
    tokens: list[int] = []
    for sentence in sentences:
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids), LENGTH - 2):
            piece_ids = ids[start : start + LENGTH - 2]
            with torch.no_grad():
                inputs = torch.tensor([[tokenizer.cls_token_id, *piece_ids, tokenizer.sep_token_id]])
                states = model(inputs, output_hidden_states=True).hidden_states
            for layer_states, state in zip(layers, states, strict=True):
                layer_states.append(state[0, 1:-1].numpy())
            tokens += piece_ids
    return [np.concatenate(parts) for parts in layers], np.array(tokens)


def test_each_layer(measures_folder: Path, minilm: Path, sentences: list[str]) -> None:
    layers, tokens = compute_states(minilm, sentences)
    with (measures_folder / "measures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["embeddings", *(f"layer_{number}" for number in range(1, 7))]
    for row, points in zip(rows, layers, strict=True):
        for name, expected in {**compute_naive_measures(points, tokens), **compute_further_measures(points)}.items():
            # There are too few tokens for 384 dimensions, so that the smallest singular values are rounding errors.
            assert float(row[name]) == pytest.approx(expected, rel=1e-6), (row["layer"], name)


def compute_further_measures(points: Any) -> dict[str, float]:
    """Compute the measures that `compute_naive_measures` lacks, except TwoNN; return them by name."""
    n, d = points.shape
    centered = points - points.mean(0)
    covariance = centered.T @ centered / (n - 1)
    square, trace = np.sum(covariance**2), np.trace(covariance)
    q = np.sum(np.sum(centered**2, 1) ** 2) / (n - 1)
    a = (n - 1) / (n * (n - 2) * (n - 3))
    unbiased_square = a * ((n - 1) * (n - 2) * square + trace**2 - n * q)
    unbiased_squared_trace = a * (2 * square + (n**2 - 3 * n + 1) * trace**2 - n * q)
    norms = np.linalg.norm(points, axis=1)
    return {
        "isoscore_unbiased": (unbiased_squared_trace / unbiased_square - 1) / (d - 1),
        "mean_direction_norm": np.linalg.norm((points / norms[:, None]).mean(0)),
        "norm_ratio": np.linalg.norm(points.mean(0)) / norms.mean(),
        "outlier_dimensions": np.sum(np.abs(points.mean(0)) > 5 * np.median(points.std(0, ddof=1))),
    }


def test_the_embedding_matrix(measures_folder: Path, minilm: Path) -> None:
    matrix = AutoModel.from_pretrained(minilm, dtype=torch.float64).get_input_embeddings().weight
    matrix = matrix.detach().numpy()
    measures_by_form = json.loads((measures_folder / "measures.json").read_text())["matrices"]["input"]
    for form, rows in (("raw", matrix), ("centered", matrix - matrix.mean(0))):
        directions = np.linalg.eigh(rows.T @ rows)[1]
        scores = rows @ np.concatenate([directions, -directions], axis=1)
        log_z = np.log(np.exp(scores - scores.max(0)).sum(0)) + scores.max(0)
        assert measures_by_form[form]["partition_isotropy_both"] == pytest.approx(
            np.exp(log_z.min() - log_z.max()), rel=1e-6
        )
        assert measures_by_form[form]["average_norm"] == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-9)
        singular_values = np.linalg.svd(rows, compute_uv=False)
        assert measures_by_form[form]["singular_values"] == pytest.approx(singular_values, rel=1e-6)
