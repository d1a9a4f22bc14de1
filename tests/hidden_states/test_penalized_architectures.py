"""The hidden states that a penalty gets, for every architecture and head, are those that the model returns."""

import copy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from istar.errors import UserError
from istar.hidden_states import attach
from istar.regularizers import IStar
from tests.hidden_states.builders import check_states_and_gradients
from tests.penalties import WIDTH, assert_equal, received, seeded_pass

LAYERS, VOCABULARY = 3, 40
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCABULARY, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
POSITIONS = {"max_position_embeddings": 64}
HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "LM")


class Architecture(NamedTuple):
    """One architecture of transformers: `prefix` and `lm` name its classes, and `settings` make it small."""

    prefix: str
    lm: str
    settings: dict[str, Any]
    heads: tuple[str, ...] = HEADS
    is_decoder: bool = False


def encoder(prefix: str, **settings: Any) -> Architecture:
    return Architecture(prefix, f"{prefix}ForMaskedLM", {**SHAPE, **POSITIONS, **settings})


def decoder(prefix: str, lm: str = "ForCausalLM", heads: tuple[str, ...] = HEADS, **settings: Any) -> Architecture:
    return Architecture(prefix, f"{prefix}{lm}", {**SHAPE, **settings}, heads, is_decoder=True)


ARCHITECTURES = {
    "bert": encoder("Bert"),
    "albert": encoder("Albert", embedding_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
    "distilbert": encoder("DistilBert", dim=WIDTH, n_layers=LAYERS, n_heads=2, hidden_dim=24),
    "roberta": encoder("Roberta"),
    "xlm_roberta": encoder("XLMRoberta"),
    "electra": encoder("Electra", embedding_size=8),
    "deberta_v2": encoder("DebertaV2", relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"]),
    "mpnet": encoder("MPNet"),
    "modernbert": encoder("ModernBert", global_attn_every_n_layers=2, local_attention=4, cls_token_id=1, sep_token_id=2,
                          embedding_dropout=0.1, attention_dropout=0.1, mlp_dropout=0.1),
    "longformer": encoder("Longformer", attention_window=4),
    "big_bird": encoder("BigBird", attention_type="original_full"),
    "gpt2": decoder("GPT2", "LMHeadModel", n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_inner=24),
    "gpt_neox": decoder("GPTNeoX", hidden_dropout=0.1, attention_dropout=0.1),
    "opt": decoder("OPT", heads=tuple(head for head in HEADS if head != "ForTokenClassification"),
                   ffn_dim=24, word_embed_proj_dim=WIDTH, init_std=0.2),
    "llama": decoder("Llama", num_key_value_heads=1, attention_dropout=0.1),
    "qwen3": decoder("Qwen3", num_key_value_heads=1, head_dim=8, attention_dropout=0.1),
    "bloom": decoder("Bloom", n_layer=LAYERS, n_head=2, hidden_dropout=0.1),
}  # fmt: skip

# These declare their layers as BERT, GPT-2 or Llama do.
ALIKE = ("roberta", "xlm_roberta", "electra", "mpnet", "big_bird", "gpt_neox", "qwen3")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in ARCHITECTURES]


@cache
def build_model(name: str, head: str) -> hf.PreTrainedModel:
    architecture = ARCHITECTURES[name]
    config = getattr(hf, f"{architecture.prefix}Config")(**architecture.settings)
    torch.manual_seed(0)
    model = getattr(hf, architecture.lm if head == "LM" else f"{architecture.prefix}{head}")(config).double()
    # Biases and norms start as constants, which would hide a gradient that is applied to the wrong one.
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def make_batch(name: str, head: str, is_left_padded: bool = False, tokens: int = 7) -> dict[str, Tensor]:
    """Return three examples of unequal length with the labels of the head."""
    mask = (torch.arange(tokens) < torch.tensor([tokens, 4, 2])[:, None]).long()
    mask = mask.flip(1) if is_left_padded else mask
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(3, VOCABULARY, (3, tokens), generator=generator) * mask
    first_tokens = mask.argmax(1)
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if name == "longformer":
        # Without a global token, the padding at the end of a text sees nothing, and its gradient is NaN.
        inputs["global_attention_mask"] = (torch.arange(tokens) == first_tokens[:, None]).long()
    labels: dict[str, dict[str, Tensor]] = {
        "Model": {},
        "ForSequenceClassification": {"labels": torch.tensor([0, 1, 1])},
        "ForTokenClassification": {"labels": (input_ids % 2).masked_fill(mask == 0, -100)},
        "ForQuestionAnswering": {"start_positions": first_tokens, "end_positions": first_tokens + 1},
        "LM": {"labels": input_ids.masked_fill(mask == 0, -100)},
    }
    return {**inputs, **labels[head]}


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_naive_one_in_training_and_in_evaluation(name):
    architecture = ARCHITECTURES[name]
    is_padded_left = architecture.is_decoder and name != "bloom"
    for head, is_training, layers in (("LM", True, "all"), ("Model", False, "with_embeddings")):
        model = build_model(name, head).train(is_training)
        inputs = make_batch(name, head, is_padded_left and is_training)
        assert len(check_states_and_gradients(model, inputs, layers)) == LAYERS + 1


@pytest.mark.parametrize("name", NAMES)
def test_the_penalty_of_a_model_with_any_head_sees_what_the_model_returns(name):
    for head in [head for head in ARCHITECTURES[name].heads if head not in ("Model", "LM")]:
        model, inputs = build_model(name, head).train(), make_batch(name, head)
        states = seeded_pass(model, inputs, 1, output_hidden_states=True).hidden_states
        assert_equal(received(model, inputs, "with_embeddings", seed=1), states)


def test_bloom_padded_on_the_left_is_seen_in_float32():
    """Its float32 softmax makes NaN of a float64 row without any token to attend to."""
    model, inputs = (
        copy.deepcopy(build_model("bloom", "LM")).float().train(),
        make_batch("bloom", "LM", is_left_padded=True),
    )
    states = seeded_pass(model, inputs, 1, output_hidden_states=True).hidden_states
    assert_equal(received(model, inputs, "with_embeddings", seed=1), states)


# Layers that are skipped, and texts that are padded inside of the model ---------------------------------------


def build_layerdrop_model(rate: float = 0.4) -> hf.PreTrainedModel:
    """Return an OPT that skips each layer with probability `rate`."""
    model = copy.deepcopy(build_model("opt", "LM")).train()
    model.get_decoder().layerdrop = rate
    return model


def find_executed_layers(model: hf.PreTrainedModel, inputs: dict[str, Tensor], seed: int) -> list[int]:
    """Return the numbers of the layers that layerdrop does not skip with a seed; the first layer is number 1."""
    executed_layers: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, layer_number=layer_number: executed_layers.append(layer_number))
        for layer_number, layer in enumerate(model.get_decoder().layers, 1)
    ]
    seeded_pass(model, inputs, seed)
    for handle in handles:
        handle.remove()
    return executed_layers


def test_with_layerdrop_the_penalty_sees_what_the_model_returns():
    model, inputs, state_counts = build_layerdrop_model(), make_batch("opt", "LM", is_left_padded=True), set()
    for seed in range(6):
        state_counts.add(
            len(check_states_and_gradients(model, inputs, "all", seed))
            if find_executed_layers(model, inputs, seed)
            else 0
        )
    assert {2, 3, 4} <= state_counts


def test_layerdrop_does_not_shift_the_numbers_of_layers():
    """Layer L is the state behind the final norm, which is made of the output of the last layer that ran."""
    model, inputs, executed_combinations = build_layerdrop_model(), make_batch("opt", "LM"), set()
    for seed in range(12):
        executed_layers = find_executed_layers(model, inputs, seed)
        if tuple(executed_layers) in executed_combinations:
            continue
        executed_combinations.add(tuple(executed_layers))
        states = seeded_pass(model, inputs, seed, output_hidden_states=True).hidden_states
        for layer_number in range(1, LAYERS + 1):
            if not executed_layers:
                expected = []
            elif layer_number == LAYERS:
                expected = [states[-1]]
            else:
                expected = (
                    [states[executed_layers.index(layer_number) + 1]] if layer_number in executed_layers[:-1] else []
                )
            assert_equal(received(model, inputs, [layer_number], seed), expected)
    assert executed_combinations >= {(1, 3), (2, 3), (1, 2), (1,), ()}


def test_a_pass_whose_layers_are_all_skipped_has_no_penalty():
    model, inputs, penalty = build_layerdrop_model(0.0), make_batch("opt", "LM"), IStar(1.0, zeta=0)
    with attach(model, penalty) as watch:
        model(**inputs)
        assert watch.loss() != 0
        assert watch.terms().keys() == {"penalty", "isoscore", "points"}
        model.get_decoder().layerdrop = 1.0
        model(**inputs)
        loss = watch.loss()
    assert loss == 0
    assert not loss.requires_grad
    # The terms of the pass before are not logged again.
    assert penalty.last is None
    assert watch.terms(loss).keys() == {"task_loss"}


@pytest.mark.parametrize("tokens", [5, 8])
def test_longformer_returns_its_states_without_the_padding_of_its_windows(tokens):
    states = check_states_and_gradients(
        build_model("longformer", "LM").train(), make_batch("longformer", "LM", tokens=tokens), "with_embeddings"
    )
    assert {state.shape[1] for state in states} == {tokens}


def test_big_bird_in_blocks_is_seen_where_its_states_fit_the_mask_and_refused_where_they_are_longer():
    architecture = ARCHITECTURES["big_bird"]
    torch.manual_seed(0)
    sparse_settings = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    model = hf.BigBirdForMaskedLM(hf.BigBirdConfig(**{**architecture.settings, **sparse_settings})).double().train()
    np.random.seed(0)  # of the random blocks
    inputs = make_batch("big_bird", "LM", tokens=20)
    states = seeded_pass(model, inputs, 1, output_hidden_states=True).hidden_states
    assert model.bert.attention_type == "block_sparse"
    np.random.seed(0)
    assert_equal(received(model, inputs, "with_embeddings", seed=1), states)
    with attach(model, IStar(1.0, zeta=0)) as watch:
        with pytest.raises(UserError, match=r"mask has shape \(3, 21\) and the hidden states have shape \(3, 22, 16\)"):
            model(**make_batch("big_bird", "LM", tokens=21))
        with pytest.raises(UserError, match="no forward pass was read"):
            watch.loss()
