"""Mean states of documents, checked against a forward pass for each document, and CKA between layers of two models."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers as hf

from istar.cli.main import main
from istar.errors import UserError
from istar.geometry.collect.layer_outputs import BlockReader
from istar.geometry.collect.similarity import compute_mean_states, compute_similarities, read_first_documents
from istar.measures.kernel_alignment import cka, cka_with_error
from istar.models import tiny
from istar.models.model_source import ModelSource
from istar.texts import demo
from istar.texts.corpus import Source
from tests.geometry.synthetic import make_measurements, write_measures

TOKENIZER = tiny.make_tokenizer(demo.vocabulary())
WORDS = demo.vocabulary()[:20]


def make_encoder(seed: int, num_layers: int = 2) -> hf.BertModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": len(TOKENIZER)}
    return hf.BertModel(hf.BertConfig(**sizes, num_hidden_layers=num_layers)).eval()


def make_documents(num_documents: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(num_documents)]


def test_mean_states_are_those_of_each_document_alone() -> None:
    model, texts = make_encoder(0), make_documents(10)
    block_reader = BlockReader(model)
    states = compute_mean_states(model, TOKENIZER, texts, length=8, batch_tokens=32)
    for index, text in enumerate(texts):
        encoding = TOKENIZER(text, truncation=True, max_length=8, return_tensors="pt")
        with torch.no_grad():
            state_by_tap = block_reader(encoding)
        for tap, state in state_by_tap.items():
            # The mean is over the tokens without [CLS] and [SEP].
            torch.testing.assert_close(states[tap][index], state[0, 1:-1].mean(0), rtol=0, atol=1e-5)


def test_similarities_of_all_pairs(tmp_path: Path) -> None:
    models = save_models(tmp_path, make_encoder(0, 1), make_encoder(1))
    texts = make_documents(40)
    similarities = compute_similarities([*models, ("again", models[1][1])], texts, 128, "cpu")
    pairs = [("model 0", "model 1"), ("model 0", "again"), ("model 1", "again")]
    assert [(pair.first, pair.second) for pair in similarities] == pairs
    assert np.shape(similarities[0].values) == (2, 3)
    assert similarities[0].first_taps == ("embeddings", "layer_1")
    # The last pair compares a model with itself.
    assert np.diag(similarities[2].values) == pytest.approx([1, 1, 1], abs=1e-6)
    first, second = (compute_mean_states(make_encoder(seed, seed + 1), TOKENIZER, texts, 128) for seed in (0, 1))
    assert similarities[0].values[1][2] == pytest.approx(cka(first["layer_1"], second["layer_2"]), abs=1e-6)
    most_similar = list(second.values())[np.argmax(similarities[0].values[1])]
    expected_error = cka_with_error(first["layer_1"], most_similar, 10).error
    assert similarities[0].errors_of_largest[1] == pytest.approx(expected_error, rel=1e-3)
    assert similarities[0].num_groups == 10


def test_few_documents_give_no_standard_error(tmp_path: Path) -> None:
    models = save_models(tmp_path, make_encoder(0), make_encoder(0))
    for num_documents in (19, 20):
        [similarity] = compute_similarities(models, make_documents(num_documents), 8, "cpu")
        assert np.isfinite(similarity.errors_of_largest).tolist() == [num_documents == 20] * 3


def save_models(folder: Path, *encoders: hf.BertModel) -> list[tuple[str, ModelSource]]:
    for index, encoder in enumerate(encoders):
        encoder.save_pretrained(folder / str(index))
        TOKENIZER.save_pretrained(folder / str(index))
    return [(f"model {index}", ModelSource(str(folder / str(index)))) for index in range(len(encoders))]


def test_documents_without_tokens_for_a_model_are_left_out(tmp_path: Path) -> None:
    models = save_models(tmp_path, make_encoder(0), make_encoder(1))
    texts = make_documents(6)
    # The first tokenizer has no tokens for a zero-width space, and the second has none for digits.
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    backend.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("[0-9]"), "")
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]").save_pretrained(tmp_path / "1")
    [expected] = compute_similarities(models, texts, 8, "cpu")
    [similarity] = compute_similarities(models, [*texts[:3], "\u200b", "12", *texts[3:]], 8, "cpu")
    assert similarity.documents == 6
    assert similarity.values == expected.values
    with pytest.raises(UserError, match="documents with tokens for all models is 3; CKA needs at least 4"):
        compute_similarities(models, [*texts[:3], "\u200b", "12"], 8, "cpu")


def test_cka_of_a_layer_with_equal_states_is_nan(tmp_path: Path) -> None:
    collapsed = make_encoder(1)
    torch.nn.init.zeros_(collapsed.encoder.layer[-1].output.LayerNorm.weight)
    models = save_models(tmp_path, make_encoder(0), collapsed)
    [similarity] = compute_similarities(models, make_documents(20), 8, "cpu")
    isnan = np.isnan(similarity.values)
    assert isnan.any(0).tolist() == isnan.all(0).tolist() == [False, False, True]
    assert np.isfinite(similarity.errors_of_largest).all()
    [swapped] = compute_similarities(models[::-1], make_documents(20), 8, "cpu")
    assert np.isnan(swapped.errors_of_largest).tolist() == [False, False, True]
    with pytest.raises(UserError, match=r"CKA is undefined for all layers, .*; give other texts"):
        compute_similarities(models, ["the dog"] * 20, 8, "cpu")


def test_documents_come_evenly_from_the_texts(tmp_path: Path) -> None:
    for name, count in (("short", 2), ("long", 9)):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {number}" for number in range(count)))
    sources = [Source(name, tmp_path / f"{name}.txt") for name in ("short", "long")]
    assert read_first_documents(sources, 5) == ["short 0", "long 0", "short 1", "long 1", "long 2"]
    assert len(read_first_documents(sources, 100)) == 11
    assert len(read_first_documents(sources[:1], 100)) == 2


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("the dog\nthe cat\n\u200b\na dog", "documents with tokens for all models is 3; CKA needs at least 4"),
        ("the dog\n" * 4, "CKA is undefined for all layers, because"),
    ],
)
def test_comparison_without_cka(text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for label, source in save_models(tmp_path, make_encoder(0), make_encoder(1)):
        model = {"name": source.name, "revision": None, "type": "bert", "dtype": "float32", "device": "cpu"}
        folders.append(str(tmp_path / label))
        write_measures(make_measurements(model=model), tmp_path / label)
    (tmp_path / "text.txt").write_text(text)
    command = ["compare", *folders, "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "page")]
    capsys.readouterr()
    assert main(command) == 0
    captured = capsys.readouterr()
    [warning] = [line for line in captured.err.splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: the page lacks the similarity of layers: ")
    assert reason in warning
    assert "IsoScore" in captured.out
    assert (tmp_path / "page/index.html").is_file()
    assert not (tmp_path / "page/tables/similarity.csv").exists()


def test_too_few_documents_for_cka_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b", "--cka-documents", "3", "--out", str(tmp_path / "page")]) == 2
    assert "--cka-documents 3 is too small; expected 4 or more, or 0 for no CKA" in capsys.readouterr().err
