"""Mean states of documents, checked against a forward pass for each document, and CKA between layers of two models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import istar
from istar.cli.main import main
from istar.errors import UserError
from istar.geometry.collect.mean_states import Examples, Similarity, compare_examples
from istar.geometry.collect.measures_file import EXAMPLES_FILE
from istar.measures.kernel_alignment import cka, cka_with_error
from istar.models import tiny
from istar.texts import demo

TOKENIZER = tiny.make_tokenizer(demo.vocabulary())
WORDS = demo.vocabulary()[:20]


def make_encoder(seed: int, num_layers: int = 2) -> hf.BertModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": len(TOKENIZER)}
    return hf.BertModel(hf.BertConfig(**sizes, num_hidden_layers=num_layers)).eval()


def make_documents(num_documents: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(num_documents)]


def read_examples(model: Any, texts: Any, **options: Any) -> Examples:
    examples = istar.measure(model, texts, tokenizer=TOKENIZER, **options).examples
    assert examples is not None
    return examples


def compare(models: Sequence[Any], texts: Any) -> Similarity:
    first, second = (read_examples(model, texts) for model in models)
    return compare_examples("first", first, "second", second)


def test_mean_states_are_those_of_each_document_alone() -> None:
    """A document of several blocks has the mean of all its tokens, each seen within its block."""
    model, texts = make_encoder(0), make_documents(10)
    examples = read_examples(model, texts, length=8, batch_tokens=32)
    for index, text in enumerate(texts):
        token_ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        blocks = [token_ids[start : start + 6] for start in range(0, len(token_ids), 6)]
        with torch.no_grad():
            outputs = [
                model(
                    torch.tensor([[TOKENIZER.cls_token_id, *block, TOKENIZER.sep_token_id]]), output_hidden_states=True
                )
                for block in blocks
            ]
        for layer, state in enumerate(examples.states.values()):
            expected = torch.cat([output.hidden_states[layer][0, 1:-1] for output in outputs]).mean(0)
            torch.testing.assert_close(state[index], expected, rtol=0, atol=1e-5)


def test_similarity_of_all_layers() -> None:
    texts = make_documents(40)
    models = [make_encoder(0, 1), make_encoder(1)]
    similarity = compare(models, texts)
    assert np.shape(similarity.values) == (2, 3)
    assert similarity.first_taps == ("embeddings", "layer_1")
    assert np.diag(compare([models[1]] * 2, texts).values) == pytest.approx([1, 1, 1], abs=1e-6)
    first, second = (read_examples(model, texts).states for model in models)
    assert similarity.values[1][2] == pytest.approx(cka(first["layer_1"], second["layer_2"]), abs=1e-6)
    most_similar = list(second.values())[np.argmax(similarity.values[1])]
    expected_error = cka_with_error(first["layer_1"], most_similar, 10).error
    assert similarity.errors_of_largest[1] == pytest.approx(expected_error, rel=1e-3)
    assert similarity.num_groups == 10


def test_the_error_leaves_out_the_groups_of_the_examples() -> None:
    """Each document occurs twice, and the groups of the user are two halves; the default has ten groups."""
    texts = [text for text in make_documents(20) for _ in range(2)]
    first, second = (read_examples(make_encoder(seed), texts, groups=[i // 20 for i in range(40)]) for seed in (0, 1))
    similarity = compare_examples("first", first, "second", second)
    assert similarity.num_groups == 2
    states, other_states = first.states["layer_2"], list(second.states.values())[np.argmax(similarity.values[2])]
    halves = [cka(states[rows], other_states[rows]) for rows in (slice(20), slice(20, 40))]
    assert similarity.errors_of_largest[2] == pytest.approx(np.sqrt(np.var(halves)), rel=1e-6)


def test_few_documents_give_no_standard_error() -> None:
    models = [make_encoder(0)] * 2
    for num_documents in (19, 20):
        similarity = compare(models, make_documents(num_documents))
        assert np.isfinite(similarity.errors_of_largest).tolist() == [num_documents == 20] * 3


def test_documents_without_tokens_for_a_model_are_left_out() -> None:
    models, texts = [make_encoder(0), make_encoder(1)], make_documents(6)
    expected = compare(models, texts)
    with_empty = [*texts[:3], "\u200b", *texts[3:]]  # no tokens for a zero-width space
    similarity = compare(models, with_empty)
    assert similarity.documents == 6
    np.testing.assert_allclose(similarity.values, expected.values, rtol=1e-6)
    with pytest.raises(UserError, match=r"CKA needs at least 4 with equal ids"):
        compare(models, [*texts[:3], "\u200b"])


def test_cka_of_a_layer_with_equal_states_is_nan() -> None:
    collapsed = make_encoder(1)
    torch.nn.init.zeros_(collapsed.encoder.layer[-1].output.LayerNorm.weight)
    models = [make_encoder(0), collapsed]
    similarity = compare(models, make_documents(20))
    isnan = np.isnan(similarity.values)
    assert isnan.any(0).tolist() == isnan.all(0).tolist() == [False, False, True]
    assert np.isfinite(similarity.errors_of_largest).all()
    swapped = compare(models[::-1], make_documents(20))
    assert np.isnan(swapped.errors_of_largest).tolist() == [False, False, True]


def test_the_examples_come_evenly_from_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("istar.geometry.measuring.NUM_EXAMPLES", 6)
    examples = read_examples(make_encoder(0), {"short": make_documents(2), "long": make_documents(9, seed=1)})
    assert len(examples.ids) == 2 + 3


def save_models(folder: Path, *encoders: hf.BertModel) -> list[str]:
    for index, encoder in enumerate(encoders):
        encoder.save_pretrained(folder / str(index))
        TOKENIZER.save_pretrained(folder / str(index))
    return [str(folder / str(index)) for index in range(len(encoders))]


@pytest.mark.usefixtures("blank_figures")
def test_the_command_keeps_the_mean_states_of_new_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models, text, page = (
        save_models(tmp_path, make_encoder(0), make_encoder(1)),
        tmp_path / "text.txt",
        tmp_path / "page",
    )
    text.write_text("\n".join(make_documents(30)))
    for _ in range(2):  # the second call finds what the first one has measured
        assert main(["compare", *models, "--text", str(text), "--out", str(page)]) == 0
        assert (page / "tables/similarity.csv").is_file()
    assert capsys.readouterr().err.count("measured before") == 2
    first = istar.load(page / "models/0")
    assert first.examples is not None
    assert len(first.examples.ids) == 30
    (page / "models/0" / EXAMPLES_FILE).unlink()
    assert main(["compare", str(page / "models/0"), models[1], "--text", str(text), "--out", str(tmp_path / "b")]) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: the page lacks the similarity of layers: ")
    assert "has no mean states of examples" in warning
    assert not (tmp_path / "b/tables/similarity.csv").exists()
