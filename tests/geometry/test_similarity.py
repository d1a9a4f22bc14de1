"""Mean states of documents, checked against a forward pass for each document, and CKA between layers of two models."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from istar.errors import UserError
from istar.geometry.collect.layer_outputs import Taps
from istar.geometry.collect.similarity import compute_mean_states, compute_similarities, read_first_documents
from istar.inputs import demo, tiny
from istar.inputs.corpus import Source
from istar.measures.alignment import cka, cka_with_error
from istar.records.config import ModelConfig

TOKENIZER = tiny.make_tokenizer(demo.vocabulary())
WORDS = demo.vocabulary()[:20]


def make_encoder(seed: int, num_layers: int = 2) -> hf.BertModel:
    torch.manual_seed(seed)
    return hf.BertModel(
        hf.BertConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=16,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            intermediate_size=32,
        )
    ).eval()


def make_documents(num_documents: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(num_documents)]


def test_mean_states_are_those_of_each_document_alone() -> None:
    model, texts = make_encoder(0), make_documents(10)
    taps = Taps(model)
    states = compute_mean_states(model, TOKENIZER, texts, length=8, batch_tokens=32)
    for index, text in enumerate(texts):
        encoding = TOKENIZER(text, truncation=True, max_length=8, return_tensors="pt")
        with torch.no_grad():
            state_by_tap = taps(encoding)
        for tap, state in state_by_tap.items():
            # The mean is over the tokens without [CLS] and [SEP].
            torch.testing.assert_close(states[tap][index], state[0, 1:-1].mean(0), rtol=0, atol=1e-5)


def test_similarities_of_all_pairs(tmp_path: Path) -> None:
    models = []
    for index, num_layers in enumerate((1, 2, 2)):
        make_encoder(index, num_layers).save_pretrained(tmp_path / str(index))
        TOKENIZER.save_pretrained(tmp_path / str(index))
        models.append((f"model {index}", ModelConfig(name=str(tmp_path / str(index)))))
    texts = make_documents(40)
    similarities = compute_similarities([*models[:2], ("again", models[1][1])], texts, 128, "cpu")
    assert [(pair.first, pair.second) for pair in similarities] == [
        ("model 0", "model 1"),
        ("model 0", "again"),
        ("model 1", "again"),
    ]
    assert np.shape(similarities[0].values) == (2, 3)
    assert similarities[0].first_taps == ("embeddings", "layer_1")
    # The last pair compares a model with itself.
    assert np.diag(similarities[2].values) == pytest.approx([1, 1, 1], abs=1e-6)
    first, second = (
        compute_mean_states(make_encoder(index, num_layers), TOKENIZER, texts, 128)
        for index, num_layers in ((0, 1), (1, 2))
    )
    assert similarities[0].values[1][2] == pytest.approx(cka(first["layer_1"], second["layer_2"]), abs=1e-6)
    most_similar = list(second.values())[np.argmax(similarities[0].values[1])]
    expected_error = cka_with_error(first["layer_1"], most_similar, 10).error
    assert similarities[0].errors_of_largest[1] == pytest.approx(expected_error, rel=1e-3)
    assert similarities[0].num_groups == 10


def test_few_documents_give_no_standard_error(tmp_path: Path) -> None:
    make_encoder(0).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path))
    (similarity,) = compute_similarities([("first", config), ("again", config)], make_documents(19), 8, "cpu")
    assert np.isnan(similarity.errors_of_largest).all()
    (similarity,) = compute_similarities([("first", config), ("again", config)], make_documents(20), 8, "cpu")
    assert np.isfinite(similarity.errors_of_largest).all()


def test_documents_come_evenly_from_the_texts(tmp_path: Path) -> None:
    for name, count in (("short", 2), ("long", 9)):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {number}" for number in range(count)))
    sources = [Source(name, tmp_path / f"{name}.txt") for name in ("short", "long")]
    assert read_first_documents(sources, 5) == ["short 0", "long 0", "short 1", "long 1", "long 2"]
    assert len(read_first_documents(sources, 100)) == 11
    with pytest.raises(UserError, match="the texts have 2 documents; CKA needs at least 4"):
        read_first_documents(sources[:1], 100)
