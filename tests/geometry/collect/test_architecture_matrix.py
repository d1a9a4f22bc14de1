"""Which states are which layer, for the architectures of transformers: the instrument and a penalty read the same.

Independent hooks on the blocks say what is right: layer 0 is the input of the first block, layer i is the output of
block i, and the state after the final norm is the model's last hidden state.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from istar.errors import UserError
from istar.geometry.collect.batch_reader import BatchReader
from istar.geometry.collect.layer_outputs import BlockReader
from istar.hidden_states.model_layers import find_layers
from istar.hidden_states.reader import HiddenStateReader
from istar.measures.norms import norm_parameters
from istar.models.architectures import find_max_input_length
from tests.architectures import MODELS

VOCABULARY, WIDTH, LAYERS = 50, 16, 3
IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE: dict[str, Any] = {
    **IDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 40,
}  # fmt: skip
GPT: dict[str, Any] = {**IDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_positions": 40}
KEY_VALUES = {**SHAPE, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {
    **KEY_VALUES, "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
SSM: dict[str, Any] = {**IDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
MIXER = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
SEQ2SEQ: dict[str, Any] = {
    **IDS, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 40,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "num_layers": LAYERS, "num_heads": 2, "d_ff": 24
}  # fmt: skip


ONE_PLUS_WEIGHT = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "recurrent_gemma")


class Case(NamedTuple):
    """A tiny model: its settings, the path of its blocks, and the path of its final norm, if it has one."""

    settings: dict[str, Any]
    blocks: str  # path of the list of blocks, or of a module of each, with * for its number
    norm: str | None = None
    first: str | None = None  # path of the module whose input are the embeddings; by default the first block
    # Converts what a block computes to (batch, tokens, d).
    layout: Callable[[Tensor], Tensor] = lambda states: states
    refusal: str = ""  # what the one line says of a model whose layers cannot be read


def bert(norm: str | None = None, **settings: Any) -> Case:
    return Case({**SHAPE, **settings}, "encoder.layer", norm)


def llama(norm: str = "norm", shape: dict[str, Any] = KEY_VALUES, **settings: Any) -> Case:
    return Case({**shape, **settings}, "layers", norm)


CASES: dict[str, Case] = {
    # encoders
    "albert": Case({**SHAPE, "embedding_size": 8}, "encoder.albert_layer_groups.0.albert_layers"),
    "bert": bert(),
    "big_bird": bert(attention_type="original_full"),
    "camembert": bert(pad_token_id=1),
    "convbert": bert(embedding_size=16),
    "data2vec-text": bert(pad_token_id=1),
    "deberta": bert(),
    "deberta-v2": bert(relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"]),
    "distilbert": Case(
        {**IDS, "dim": WIDTH, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 40},
        "transformer.layer",
    ),
    "electra": bert(embedding_size=8),
    "esm": Case({**SHAPE, "pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "absolute"},
                "encoder.layer", "encoder.emb_layer_norm_after"),
    "fnet": bert(),
    # Its only nested model reads images.
    "git": bert(vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                               "intermediate_size": 24, "image_size": 8, "patch_size": 4}),
    "ibert": bert(pad_token_id=1, quant_mode=False),
    "longformer": Case({**SHAPE, "pad_token_id": 1, "attention_window": 4}, "encoder.layer",
                       layout=lambda states: states[:, :7]),
    "luke": bert(entity_vocab_size=5, entity_emb_size=8, pad_token_id=1),
    "megatron-bert": bert("encoder.ln"),
    "mobilebert": bert(embedding_size=8, intra_bottleneck_size=8, num_feedforward_networks=1),
    "modernbert": llama("final_norm", SHAPE, local_attention=4, cls_token_id=1, sep_token_id=2),
    "mpnet": bert(pad_token_id=1),
    "roberta": bert(pad_token_id=1),
    "roberta-prelayernorm": bert("LayerNorm", pad_token_id=1),
    "squeezebert": Case(
        {**SHAPE, "embedding_size": 16, **{f"{part}_groups": 1 for part in ("q", "k", "v", "post_attention",
         "intermediate", "output")}},
        # Hooks of the blocks themselves are not called.
        "encoder.layers.*.output", first="encoder.layers.0.attention", layout=lambda states: states.transpose(1, 2)),
    "xlm": Case({**IDS, "emb_dim": WIDTH, "n_layers": LAYERS, "n_heads": 2, "max_position_embeddings": 40},
                "layer_norm2", first="attentions.0"),
    "xlm-roberta": bert(pad_token_id=1),
    "xlm-roberta-xl": bert("encoder.LayerNorm", pad_token_id=1),
    "xlnet": Case({**IDS, "d_model": WIDTH, "n_layer": LAYERS, "n_head": 2, "d_inner": 24}, "layer",
                  layout=lambda states: states.transpose(0, 1)),
    "xmod": bert(pad_token_id=1, languages=["en_XX"], default_language="en_XX"),
    # decoders
    "bamba": llama("final_layernorm", SHAPE, num_key_value_heads=1, attn_layer_indices=[1], **MIXER),
    "biogpt": llama("layer_norm", SHAPE),
    "bloom": Case({**IDS, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 2}, "h", "ln_f"),
    "falcon": Case(SHAPE, "h", "ln_f"),
    "falcon_h1": llama("final_layernorm", KEY_VALUES, mamba_d_ssm=32, mamba_n_groups=1, **MIXER),
    "falcon_mamba": Case({**SSM, "state_size": 4}, "layers", "norm_f"),
    "gemma": llama(),
    "gemma2": llama(sliding_window=4),
    "gemma3_text": llama(sliding_window=4),
    "gpt2": Case(GPT, "h", "ln_f"),
    "gpt_neo": Case({**IDS, "hidden_size": WIDTH, "num_layers": LAYERS, "attention_types": [[["global"], LAYERS]],
                     "num_heads": 2, "max_position_embeddings": 40}, "h", "ln_f"),
    "gpt_neox": llama("final_layer_norm", SHAPE),
    "gpt_oss": llama(shape=EXPERTS),
    "gptj": Case({**GPT, "rotary_dim": 4}, "h", "ln_f"),
    "jamba": llama("final_layernorm", SHAPE, num_key_value_heads=1, num_experts=2, num_experts_per_tok=1,
                   mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                   expert_layer_offset=1, use_mamba_kernels=False),
    "llama": llama(),
    "mamba": Case({**SSM, "state_size": 4}, "layers", "norm_f"),
    "mamba2": Case({**SSM, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
                   "layers", "norm_f"),
    "mixtral": llama(shape=EXPERTS),
    "mpt": Case({**IDS, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": 2, "max_seq_len": 40}, "blocks", "norm_f"),
    "nemotron": llama(),
    "nemotron_h": llama("norm_f", mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=4, n_groups=1,
                        hybrid_override_pattern="M*-", chunk_size=4),
    "olmo": llama(shape=SHAPE),
    "openai-gpt": Case(GPT, "h"),
    "opt": Case({**IDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "ffn_dim": 24,
                 "word_embed_proj_dim": WIDTH, "max_position_embeddings": 40},
                "decoder.layers", "decoder.final_layer_norm"),
    "phi": llama("final_layernorm", SHAPE),
    "qwen3": llama(),
    "qwen3_moe": llama(shape=EXPERTS),
    "qwen3_next": llama(shape=EXPERTS, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
                        linear_value_head_dim=8,
                        layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "recurrent_gemma": llama("final_norm", SHAPE, num_key_value_heads=1, lru_width=16, attention_window_size=8),
    "rwkv": Case({**SSM, "attention_hidden_size": WIDTH, "context_length": 40}, "blocks", "ln_out"),
    "xglm": Case({**IDS, "d_model": WIDTH, "num_layers": LAYERS, "attention_heads": 2, "ffn_dim": 24,
                  "max_position_embeddings": 40}, "layers", "layer_norm"),
    "xlstm": Case({**SSM, "num_heads": 2, "v_dim_factor": 1.0}, "blocks", "out_norm"),
    # encoders of encoder-decoders
    "bart": Case(SEQ2SEQ, "layers"),
    "led": Case({**SEQ2SEQ, "max_encoder_position_embeddings": 40, "attention_window": 4}, "layers",
                layout=lambda states: states[:, :7]),
    "longt5": Case(T5, "block", "final_layer_norm"),
    "mbart": Case(SEQ2SEQ, "layers", "layer_norm"),
    "pegasus": Case(SEQ2SEQ, "layers", "layer_norm"),
    "t5": Case(T5, "block", "final_layer_norm"),
    # refused
    "canine": Case({**SHAPE, "num_hash_functions": 2, "num_hash_buckets": 20, "local_transformer_stride": 4,
                    "downsampling_rate": 4}, "", refusal="expected one vector for each token"),
    "funnel": Case({**IDS, "d_model": WIDTH, "block_sizes": [1, 1, 1], "block_repeats": [1, 1, 1], "n_head": 2,
                    "d_head": 8, "d_inner": 24, "architectures": ["FunnelModel"]}, "",
                   refusal="expected one vector for each token"),
    "gemma3n_text": Case(
        {**KEY_VALUES, "vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
         "laurel_rank": 4, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 3,
         "intermediate_size": [24] * 3, "layer_types": ["full_attention"] * 3}, "",
        refusal="expected one vector for each token"),
    "reformer": Case({**IDS, "hidden_size": WIDTH, "num_attention_heads": 2, "attention_head_size": 8,
                      "attn_layers": ["local", "local"], "axial_pos_shape": [4, 10], "axial_pos_embds_dim": [8, 8],
                      "feed_forward_size": 24, "max_position_embeddings": 40, "local_attn_chunk_length": 4,
                      "is_decoder": False}, "", refusal="expected one vector for each token"),
    "vit": Case({"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
                 "image_size": 8, "patch_size": 4}, "", refusal="expected a model of text"),
}  # fmt: skip
# Others have the blocks and norms of one of these. They are read in the slow tests.
UNLIKE = {
    "albert", "bamba", "bart", "bert", "bloom", "deberta-v2", "distilbert", "esm", "falcon", "fnet", "gemma", "git",
    "gpt2",
    "gpt_oss", "led", "llama", "longformer", "mamba", "mbart", "megatron-bert", "mobilebert", "modernbert", "mpt",
    "nemotron", "olmo", "openai-gpt", "opt", "recurrent_gemma", "roberta", "roberta-prelayernorm", "rwkv",
    "squeezebert", "t5", "xlm", "xlnet",
}  # fmt: skip
READ = [
    name if name in UNLIKE else pytest.param(name, marks=pytest.mark.slow)
    for name, case in CASES.items()
    if not case.refusal
]
REFUSED = [name for name, case in CASES.items() if case.refusal]


def build(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModel.from_config(AutoConfig.for_model(name, **CASES[name].settings | settings)).eval()
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    for parameter in model.parameters():
        # New norms scale by 1 and shift by 0, which could hide a state that is taken before or after a norm.
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def record_blocks(model: Any, name: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the input of the first block, the outputs of all blocks, and the output of the final norm."""
    case, states = CASES[name], []
    pattern = case.blocks if "*" in case.blocks else f"{case.blocks}.*"
    named_modules = dict(model.named_modules())
    blocks = [path for path in named_modules if re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), path)]

    def record_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not states:
            states.append(args[0] if args else kwargs["hidden_states"])

    def record_output(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    handles = [named_modules[case.first or blocks[0]].register_forward_pre_hook(record_input, with_kwargs=True)]
    for path in [*blocks, *([case.norm] if case.norm else [])]:
        handles.append(named_modules[path].register_forward_hook(record_output))
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    return [state if index > LAYERS else case.layout(state) for index, state in enumerate(states)]


def make_inputs() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", READ)
def test_each_row_is_what_the_block_computes_and_a_penalty_reads_the_same(name: str) -> None:
    model, inputs = build(name), make_inputs()
    expected = record_blocks(model, name, inputs)
    reader = HiddenStateReader(model)
    assert reader.norm is (model.get_submodule(CASES[name].norm) if CASES[name].norm else None)
    layers = [f"layer_{number}" for number in range(1, LAYERS + 1)]
    assert reader.names == ("embeddings", *layers, *(["final_norm"] if CASES[name].norm else []))
    with torch.no_grad():
        _, states = reader.call(model, **inputs, use_cache=False)
    reader.remove()
    assert tuple(states) == reader.names
    assert len(expected) == len(states)
    for tap, state in zip(states, expected, strict=True):
        torch.testing.assert_close(states[tap], state, rtol=0, atol=0, msg=tap)
    rows = list(states.values())
    assert all(not torch.allclose(one, other, atol=1e-3) for one, other in itertools.pairwise(rows))
    # The penalty's last layer is the one after the final norm.
    reader = HiddenStateReader(model, "with_embeddings", lambda states, tokens: [*states], lambda: True)
    with torch.no_grad():
        model(**inputs, use_cache=False)
    penalized = reader.take()
    reader.remove()
    expected_of_penalty = [*expected[:LAYERS], expected[-1]]
    assert len(penalized) == LAYERS + 1
    for number, (state, expected_state) in enumerate(zip(penalized, expected_of_penalty, strict=True)):
        torch.testing.assert_close(state, expected_state, rtol=0, atol=0, msg=str(number))
    assert not any(module._forward_pre_hooks for module in model.modules())
    check_norm_parameters(model, name)


def check_norm_parameters(model: Any, name: str) -> None:
    """Check that gain and bias are those by which the final norm multiplies."""
    if not CASES[name].norm:
        return
    norm = model.get_submodule(CASES[name].norm)
    parameters = norm_parameters(norm, WIDTH)
    assert parameters is not None
    weight, bias = (getattr(norm, attribute, None) for attribute in ("weight", "bias"))
    gain = torch.ones(WIDTH) if weight is None else weight.detach()
    expected_bias = torch.zeros(WIDTH) if bias is None else bias.detach()
    torch.testing.assert_close(parameters[0], gain.double() + (name in ONE_PLUS_WEIGHT), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(parameters[1], expected_bias.double(), rtol=1e-7, atol=1e-9)


def test_the_last_layer_of_opt_350m_is_before_its_projection() -> None:
    """It also has no final normalization, unlike the other OPT models."""
    make_model, blocks, _ = MODELS["opt_350m"]
    model = make_model().eval()
    outputs: list[Tensor] = []

    def record(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    for block in model.get_submodule(blocks):  # type: ignore[union-attr]
        block.register_forward_hook(record)
    with torch.no_grad():
        model(**make_inputs())
    expected, block_reader = [*outputs], BlockReader(model)
    assert block_reader.names == ("embeddings", "layer_1", "layer_2", "layer_3")
    states = block_reader(make_inputs())
    for tap, output in zip(block_reader.names[1:], expected, strict=True):
        torch.testing.assert_close(states[tap], output, rtol=0, atol=0)


@pytest.mark.parametrize("name", READ)
def test_batches_of_the_caller_have_the_same_states_as_texts(name: str) -> None:
    model, inputs = build(name), make_inputs()
    block_reader = BlockReader(model)
    expected = block_reader(inputs)
    with BatchReader(model, inputs) as reader:
        states, token_ids = reader.read(inputs)
    assert (tuple(states), reader.norm) == (tuple(expected), block_reader.norm)
    assert all(torch.equal(states[state].values, values) for state, values in expected.items())
    assert all(torch.equal(places.mask, inputs["attention_mask"].bool()) for places in states.values())
    assert token_ids is inputs["input_ids"]


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_in_one_line(name: str) -> None:
    model = build(name)
    with pytest.raises(UserError, match=CASES[name].refusal) as caught:
        HiddenStateReader(model)
    assert "\n" not in str(caught.value)


# Positions ------------------------------------------------------------------------------------------------------

POSITIONS_AFTER_PADDING = [
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "padding_id"),
    [(name, 1) for name in (*POSITIONS_AFTER_PADDING, "bert", "gpt2", "opt", "bart")] + [("roberta", 0), ("mpnet", 0)],
)
def test_the_longest_input_is_the_longest_that_a_model_with_learned_positions_takes(name: str, padding_id: int) -> None:
    model = build(name, pad_token_id=padding_id)
    length = find_max_input_length(model.config)
    assert length is not None
    with torch.no_grad():
        model(input_ids=torch.full((1, length), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, length + 1), 7))


# Trials ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "mamba", "gpt2"])
def test_a_trial_leaves_modes_and_random_numbers_as_they_are_and_no_hooks(name: str) -> None:
    model = build(name).train()
    next(model.children()).eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    find_layers(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_weights_is_refused_where_only_a_trial_could_tell() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("bloom", **CASES["bloom"].settings))
    with pytest.raises(UserError, match="BloomModel cannot be tried on token ids; expected a model of text"):
        find_layers(model)
