"""Where hidden states are read, against the blocks' own outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.geometry.taps import Taps

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50
}  # fmt: skip
OPT: dict[str, Any] = {**SHAPE, "ffn_dim": 64, "bos_token_id": 1, "eos_token_id": 1}
del OPT["intermediate_size"]
ENDS = {"bos_token_id": 1, "eos_token_id": 1}

Make = Callable[[], PreTrainedModel]
# The model, its blocks, and its final normalization.
MODELS: dict[str, tuple[Make, str, str | None]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SHAPE)), "encoder.layer", None),
    "albert": (
        lambda: hf.AlbertModel(hf.AlbertConfig(**SHAPE, embedding_size=16, **ENDS)), "encoder.albert_layer_groups", None
    ),
    "distilbert": (
        lambda: hf.DistilBertModel(hf.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=50)),
        "transformer.layer",
        None,
    ),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**SHAPE)), "encoder.layer", None),
    "gpt2": (lambda: hf.GPT2Model(hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=50, **ENDS)), "h", "ln_f"),
    "gpt_neox": (lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**SHAPE, **ENDS)), "layers", "final_layer_norm"),
    "opt": (
        lambda: hf.OPTModel(hf.OPTConfig(**OPT, word_embed_proj_dim=32)), "decoder.layers", "decoder.final_layer_norm"
    ),
    # OPT-350m: normalized within the layers, and projected to the width of the embeddings behind them.
    "opt_350m": (
        lambda: hf.OPTModel(hf.OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False)),
        "decoder.layers",
        None,
    ),
    "falcon": (
        lambda: hf.FalconModel(hf.FalconConfig(**{k: v for k, v in SHAPE.items() if "inter" not in k}, **ENDS)),
        "h",
        "ln_f",
    ),
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**SHAPE, **ENDS)), "layers", "norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_states_are_the_blocks_own(name: str) -> None:
    make, blocks, norm = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        # Fresh normalizations scale by 1 and shift by 0, and might hide a mix-up.
        parameter.data += 0.05 * torch.randn_like(parameter)
    inputs = {"input_ids": torch.randint(2, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    outputs: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(keep) for block in model.get_submodule(blocks)]  # type: ignore[union-attr]
    with torch.no_grad():
        last = model(**inputs).last_hidden_state
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        # transformers has hooks of its own for this, which it leaves there.
        model(**inputs, output_hidden_states=True)
    before = hooks(model)
    taps = Taps(model)
    states = taps(inputs)
    layers = [f"layer_{number}" for number in (1, 2, 3)]
    assert list(states) == taps.names == ["embeddings", *layers, *(["final_norm"] if norm else [])]
    assert len(outputs) == 3
    for layer, output in zip(layers, outputs, strict=True):
        assert torch.equal(states[layer], output), layer
    if norm:
        assert taps.norm is model.get_submodule(norm)
        assert torch.equal(states["final_norm"], last)
        assert not torch.allclose(states["final_norm"], states["layer_3"], atol=1e-3)
    elif name != "opt_350m":
        assert torch.equal(states["layer_3"], last)
    assert {tuple(state.shape) for state in states.values()} == {(2, 7, 32)}
    # Nothing of ours does.
    assert hooks(model) == before


def hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
