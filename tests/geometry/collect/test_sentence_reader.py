"""The layers and the pooled embeddings of a sentence-transformers model, against its own `encode` and its encoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from istar.geometry.collect.sentence_reader import SentenceReader
from istar.models import tiny
from istar.texts import demo

SENTENCES = ["the cat sees a dog", "a dog", "does the old dog see a cat ?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny BERT and a tokenizer of whole words."""
    folder, tokenizer = tmp_path_factory.mktemp("bert"), tiny.make_tokenizer(demo.vocabulary())
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=24, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_model(folder: Path, **options: Any) -> SentenceTransformer:
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(12), Normalize()], device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, ""),
        ({"prompts": {"query": "find the cat "}, "default_prompt_name": "query", "truncate_dim": 5}, "find the cat "),
    ],
)
@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
def test_layers_and_embeddings_are_of_one_pass(folder: Path, options: Any, prompt: str, special_tokens: Any) -> None:
    model = make_model(folder, **options)
    model.train()
    with SentenceReader(model, SENTENCES, special_tokens=special_tokens) as reader:
        states, token_ids = reader.read(SENTENCES)
    assert model.training
    assert reader.names == tuple(states) == ("embeddings", "layer_1", "layer_2", "pooled")
    pooled = states.pop("pooled")
    assert pooled.mask is None
    torch.testing.assert_close(pooled.values[:, 0], torch.tensor(model.encode(SENTENCES)), rtol=0, atol=1e-6)
    encoder, tokenizer = model.eval()[0].model, model.tokenizer
    for number, sentence in enumerate(SENTENCES):
        ids = tokenizer(prompt + sentence, return_tensors="pt")["input_ids"]
        length = ids.shape[1]
        with torch.no_grad():
            expected = encoder(ids, output_hidden_states=True).hidden_states
        assert torch.equal(token_ids[number, :length], ids[0])
        counts = torch.arange(token_ids.shape[1]) < length
        if special_tokens == "exclude":
            counts[[0, length - 1]] = False
        for (values, mask), state in zip(states.values(), expected, strict=True):
            torch.testing.assert_close(values[number, :length], state[0], rtol=1e-5, atol=1e-5)
            assert torch.equal(mask[number], counts)


def test_the_model_is_left_as_it_was_after_an_error(folder: Path) -> None:
    model = make_model(folder)
    model.train()
    with pytest.raises(ValueError, match="Unsupported input type: int"), SentenceReader(model, SENTENCES) as reader:
        reader.read([1, 2])
    assert all(module.training for module in model.modules())
    assert "forward" not in vars(model[0].model)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not any("istar" in repr(hook) for hook in hooks)
