"""Sentence embeddings in fewer bits, against numpy, SciPy and sentence-transformers."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from istar.cli.main import main
from istar.errors import NonFiniteError, UserError
from istar.finetune.tasks.loading import load_splits
from istar.inputs import demo, pretrained
from istar.quantization import sentence_codes as codes
from istar.quantization.embedding_scores import get_similarity_task, score_embeddings
from istar.records.config import ModelConfig
from tests.quantization.test_linear_layers import bert


def cloud(rows: int = 40, dimensions: int = 24, seed: int = 0) -> Tensor:
    return torch.randn(rows, dimensions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_int8_is_the_nearest_level() -> None:
    train, points = cloud(), 1.5 * cloud(seed=1)
    ranges = codes.dimension_ranges(train)
    values = codes.int8_values(codes.int8_codes(points, ranges), ranges).numpy()
    for dimension in range(points.shape[1]):
        column = train[:, dimension].numpy()
        levels = np.linspace(column.min(), column.max(), 256)
        nearest = [levels[np.argmin(abs(levels - value))] for value in points[:, dimension].numpy()]
        np.testing.assert_allclose(values[:, dimension], nearest, rtol=0, atol=1e-12)


def test_sentence_transformers_has_the_same_codes() -> None:
    """sentence-transformers rounds codes down, and packs eight signs into a byte."""
    library = pytest.importorskip("sentence_transformers.util.quantization")
    train, points = cloud().float(), 0.5 * cloud(seed=1).float()
    expected = library.quantize_embeddings(points.numpy(), "int8", calibration_embeddings=train.numpy())
    actual = codes.int8_codes(points, codes.dimension_ranges(train)).int().numpy() - 128
    is_in_range = ((points >= train.amin(0)) & (points <= train.amax(0))).numpy()
    assert set(np.unique((actual - expected)[is_in_range])) == {0, 1}
    packed_signs = library.quantize_embeddings(points.numpy(), "ubinary")
    assert np.array_equal(np.unpackbits(packed_signs, axis=1).astype(bool), codes.signs(points).numpy())


def test_hamming_distance_counts_bits() -> None:
    first, second = codes.signs(cloud()), codes.signs(cloud(seed=1))
    expected = [
        sum(a != b for a, b in zip(*rows, strict=True)) for rows in zip(first.tolist(), second.tolist(), strict=True)
    ]
    assert codes.hamming_distance(first, second).tolist() == expected


def test_int8_does_not_know_shifts_and_scales_of_dimensions() -> None:
    train, points = cloud(), cloud(seed=1)
    factors = 2.0 ** torch.arange(-12, 12, dtype=torch.float64)
    offsets = 100 * torch.arange(24, dtype=torch.float64)
    codes_before = codes.int8_codes(points, codes.dimension_ranges(train))
    codes_after = codes.int8_codes(points * factors + offsets, codes.dimension_ranges(train * factors + offsets))
    # The offset costs some of the last digits, so that a number between two levels may fall on the other side.
    assert (codes_before.int() - codes_after.int()).abs().max() <= 1
    assert (codes_before == codes_after).double().mean() > 0.999
    assert (codes.signs(points) != codes.signs(points + offsets)).any()


def test_edges_and_errors() -> None:
    constant = torch.ones(3, 2)
    ranges = codes.dimension_ranges(constant)
    assert torch.equal(codes.int8_values(codes.int8_codes(5 * constant, ranges), ranges), constant)
    states, mask = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [99.0, 99.0]]]), torch.tensor([[1, 1, 0]])
    assert codes.mean_pooled(states, mask).tolist() == [[2.0, 4.0]]
    with pytest.raises(UserError, match="expected 2, as the ranges"):
        codes.int8_codes(torch.ones(2, 3), ranges)
    with pytest.raises(UserError, match="floating"):
        codes.dimension_ranges(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(UserError, match="expected the same"):
        codes.hamming_distance(torch.ones(2, 2) > 0, torch.ones(3, 2) > 0)
    with pytest.raises(NonFiniteError):
        codes.signs(torch.tensor([[float("nan")]]))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random BERT with the vocabulary of the demo tasks; returns its folder."""
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    tokenizer = pretrained.load_tokenizer(ModelConfig(name="tiny", pretrained=False))
    assert len(tokenizer) > len(demo.vocabulary())
    model = bert(vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=64)
    pretrained.save(model, tokenizer, folder)
    return folder


def naive_spearman(folder: Path, num_calibration_pairs: int) -> dict[str, float]:
    """Return the correlations from their definitions, with embeddings of single sentences."""
    tokenizer = pretrained.load_tokenizer(ModelConfig(name=str(folder)))
    model: Any = pretrained.load_encoder(ModelConfig(name=str(folder)), tokenizer, torch.float32)
    spec = get_similarity_task("demo_regression")
    splits = load_splits(spec, None, ["train", "validation"])

    def embed(text: str) -> np.ndarray:
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().mean(0).numpy()

    calibration_rows = torch.randperm(len(splits["train"]), generator=torch.Generator().manual_seed(0))[
        :num_calibration_pairs
    ].tolist()
    train = np.array([embed(splits["train"][row][column]) for row in calibration_rows for column in spec.text_columns])
    first, second = (np.array([embed(text) for text in splits["validation"][column]]) for column in spec.text_columns)
    low, step = train.min(0), (train.max(0) - train.min(0)) / 255

    def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.array([x @ y / np.sqrt((x @ x) * (y @ y)) for x, y in zip(a, b, strict=True)])

    levels = [low + np.clip(np.rint((points - low) / step), 0, 255) * step for points in (first, second)]
    similarity = {
        "float32": cosine(first, second),
        "int8": cosine(*levels),
        "binary": ((first > 0) == (second > 0)).sum(1),
    }
    return {
        form: scipy.stats.spearmanr(values, splits["validation"]["label"]).statistic
        for form, values in similarity.items()
    }


def test_the_scores_of_an_encoder(encoder: Path) -> None:
    scores = score_embeddings(encoder, get_similarity_task("demo_regression"), None, num_calibration_pairs=16, seed=0)
    expected = naive_spearman(encoder, 16)
    # A number on the border between two levels may be rounded either way, as sentences are in batches here.
    assert scores.spearman_by_precision == pytest.approx(expected, abs=5e-4)
    assert scores.spearman_by_precision["float32"] == pytest.approx(expected["float32"], abs=1e-6)
    assert scores.num_dimensions == 32


def test_the_command(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(encoder), "--embeddings", "--task", "demo_regression", "--calibration", "8"]
    assert main([*command, "--out", str(out)]) == 0
    assert "Sentence embeddings" in capsys.readouterr().out
    with (out / "tables" / "embeddings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["form"] for row in rows] == ["float32", "int8", "binary"]
    assert [int(row["bits"]) for row in rows] == [1024, 256, 32]
    assert float(rows[0]["drop"]) == 0
    assert "Quantized embeddings" in (out / "index.html").read_text()
    assert (out / "tables" / "embeddings.md").is_file()
    for options, message in {
        ("--task", "rte"): "--task rte has no pairs of sentences with similarity scores; expected stsb",
        ("--task", "stbs"): "did you mean stsb?",
        ("--control", "rotate"): "--control does not go together with --embeddings",
        ("--forms", "w8a8"): "--forms does not go together",
        ("--out", str(encoder)): f"--out {encoder} would replace files of the input {encoder}",
    }.items():
        assert main([*command, "--out", str(out), *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_encoder_on_sts_b(minilm: Path, real_data: Path) -> None:
    """MiniLM in 8 bits loses next to nothing, and in one bit a few points."""
    scores = score_embeddings(
        minilm, get_similarity_task("stsb"), real_data / "glue_data", num_calibration_pairs=256, seed=0
    )
    assert scores.num_pairs == 1500
    assert scores.num_dimensions == 384
    assert 0.8 < scores.spearman_by_precision["float32"] < 0.9
    assert scores.spearman_by_precision["int8"] == pytest.approx(scores.spearman_by_precision["float32"], abs=0.005)
    assert (
        scores.spearman_by_precision["float32"] - 0.1
        < scores.spearman_by_precision["binary"]
        < scores.spearman_by_precision["float32"]
    )
